"""Quantised weights: codes against their own definition, products against those of the expanded weights."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.compiled.decoder import CompiledDecoder
from engine.compiled.layers import DEPTH, EXPANDED
from engine.compiled.packed_products import GROUP, PANEL
from engine.compiled.packing import Panels, _interleaved, _moved, _pairs, _panels
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.loaded import Layers, Weights
from engine.model.loading import prepare
from engine.model.quantised import EMBEDDING, HEAD, Quantised, quantised
from tests.engine.compiled.test_engine_compiled import multiplied, needs_pairs
from tests.engine.oracle import random_weights, tiny_config
from tests.kit.engine import assert_logits_over_regions

BITS = [8, 4]
INPUTS = ["floats", pytest.param("pairs", marks=needs_pairs)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [1, 31, 32, 70])
def test_a_weight_is_off_by_half_a_step_of_its_group(inputs: int, bits: int) -> None:
    """Groups of one value, of great and of small ones included. Scales and offsets are rounded to float16."""
    weight = random(40, inputs)
    weight[3], weight[4], weight[5], weight[6] = 0.25, 1000 * weight[4], weight[5] / 100, 0
    found = Quantised.of(weight, bits)
    assert int(found.codes.max()) < 2**bits
    for row, codes, back in zip(weight, found.codes, found.expanded(), strict=True):
        for begin in range(0, inputs, GROUP):
            group, again = row[begin : begin + GROUP], back[begin : begin + GROUP]
            step = float(group.max() - group.min()) / (2**bits - 1)
            rounding = 2**-11 * float(group.abs().max()) + 2**-11 * step * 2**bits + 2**-24
            assert float((group - again).abs().max()) <= 0.5 * step + rounding
            assert len(codes) == inputs


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e6, 1e8])
def test_a_weight_that_float16_cannot_hold_is_named(bad: float) -> None:
    weight = random(PANEL, 40)
    weight[7, 7] = bad
    with pytest.raises(ValueError, match=r"^lm_head.weight: "):
        quantised({HEAD: weight, EMBEDDING: random(PANEL, 40)}, "int8")


def given(weight: Quantised, how: str) -> tuple[Panels, Panels]:
    """Packed as codes, and as what they expand to."""
    if how == "pairs":
        return _pairs(weight), _pairs(weight.expanded().bfloat16())
    return _panels(weight), _panels(weight.expanded())


@pytest.mark.parametrize("how", INPUTS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("depth", [1, 33, 48, EXPANDED, DEPTH + 40, 2 * DEPTH + 7])
def test_a_product_is_that_of_the_expanded_weights_to_the_bit(depth: int, bits: int, how: str) -> None:
    """Of a tile's rows and of more, gated and not, which read codes in two ways."""
    outputs = 2 * PANEL + 9
    codes, plain = given(Quantised.of(random(outputs, depth, seed=depth), bits), how)
    bias = random(3 * PANEL, seed=1).numpy()
    for rows in (1, 2, 3, 7, 20):
        x = random(rows, depth + depth % 2, seed=rows)
        x[:, depth:] = 0
        x = x.bfloat16() if how == "pairs" else x[:, :depth].contiguous()
        for gate in (False, True):
            kind = np.uint16 if gate and how == "pairs" else np.float32
            found, expected = (np.zeros((rows, 3 * PANEL // (1 + gate)), kind) for _ in range(2))
            multiplied(x, depth, codes, bias, 0, found, gate)
            multiplied(x, depth, plain, bias, 0, expected, gate)
            assert np.array_equal(found, expected), (rows, gate)


def test_parts_of_other_bits_are_joined_without_loss() -> None:
    wide, narrow = (Quantised.of(random(40, 70, seed=s), s) for s in (8, 4))
    for rows in (_interleaved, lambda *parts: torch.cat(parts)):
        found = _moved(rows, narrow, wide)
        assert isinstance(found, Quantised)
        assert found.bits == 8
        assert torch.equal(found.expanded(), rows(narrow.expanded(), wide.expanded()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 100, "hidden_size": 72}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama with biases", "llama tied", "qwen3"],
)
def test_a_quantised_model_gives_the_dense_logits_of_its_expanded_weights(
    architecture: str, extra: dict[str, Any], weights: Weights, dtype: torch.dtype
) -> None:
    """After its plain weights are freed, a tied embedding among them; for a row and for many."""
    model = random_weights(tiny_config(architecture, **extra)).to(dtype)
    before = model.lm_head.weight.clone()
    loaded = prepare(model, None, name="quantised", weights=weights)
    assert isinstance(loaded.decoder, CompiledDecoder)
    assert loaded.layers_run.endswith(f"with weights in {weights}")
    assert loaded.more_exact() is None
    assert not torch.equal(before, model.lm_head.weight)
    canary.check(loaded)
    tokens = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(6)).tolist()
    expected = canary.dense_logits(loaded, tokens)
    tied = bool(extra.get("tie_word_embeddings"))
    loaded.release_plain()
    assert (loaded.decoder.embedding is None) == tied
    assert not tied or loaded.model.get_input_embeddings().weight.numel() == 0
    assert_logits_over_regions(loaded, tokens, expected)


@pytest.mark.parametrize(
    ("architecture", "dtype", "layers"),
    [("gemma2", "float32", "compiled"), ("llama", "float16", "compiled"), ("llama", "float32", "torch")],
)
def test_layers_that_are_not_compiled_have_no_quantised_weights(
    architecture: str, dtype: str, layers: Layers
) -> None:
    model = random_weights(tiny_config(architecture)).to(getattr(torch, dtype))
    with pytest.raises(ModelError, match=r"^model.weights is int4"):
        prepare(model, None, name="other", layers=layers, weights="int4")
