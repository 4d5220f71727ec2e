"""KV of another type than the weights: the dense forward over KV that is rounded alike, wherever it lies."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.cpu_kernel.backend import KV_KINDS, CpuKernelAttention
from engine.attention.reference import ReferenceAttention
from engine.compiled.layers import _put
from engine.engine import Engine
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.kv_type import KVType, with_kv
from engine.model.loaded import ForwardContext, LoadedModel
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.kv_codes import SCALE, numbers, stored
from regions.kv_tensors import KVPool
from tests.engine.attention.layers import Layer, defined
from tests.engine.oracle import History, oracle_logits, tiny
from tests.engine.test_engine_histories import OPERATIONS, Session
from tests.kit import tolerance
from tests.kit.engine import tokens

ROUNDED: tuple[KVType, ...] = ("bfloat16", "int8")
FLIPS = 5e-4
"""What a number on the border between two codes may change, of the logits' size: it is rounded either way."""


@cache
def model(architecture: str, kv: KVType = "int8") -> LoadedModel:
    """Compiled layers, or transformers' for `gemma2`; attention by our kernel, or torch's for heads of 24."""
    heads = {"head_dim": 24 if (architecture, kv) == ("mistral", "int8") else 16}
    return with_kv(tiny(architecture, layers=2, **heads), kv)


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories note at which positions the keys of their tokens are written."""
    latest: list[int] = []
    forward, add, begin = LoadedModel.forward, History.add, History.begin

    def noted(self: LoadedModel, context: ForwardContext, *arguments: Any) -> torch.Tensor:
        latest[:] = context.metadata.positions().tolist()
        return forward(self, context, *arguments)

    def added(self: History, of: Any, *arguments: Any, **named: Any) -> slice:
        self.stored_at.extend(latest[: len(of)])
        del latest[: len(of)]
        return add(self, of, *arguments, **named)

    def begun(frozen: list[int]) -> History:
        return replace(begin(frozen), stored_at=list(range(len(frozen))))

    monkeypatch.setattr(LoadedModel, "forward", noted)
    monkeypatch.setattr(History, "add", added)
    monkeypatch.setattr(History, "begin", begun)


@pytest.mark.usefixtures("positions")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "qwen3"])
@pytest.mark.parametrize("kv", ROUNDED)
def test_any_history_gives_the_dense_logits_over_kv_that_is_rounded_alike(
    tmp_path: Path, kv: KVType, architecture: str, seed: int
) -> None:
    """Appends that evict, forks that grow and are preempted, swaps, compaction, snapshots."""
    loaded = model(architecture, kv)
    world = Session(loaded, seed, tmp_path)
    world.append_some()
    world.fork()
    for operation in world.rng.choices([each for each in OPERATIONS if each != "cut"], k=40):
        world.apply(operation)
    world.fork()
    for reader in world.readers:
        world.grow(reader)
    history, checks = world.history, world.history.checks
    expected, unrounded = (oracle_logits(loaded, each) for each in (history, replace(history, stored_at=[])))
    off, without = (
        max(apart(actual, each[where]) for where, actual in checks) for each in (expected, unrounded)
    )
    assert off < without / 4
    assert off < FLIPS
    world.close()


def read(loaded: LoadedModel, parts: list[int], attention: Attention | None = None) -> tuple[Any, KVPool]:
    """Logits of the same 60 tokens in passes over ``parts`` of them, and the pool."""
    engine = Engine(loaded, blocks=24, block_size=4, attention=attention)
    fork, text, found = Fork(engine.pool, frame_limit=400), tokens(random.Random(3), 60), []
    for part in parts:
        assert fork.acquire(part)
        found.append(engine.logits([Chunk(fork, text[fork.length : fork.length + part])]))
    fork.release()
    return torch.cat(found), engine.pool


BACKENDS = [CpuKernelAttention, CpuAttention, ReferenceAttention]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("kv", ROUNDED)
def test_a_pass_sees_its_own_tokens_as_later_passes_do(kv: KVType, architecture: str, backend: Any) -> None:
    """However a prompt is cut; torch's kernels compute over bfloat16 in it."""
    loaded = model(architecture, kv)
    whole, pool = read(loaded, [60], backend())
    plain, _ = read(replace(loaded, kv=None), [60])
    assert pool.dtype == loaded.kv_dtype
    bound = apart(whole, plain) / 3 if kv == "int8" or backend is CpuKernelAttention else 0.01
    assert bound > 1e-4
    for parts in ([1] * 60, [7, 1, 40, 12]):
        assert apart(read(loaded, parts, backend())[0], whole) < bound
    assert apart(whole, read(loaded, [60])[0]) < bound


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_layer_s_keys_and_values_are_stored_to_the_bit_as_defined(architecture: str) -> None:
    """Those of the first layer, which depend on no attention: written by compiled code and by torch's."""
    loaded = model(architecture)
    (_, codes), (_, floats) = read(loaded, [60]), read(replace(loaded, kv=None), [60])
    assert numbers(codes.keys[0]).any()
    for held, exact in ((codes.keys, floats.keys), (codes.values, floats.values)):
        assert torch.equal(held[0], stored(exact[0], torch.int8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_compiled_layers_store_what_is_not_finite_as_nan(bad: float) -> None:
    """And what is too small for a scale as 0; in the slots given, and no others."""
    rows, slots = torch.zeros(1, 3, 16), [4, 1, 2]
    rows[0, :, 3] = torch.tensor([2.0, bad, 1e-42])
    pool = torch.zeros(1, 5, 16 + SCALE, dtype=torch.int8)
    place = 1, 3, 16, pool.stride(0), np.array(slots), (0, 3)
    _put(rows.data_ptr(), pool.data_ptr(), KV_KINDS[torch.int8], *place)
    expected = numbers(stored(rows, torch.int8))
    assert expected[0, 1].isnan().all()
    assert torch.equal(numbers(pool[:, slots]).nan_to_num(7), expected.nan_to_num(7))
    assert not pool[:, [0, 3]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 20.0)])
def test_every_backend_reads_codes(backend: Any, window: int | None, softcap: float | None) -> None:
    for seed in range(5):
        call = Layer(seed, dtype=torch.int8).mixed().call(window, softcap, sinks=seed % 2 == 0)
        tolerance.assert_sums(backend()(call), defined(call), width=call.keys.shape[1])


def test_another_type_of_kv_is_another_model_and_that_of_the_weights_is_not() -> None:
    plain = tiny("llama", layers=1)
    half = replace(plain, dtype=torch.bfloat16)
    assert with_kv(plain, "auto") is plain
    assert with_kv(half, "bfloat16") is half
    assert len({plain.revision, *(with_kv(plain, kv).revision for kv in ROUNDED)}) == 3


def test_a_gpu_has_kv_of_the_type_of_the_weights() -> None:
    with pytest.raises(ModelError, match="is for a CPU"):
        with_kv(replace(tiny("llama", layers=1), device=torch.device("cuda")), "int8")


def test_kv_that_changes_logits_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_KV", 1e-6)
    with pytest.raises(ModelError, match="kv_dtype int8"):
        with_kv(tiny("llama", layers=1), "int8")
