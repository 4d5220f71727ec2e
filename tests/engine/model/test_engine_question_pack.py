"""A question pack's rows run by its merged weights over the model's KV, and no other row changes by a bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.model.adapted import adapted, merged
from engine.model.architectures import ModelError
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.question_pack import (
    TOKEN,
    PackError,
    QuestionPack,
    located,
    pinned,
    read_head,
    read_pack,
    write_pack,
)
from engine.model.remembered import EMBEDDING, tensors_of
from engine.step import Chunk
from regions.tape import Retention, Tape
from tests.kit.models import terse_directory
from tests.kit.packs import random_pack
from tests.kit.tolerance import apart, largest, rounding

FROZEN, BARS = list(range(30, 47)), [list(range(300 + 6 * n, 306 + 6 * n)) for n in range(7)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_directory(tmp_path_factory.mktemp("terse") / "model")


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(directory, layers="compiled")


def opened(loaded: LoadedModel) -> tuple[Engine, Tape]:
    engine = Engine(loaded, blocks=64, block_size=4)
    tape = engine.open_tape("t", FROZEN, Retention(200))
    engine.append(tape, BARS)
    return engine, tape


def logits(engine: Engine, tape: Tape, questions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Behind each question, of one pass."""
    with ExitStack() as stack:
        batch = []
        for tokens in questions:
            fork = tape.fork()
            stack.callback(fork.release)
            assert fork.acquire(len(tokens))
            batch.append(Chunk(fork, tokens))
        ends = np.cumsum([len(tokens) for tokens in questions]) - 1
        return list(engine.logits(batch, ends.tolist()))


def dense(directory: Path, pack: QuestionPack) -> torch.Tensor:
    """Behind the pack's tokens: transformers with the merged weights, over the model's own cache."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = torch.tensor([[*FROZEN, *(token for bar in BARS for token in bar)]])
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
        weights = merged(tensors_of(directory, torch.float32), pack)
        taught = copy.deepcopy(model)
        del weights[EMBEDDING]
        head = weights.pop("lm_head.weight")
        taught.lm_head.weight = torch.nn.Parameter(head)
        missing, unexpected = taught.load_state_dict(weights, strict=False)
        assert set(missing) <= {EMBEDDING, "lm_head.weight"}
        assert not unexpected
        rows = torch.from_numpy(np.array(pack.tensors[TOKEN]))[None]
        found: torch.Tensor = taught(inputs_embeds=rows, past_key_values=cache).logits[0, -1]
    return found


@pytest.mark.parametrize("tokens", [1, 3])
def test_its_rows_are_those_of_the_merged_weights_over_the_models_kv(
    directory: Path, loaded: LoadedModel, tokens: int
) -> None:
    engine, tape = opened(loaded)
    pack = random_pack(directory, tokens=tokens, seed=tokens)
    first = engine.install(adapted(loaded, directory, pack))
    (found,) = logits(engine, tape, [range(first, first + tokens)])
    expected = dense(directory, pack)
    assert apart(found, expected) <= rounding(largest(expected), width=256, depth=2)
    (own,) = logits(engine, tape, [[5]])
    assert apart(own, expected) > 0.1 * largest(expected)


@pytest.mark.parametrize("seed", range(4))
def test_other_rows_stay_the_same_to_the_bit_in_any_batch_with_packs(
    directory: Path, loaded: LoadedModel, seed: int
) -> None:
    questions: list[Sequence[int]] = [[5], [6, 7, 8], [9]]
    engine, tape = opened(loaded)
    asked = []
    for n in (1, 2):
        first = engine.install(adapted(loaded, directory, random_pack(directory, tokens=n, seed=n)))
        asked.append(range(first, first + n))
    apart_from_others = [logits(engine, tape, [each])[0] for each in asked]
    mixed = [*questions, *asked]
    order = np.random.default_rng(seed).permutation(len(mixed)).tolist()
    found = dict(zip(order, logits(engine, tape, [mixed[n] for n in order]), strict=True))
    ours = [n for n in order if n < len(questions)]
    plain, without = opened(loaded)
    for n, expected in zip(ours, logits(plain, without, [questions[n] for n in ours]), strict=True):
        assert torch.equal(found[n], expected)
    for n, expected in enumerate(apart_from_others, len(questions)):
        assert apart(found[n], expected) <= rounding(largest(expected), width=256, depth=2)


def test_a_tape_stays_the_same_to_the_bit_where_packs_are_asked_in_its_passes(
    directory: Path, loaded: LoadedModel
) -> None:
    engine, tape = opened(loaded)
    first = engine.install(adapted(loaded, directory, random_pack(directory)))
    bar, fork = [401, 402, 403, 404, 405, 406], tape.fork()
    tape.make_room([len(bar)])
    assert tape.acquire(len(bar))
    assert fork.acquire(1)
    _, answer = engine.execute([Chunk(tape, bar, sample=False), Chunk(fork, [first], choices=(20, 21))])
    tape.commit([len(bar)])
    fork.release()
    assert answer is not None
    assert answer.token in (20, 21)
    assert len(answer.logits) == 2
    plain, without = opened(loaded)
    plain.append(without, [bar])
    assert all(map(torch.equal, logits(engine, tape, [[5], [11]]), logits(plain, without, [[5], [11]])))


def test_a_pack_of_another_model_or_of_other_shapes_is_refused(directory: Path, loaded: LoadedModel) -> None:
    pack = random_pack(directory)
    other = replace(pack, head=msgspec.structs.replace(pack.head, base="0123456789abcdef"))
    with pytest.raises(ModelError, match="to model 0123456789abcdef, and"):
        adapted(loaded, directory, other)
    broken = replace(pack, tensors={**pack.tensors, "model.layers.0.self_attn.q_proj.b": pack.tensors[TOKEN]})
    with pytest.raises(ModelError, match="not fit the model"):
        adapted(loaded, directory, broken)


def test_a_file_comes_back_as_it_was_written(directory: Path, tmp_path: Path) -> None:
    pack, file = random_pack(directory, tokens=2), tmp_path / "near.pack"
    write_pack(file, pack)
    again = read_pack(file)
    assert again.head == pack.head == read_head(file)
    assert again.tokens == 2
    assert all((again.tensors[name] == array).all() for name, array in pack.tensors.items())
    assert pinned(str(file)) == pinned(pinned(str(file))) == f"{file}@{pack.head.revision}"
    assert located(pinned(str(file))) == (file, pack.head.revision)
    write_pack(file, random_pack(directory, tokens=2, seed=1))
    with pytest.raises(PackError, match="another question pack by"):
        pinned(f"{file}@{pack.head.revision}")


@pytest.mark.parametrize("kept", [0, 5, 8, 300, 0.5, 0.999])
def test_a_cut_file_is_refused(directory: Path, tmp_path: Path, kept: float) -> None:
    file = tmp_path / "near.pack"
    write_pack(file, random_pack(directory))
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(PackError, match="cut"):
        read_pack(file)


def test_a_changed_byte_and_what_is_no_pack_are_refused(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "near.pack"
    write_pack(file, random_pack(directory))
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)
    with pytest.raises(PackError, match="weights are not those"):
        read_pack(file)
    with pytest.raises(PackError, match="is no question pack"):
        read_pack(directory / "model.safetensors")
    with pytest.raises(PackError, match=r"question pack .*: No"):
        read_head(tmp_path / "none.pack")
    os.mkfifo(tmp_path / "pipe.pack")
    with pytest.raises(PackError, match="no regular file"):
        read_head(tmp_path / "pipe.pack")
    write_pack(file, random_pack(directory))
    file.write_bytes(file.read_bytes().replace(rb"\"version\":1", rb"\"version\":2"))
    with pytest.raises(PackError, match="is 2 instead of"):
        read_head(file)
