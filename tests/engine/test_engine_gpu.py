"""What only a GPU can show: replayed passes in half precision, copies on a stream, memory that ran out.

More of the engine's tests run there with ``FORETICK_TEST_DEVICE=cuda``, see `docs/testing.md`.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.device import guarded
from engine.engine import Engine
from engine.model.canary import check
from engine.model.loaded import Layers, LoadedModel
from engine.model.loading import prepare
from engine.sampling import by_torch, gumbel
from engine.seeding import Sampling
from engine.step import Chunk, OutOfMemory
from regions.ephemeral import Fork
from regions.offload.copies import StreamCopies
from regions.offload.copy_threads import CopyThreads
from regions.offload.host_tier import HostTier
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity
from regions.tape import Retention, Tape
from tests.engine.oracle import random_weights, tiny_config
from tests.kit import tolerance
from tests.kit.engine import scribble, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]


def model_of(dtype: torch.dtype, layers: Layers = "torch", **shape: int) -> LoadedModel:
    config = tiny_config("llama", layers=4, **{"hidden_size": 512, "num_attention_heads": 8, **shape})
    return prepare(random_weights(config).to(GPU, dtype), None, name="gpu", layers=layers)


def engine_of(model: LoadedModel, *, eager: bool = False) -> tuple[Engine, Tape]:
    """An engine with a tape of a few records."""
    rng = random.Random(4)
    engine = Engine(model, blocks=400, block_size=16, frame_limit=2000, eager=eager)
    tape = engine.open_tape("t", tokens(rng, 40), Retention(1200))
    for _ in range(20):
        engine.append(tape, [tokens(rng, 70)])
    return engine, tape


def ask(engine: Engine, forks: Sequence[Fork], questions: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logits after each question's last token, [questions, vocabulary]."""
    ends = [sum(map(len, questions[: i + 1])) - 1 for i in range(len(questions))]
    assert all(fork.acquire(len(question)) for fork, question in zip(forks, questions, strict=True))
    return engine.logits([Chunk(f, q) for f, q in zip(forks, questions, strict=True)], ends)


def answered(engine: Engine, tape: Tape, question: Sequence[int]) -> torch.Tensor:
    """The logits after a question, whose reader is gone then."""
    fork = tape.fork()
    logits = ask(engine, [fork], [question])
    fork.release()
    return logits


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("layers", "dim"), [("torch", 64), ("torch", 128), ("compiled", 64)])
def test_half_precision_is_the_dense_model(dtype: torch.dtype, layers: Layers, dim: int) -> None:
    """The canary raises where logits over regions leave the dense forward's rounding."""
    assert check(model_of(dtype, layers, head_dim=dim, num_key_value_heads=2)) < 0.05


def test_fused_layers_give_what_the_model_gives() -> None:
    """In fp32, captured and eager, one row and many, and with a last layer of which few rows are read."""
    model = model_of(torch.float32, "compiled")
    plain = engine_of(model_of(torch.float32))
    for fused in (engine_of(model), engine_of(model, eager=True)):
        for question in ([9, 8, 7, 6, 5, 4], [3]):
            here, there = answered(*fused, question), answered(*plain, question)
            tolerance.assert_logits(model, here, there)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_replayed_passes_give_what_eager_passes_give(dtype: torch.dtype) -> None:
    """Questions and the tokens after them, over a tape that goes on, at sizes that share graphs."""
    model = model_of(dtype)
    captured, eager = engine_of(model), engine_of(model, eager=True)
    rng = random.Random(9)
    for _ in range(6):
        questions = [tokens(rng, rng.randrange(3, 30)) for _ in range(rng.randrange(1, 5))]
        after = [tokens(rng, 1) for _ in questions]
        found = []
        for engine, tape in (captured, eager):
            forks = [tape.fork() for _ in questions]
            found.append([ask(engine, forks, questions), ask(engine, forks, after)])
            for fork in forks:
                fork.release()
            engine.append(tape, [[5] * 70])
        for replayed, plain in zip(*found, strict=True):
            tolerance.assert_logits(model, replayed, plain)
    graphs = captured[0].graphs
    assert graphs is not None
    assert graphs.replays > 0
    assert eager[0].graphs is None


def test_kv_that_was_swapped_while_passes_ran_gives_the_same_logits() -> None:
    """Out and back through pinned memory, with passes queued behind each copy and free blocks overwritten."""
    model = model_of(torch.bfloat16)
    engine, tape = engine_of(model)
    host = HostTier(engine.pool, 200)
    assert isinstance(host._copies, StreamCopies)
    assert host.pool.keys[0].is_pinned()
    rng = random.Random(2)
    other = engine.open_tape("other", tokens(rng, 40), Retention(1200))
    question = tokens(rng, 9)
    expected = answered(engine, tape, question)
    for _ in range(3):
        assert tape.swap_out(host)
        engine.append(other, [tokens(rng, 200)])  # queued while the copy runs
        assert tape.swap_in()
        tolerance.assert_logits(model, answered(engine, tape, question), expected)
        host.poll()
        scribble(engine.pool)


def test_memory_that_ran_out_is_one_error_and_the_next_pass_works() -> None:
    engine, tape = engine_of(model_of(torch.bfloat16))
    before = answered(engine, tape, [7, 8, 9])
    with pytest.raises(OutOfMemory):
        guarded(GPU, lambda: torch.empty(1 << 46, dtype=torch.uint8, device=GPU))
    tolerance.assert_logits(engine.model, answered(engine, tape, [7, 8, 9]), before)


def test_a_gpu_draws_the_tokens_of_a_cpu() -> None:
    """The same bits of noise; so the same tokens, restricted or not."""
    keys = torch.tensor([3, -5, 1 << 60])
    here, there = gumbel(keys, 4000), gumbel(keys.to(GPU), 4000).cpu()
    tolerance.assert_sums(there, here, width=1)
    logits = 3 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
    drawn = [(row, Sampling(0.8, seed=row, index=3, top_p=0.9, top_k=50)) for row in (0, 2)]
    rows = [by_torch(each, None, drawn).tolist() for each in (logits, logits.to(GPU))]
    assert [row[0] for row in rows[0]] == [row[0] for row in rows[1]]
    for cpu, gpu in zip(*rows, strict=True):
        assert gpu[1:] == pytest.approx(cpu[1:])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_session_goes_to_disk_and_returns_bit_by_bit_beside_passes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """By another thread, through pinned memory on a stream of its own, while others write around it."""
    engine, tape = engine_of(model_of(dtype))
    pool, now, copies = engine.pool, [0], CopyThreads()
    residency = Residency(pool, Idleness(1, lambda: tmp_path), lambda: now[0])
    residency.serve(copies, lambda call: None)
    residency.attach(tape, Identity.of(pool, model="m", tokenizer="t", frozen=[]))

    def kv() -> list[torch.Tensor]:
        parts = [[t[:, slot : slot + n] for slot, n in tape.live_ranges] for t in pool.tensors]
        return [torch.cat(each, 1).cpu().view(torch.uint8) for each in parts]

    before, logits = kv(), answered(engine, tape, [9, 8, 7])
    now[0] = 10
    assert residency.spill_idle()
    scribble(pool)
    assert copies.wait(60)
    residency.poll()
    assert not tape.resident
    scribble(pool)
    assert not tape.bring_back()
    scribble(pool)
    assert copies.wait(60)
    residency.poll()
    assert tape.resident
    assert all(torch.equal(*each) for each in zip(before, kv(), strict=True))
    tolerance.assert_logits(engine.model, answered(engine, tape, [9, 8, 7]), logits)
    tape.release()
