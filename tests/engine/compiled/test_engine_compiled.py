"""Compiled layers: products, norms and rotations against float64, whole models against transformers' code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from engine.compiled.layers import DEPTH, _put, linear, rms_norm, rotated_heads
from engine.compiled.packed_products import PANEL
from engine.compiled.packing import Panels, _interleaved, _pairs, _panels, decoder_of, release_plain
from engine.cpu.emit import host_has
from engine.cpu.vectors import PAIRED
from engine.engine import Engine
from engine.model import canary
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model, prepare
from engine.model.terse import TAPE_MODEL
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import random_weights, tiny, tiny_config
from tests.kit import tolerance

DTYPES = [torch.float32, torch.bfloat16]
needs_pairs = pytest.mark.skipif(not host_has(PAIRED), reason="this CPU has no products of bfloat16")
WAYS = [
    pytest.param(torch.float32, _panels, id="float32"),
    pytest.param(torch.bfloat16, _panels, id="bfloat16 as floats"),
    pytest.param(torch.bfloat16, _pairs, id="bfloat16 in pairs", marks=needs_pairs),
]
Packing = Callable[[torch.Tensor], Any]


def near(
    actual: torch.Tensor, expected: torch.Tensor, width: int, dtype: torch.dtype = torch.float32
) -> None:
    tolerance.assert_sums(actual, expected, width=width, dtype=dtype)


def multiplied(
    x: torch.Tensor, depth: int, weights: Panels, start: Any, step: int, out: Any, gate: bool = False
) -> None:
    """`linear` of all panels."""
    array, kind = weights.array, weights.kind
    linear(
        len(x), x.data_ptr(), x.stride(0) * x.itemsize, depth, array.ctypes.data, kind, 0, len(array),
        start.ctypes.data, step, out.ctypes.data, out.strides[0], gate,
    )  # fmt: skip


def inputs_of(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """``x`` as a product takes it, with an even number of columns for pairs."""
    return functional.pad(x, (0, x.shape[1] % 2)).bfloat16() if packing is _pairs else x


@pytest.mark.parametrize(("dtype", "packing"), WAYS)
@pytest.mark.parametrize("depth", [1, 48, DEPTH, 2 * DEPTH + 7])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 20])
def test_a_product_with_panels_is_that_of_float64(
    rows: int, depth: int, dtype: torch.dtype, packing: Packing
) -> None:
    """With a bias, with what it is added to, and in place; factors in bfloat16 are exact."""
    generator = torch.Generator().manual_seed(rows * depth)
    outputs = 2 * PANEL + 9
    padded = 3 * PANEL
    x, bias = torch.randn(rows, depth, generator=generator), torch.randn(padded, generator=generator)
    x = inputs_of(x, packing)
    weight = torch.randn(outputs, depth, generator=generator).to(dtype)
    expected = x[:, :depth].double() @ weight.double().T
    out = np.empty((rows, padded), np.float32)
    multiplied(x, depth, packing(weight), bias.numpy(), 0, out)
    near(torch.from_numpy(out[:, :outputs]).double(), expected + bias[:outputs].double(), depth)
    before = out.copy()
    multiplied(x, depth, packing(weight), out, out.strides[0], out)
    near(torch.from_numpy((out - before)[:, :outputs]).double(), expected, 4 * depth)


@pytest.mark.parametrize(("dtype", "packing"), WAYS)
@pytest.mark.parametrize("depth", [48, 2 * DEPTH + 8])
@pytest.mark.parametrize("inner", [32, 100])
def test_a_gated_product_is_silu_of_one_half_times_the_other(
    inner: int, depth: int, dtype: torch.dtype, packing: Packing
) -> None:
    """With pairs it is the next product's input, so rounded to bfloat16 as torch rounds."""
    generator = torch.Generator().manual_seed(inner)
    gate, up = (torch.nn.Linear(depth, inner, bias=True) for _ in range(2))
    for each in (gate, up):
        torch.nn.init.normal_(each.weight, std=3 / depth**0.5, generator=generator)
        each.requires_grad_(False)
        each.weight.data = each.weight.to(dtype)
    x = torch.randn(7, depth, generator=generator)
    x[3] *= 100  # far out on both sides of SiLU
    x = inputs_of(x, packing)
    weights = packing(_interleaved(gate.weight, up.weight))
    bias = _interleaved(gate.bias, up.bias)
    out = np.empty((7, len(weights.array) * PANEL // 2), np.uint16 if packing is _pairs else np.float32)
    multiplied(x, depth, weights, bias.numpy(), 0, out, True)
    gates, ups = (functional.linear(x.double(), e.weight.double(), e.bias.double()) for e in (gate, up))
    found, expected = torch.from_numpy(out[:, :inner]), functional.silu(gates) * ups
    if packing is _pairs:
        found = found.view(torch.bfloat16)
    for row in (3, slice(0, 3), slice(4, 7)):
        near(found[row].double(), expected[row], depth, found.dtype)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x = torch.ones(8, 40)
    x[2, 5], x[4, 0] = float("nan"), float("inf")
    out = np.empty((8, PANEL), np.float32)
    weight, bias = torch.ones(PANEL, 40), np.zeros(PANEL, np.float32)
    for gate in (False, True):
        multiplied(x, 40, _panels(weight), bias, 0, out, gate)
        finite = np.isfinite(out[:, : PANEL // 2]).all(1)
        assert finite.tolist() == [True, True, False, True, False, True, True, True]


def test_norms_and_rotations_are_those_of_float64() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5, 64, generator=generator), torch.randn(64, generator=generator)
    x[:, 48:] = 0  # padding
    out = np.zeros((5, 64), np.float32)
    rms_norm(5, x.data_ptr(), 256, 48, weight.data_ptr(), np.float32(1e-6), out.ctypes.data, False)
    expected = functional.rms_norm(x[:, :48].double(), (48,), weight[:48].double(), 1e-6)
    near(torch.from_numpy(out[:, :48]).double(), expected, 48)
    assert not out[:, 48:].any()
    halves = np.zeros((5, 128), np.uint16)
    rms_norm(5, x.data_ptr(), 256, 48, weight.data_ptr(), np.float32(1e-6), halves.ctypes.data, True)
    rounded = torch.from_numpy(out).bfloat16()
    assert torch.equal(torch.from_numpy(halves[:, :64]).view(torch.bfloat16), rounded)
    norm, angles = torch.randn(16, generator=generator), torch.randn(5, 6, generator=generator)
    at = np.array([7, 2, 4, 0, 4])
    table = torch.zeros(8, 6).index_copy_(0, torch.from_numpy(at), angles)
    angles = table[at]
    heads, parts = np.empty((2, 5, 16), np.float32), (x.clone().numpy(), 8, table.cos().numpy())
    for some in ((0, 3), (3, 5)):  # as threads share rows
        rotated_heads(*parts, table.sin().numpy(), at, norm.numpy(), np.float32(1e-6), heads, some)
    normed = functional.rms_norm(x[:, 8:40].double().view(5, 2, 16), (16,), norm.double(), 1e-6).transpose(
        0, 1
    )
    turned = torch.view_as_complex(torch.stack((normed[..., :6], normed[..., 6:12]), -1).contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones(5, 6).double(), angles.double()))
    near(
        torch.from_numpy(heads).double(),
        torch.cat((turned[..., 0], turned[..., 1], normed[..., 12:]), -1),
        16,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_what_is_stored_is_torch_s_own_conversion(dtype: torch.dtype) -> None:
    """Halfway cases, subnormal numbers, infinities and NaN included."""
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 300, 8), generator=torch.Generator().manual_seed(4))
    bits[0, :150] = bits[0, :150] // 65536 * 65536 + 32768
    new = bits.to(torch.int32).view(torch.float32)
    new[0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    pool = torch.zeros(2, 400, 8, dtype=dtype)
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(5))[:300]
    half = int(dtype == torch.bfloat16)
    _put(new.data_ptr(), pool.data_ptr(), half, 2, 300, 8, 400 * 8, slots.numpy(), (0, 300))
    assert torch.equal(pool[:, slots].nan_to_num(7.0), new.to(dtype).nan_to_num(7.0))


@pytest.mark.parametrize(("dtype", "packing"), WAYS)
@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 100, "hidden_size": 72}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": None, "head_dim": 24}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama with biases", "llama tied", "mistral", "qwen2", "qwen3"],
)
def test_a_compiled_model_gives_the_logits_of_the_dense_one(
    architecture: str, extra: dict[str, object], dtype: torch.dtype, packing: Packing
) -> None:
    model = random_weights(tiny_config(architecture, **extra)).to(dtype)
    loaded = prepare(model, None, name="compiled")
    loaded = replace(loaded, decoder=decoder_of(model, pairs=packing is _pairs))
    assert loaded.decoder is not None
    assert loaded.decoder.pairs == (packing is _pairs)
    canary.check(loaded)
    tokens = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(6)).tolist()
    expected = canary.dense_logits(loaded, tokens)
    loaded.release_plain()  # nothing of transformers' linears is read any more
    engine = Engine(loaded, blocks=40, block_size=4)
    tape = engine.open_tape("a", tokens[:7], Retention(100))
    found = []
    for first, stop, rows in ((7, 10, [0, 1, 2]), (10, 40, range(30)), (40, 60, [19])):
        tape.acquire(stop - first)
        found.append(engine.logits([Chunk(tape, tokens[first:stop])], rows))
        tape.commit([stop - first])
    tolerance.assert_logits(loaded, torch.cat(found), expected[[*range(7, 40), 59]])


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [("gemma2", {}), ("mistral", {"sliding_window": 9}), ("llama", {"hidden_act": "gelu"}), ("olmo2", {})],
)
def test_other_models_run_as_transformers_has_them(architecture: str, extra: dict[str, object]) -> None:
    assert tiny(architecture, **extra).decoder is None


def test_linears_of_another_class_are_left_alone() -> None:
    class Quantised(torch.nn.Linear):
        pass

    model = random_weights(tiny_config("llama"))
    model.model.layers[1].mlp.up_proj.__class__ = Quantised
    assert decoder_of(model) is None


def test_packed_weights_are_held_once() -> None:
    """What transformers' code would read is freed, but for the embedding and a head tied to it."""
    loaded: LoadedModel = tiny("llama", tie_word_embeddings=True)
    assert loaded.decoder is not None
    before = sum(p.nbytes for p in loaded.model.parameters())
    freed = release_plain(loaded.model, loaded.decoder)
    kept = sum(p.nbytes for p in loaded.model.parameters())
    assert kept == before - freed
    embedding = loaded.model.get_input_embeddings().weight
    assert kept < 1.2 * embedding.nbytes
    assert loaded.decoder.bytes >= freed


@pytest.mark.parametrize("token", [-1, 91, 2**40])
def test_a_token_outside_the_vocabulary_is_an_error_that_writes_nothing(token: int) -> None:
    loaded = tiny("llama")
    assert loaded.decoder is not None
    size = len(loaded.decoder.embedding)
    engine = Engine(loaded, blocks=40, block_size=4)
    tape = engine.open_tape("a", [3, 4, 5], Retention(100))
    tape.acquire(2)
    with pytest.raises(IndexError, match=f"not one of {size}"):
        engine.logits([Chunk(tape, [5, token if token < 0 else max(token, size)])])
    assert tape.next_slots(1).coord == 0
    tape.release()


@pytest.mark.parametrize("rows", [1, 40, 300], ids=["one row", "shared weights", "shared rows"])
def test_threads_change_no_bit(rows: int, threads: Callable[[int], None]) -> None:
    """Models small enough for one thread included, which another width makes large enough for several."""
    found = []
    loaded = tiny("llama", layers=2, hidden_size=512, intermediate_size=1100, max_position_embeddings=512)
    tokens = torch.randint(3, 90, (rows,), generator=torch.Generator().manual_seed(8)).tolist()
    for count in (1, 2, 3):
        threads(count)
        engine = Engine(loaded, blocks=100, block_size=4)
        tape = engine.open_tape("a", tokens[:1], Retention(400))
        tape.acquire(rows)
        found.append(engine.logits([Chunk(tape, tokens)]))
        tape.release()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_embedded_default_passes_in_bfloat16() -> None:
    """States and sums are float32; transformers' own rounding is a tenth of its logits."""
    loaded = load_model(TAPE_MODEL, dtype="bfloat16", device="cpu")
    assert loaded.decoder is not None
    assert canary.check(loaded) < 0.05
    before = [parameter.dtype for parameter in loaded.model.parameters()]
    assert set(before) == {torch.bfloat16}
