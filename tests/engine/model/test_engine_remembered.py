"""A start with what an earlier one found: the same model to the bit, without transformers' modelling code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from daemon.engine.build import checked
from engine.engine import Engine
from engine.measurement_cache import Memory
from engine.model import loading, remembered
from engine.model.embedded import build_tokenizer
from engine.model.loaded import Layers, LoadedModel, Weights
from engine.model.loading import load_model
from engine.model.revision import revision_of
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import ARCHITECTURES, random_weights, tiny_config

VOCABULARY = 2048
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
TOKENS = [3 + 31 * n % 1400 for n in range(40)]
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "yarn": {"rope_parameters": {**ARCHITECTURES["gpt_oss"]["rope_parameters"], "rope_theta": 1000.0}},
}


def saved(path: Path, architecture: str = "llama", dtype: torch.dtype = torch.float32, **extra: Any) -> Path:
    kind = architecture if architecture in ARCHITECTURES else "llama"
    model = random_weights(tiny_config(kind, vocab_size=VOCABULARY, layers=3, **extra)).to(dtype)
    model.save_pretrained(path)
    build_tokenizer(VOCABULARY).save_pretrained(path)
    return path


class Cache:
    """Verdicts and loads, in a directory of its own."""

    def __init__(self, path: Path) -> None:
        self.memory = Memory(lambda: path)

    def first(
        self, model: Path, dtype: str = "auto", layers: Layers = "compiled", weights: Weights = "auto"
    ) -> LoadedModel:
        """A start that remembers."""
        loaded = checked(load_model(model, dtype=dtype, device="cpu", layers=layers, weights=weights))
        remembered.remember(loaded, model, dtype, layers, self.memory)
        return loaded

    def next(
        self, model: Path, dtype: str = "auto", layers: Layers = "compiled", weights: Weights = "auto"
    ) -> LoadedModel | None:
        return remembered.recall(model, dtype, layers, self.memory, weights=weights)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "measured")


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of a prefix, records in two frames with one evicted, and a question."""
    engine = Engine(loaded, blocks=24, block_size=4)
    tape = engine.open_tape("tape", TOKENS[:5], Retention(20))
    rows = []
    for start in range(5, 35, 10):
        tape.make_room([10])
        assert tape.acquire(10)
        rows.append(engine.logits([Chunk(tape, TOKENS[start : start + 10])]))
        tape.commit([10])
        tape.new_frame(at=0)
    fork = tape.fork()
    assert fork.acquire(5)
    rows.append(engine.logits([Chunk(fork, TOKENS[35:])]))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PLAIN)
def test_the_next_start_has_the_same_model_to_the_bit(
    kind: str, dtype: torch.dtype, cache: Cache, tmp_path: Path
) -> None:
    model = saved(tmp_path / "model", kind, dtype, **PLAIN[kind])
    first, again = cache.first(model), cache.next(model)
    assert again is not None
    assert again.model is None
    for field in fields(LoadedModel):
        if field.name not in ("model", "tokenizer", "rotations", "decoder"):
            assert getattr(again, field.name) == getattr(first, field.name), field.name
    assert [each.inv_freq.tolist() for each in again.rotations] == [
        each.inv_freq.tolist() for each in first.rotations
    ]
    assert again.layers_run == first.layers_run
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert torch.equal(logits(again), logits(first))


def test_weights_are_read_in_the_type_that_is_asked_for(cache: Cache, tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    half, whole = cache.first(model, "bfloat16"), cache.first(model)
    again, as_saved = cache.next(model, "bfloat16"), cache.next(model)
    assert again is not None
    assert as_saved is not None
    assert (again.dtype, as_saved.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(logits(again), logits(half))
    assert torch.equal(logits(as_saved), logits(whole))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "biased"])
def test_quantised_weights_are_other_models_which_the_next_start_has_to_the_bit(
    kind: str, dtype: str, cache: Cache, tmp_path: Path
) -> None:
    model = saved(tmp_path / "model", kind, **PLAIN[kind])
    ways: list[Weights] = ["float", "int8", "int4"]
    firsts = [cache.first(model, dtype, weights=each) for each in ways]
    assert len({each.revision for each in firsts}) == 3
    assert firsts[0].revision == revision_of(model)
    for weights, first in zip(ways, firsts, strict=True):
        again = cache.next(model, dtype, "auto" if weights == "int4" else "compiled", weights)
        if weights == "int4":
            assert again is None  # that start would have found something else
            again = cache.next(model, dtype, weights=weights)
        assert again is not None
        assert (again.weights, again.revision, again.layers_run) == (
            weights,
            first.revision,
            first.layers_run,
        )
        assert torch.equal(logits(again), logits(first))


def test_a_checkpoint_may_be_in_several_files(cache: Cache, tmp_path: Path) -> None:
    model = saved(tmp_path / "one")
    parts = tmp_path / "parts"
    saved(parts)
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(parts, max_shard_size="100KB")
    (parts / "model.safetensors").unlink(missing_ok=True)
    assert len(list(parts.glob("*.safetensors"))) > 2
    first, again = cache.first(parts), cache.next(parts)
    assert again is not None
    assert torch.equal(logits(again), logits(first))


@pytest.mark.parametrize(
    ("kind", "extra", "layers"),
    [
        ("gemma2", {}, "compiled"),
        ("llama", {"hidden_act": "relu"}, "compiled"),
        ("llama", {}, "torch"),
        (
            "dynamic",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            "compiled",
        ),
    ],
)
def test_what_transformers_code_must_run_is_not_remembered(
    kind: str, extra: dict[str, Any], layers: Layers, cache: Cache, tmp_path: Path
) -> None:
    model = saved(tmp_path / "model", kind, **extra)
    assert cache.next(model, layers=layers) is None
    cache.first(model, layers=layers)
    assert cache.next(model, layers=layers) is None


def torn(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def other_weights(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    loaded.save_pretrained(model)


def other_configuration(model: Path) -> None:
    told = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**told, "rms_norm_eps": 0.1}))


@pytest.mark.parametrize("change", [torn, other_weights, other_configuration])
def test_another_model_in_its_place_is_loaded_as_if_for_the_first_time(
    change: Callable[[Path], None], cache: Cache, tmp_path: Path
) -> None:
    model = saved(tmp_path / "model")
    cache.first(model)
    change(model)
    assert cache.next(model) is None


@pytest.mark.parametrize("change", [torn, other_weights])
def test_files_that_only_the_fingerprint_takes_for_the_same_fail_the_canary(
    change: Callable[[Path], None],
    cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module in (loading, remembered):
        monkeypatch.setattr(module, "revision_of", lambda path, adapter, weights: "alike")
    model = saved(tmp_path / "model")
    cache.first(model)
    assert cache.next(model) is not None
    change(model)
    assert cache.next(model) is None
    assert "is loaded as if for the first time" in caplog.text


def test_a_verdict_that_is_gone_is_measured_again(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MEMORY", cache.memory)
    model = saved(tmp_path / "model")
    first = cache.first(model, layers="auto")
    assert first.choice is not None
    again = cache.next(model, layers="auto")
    assert (again is not None) == first.choice.verdict.compiled
    first.choice.path.unlink()
    assert cache.next(model, layers="auto") is None


def test_the_next_start_needs_no_modelling_code(tmp_path: Path) -> None:
    """The embedded model, by the daemon's own way to load it, in processes of their own."""
    script = (
        "import sys\n"
        "from daemon.config.schema import Config, ModelConfig\n"
        "from daemon.engine.build import load\n"
        "load(Config(model=ModelConfig(layers='compiled')))\n"
        "print('transformers.modeling_utils' in sys.modules, 'torch._dynamo' in sys.modules)\n"
    )
    environment = {**os.environ, "FORETICK_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(numba_cache())}
    said = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert said[0][0] == "True"
    assert said[1] == ["False", "False"]


def numba_cache() -> Path:
    """Where kernels are compiled already."""
    from support import numba_kernel

    return numba_kernel._DIRECTORY.parent
