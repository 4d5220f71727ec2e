"""Models whose linear layers are packed give the logits of the dense forward with their own weights."""

import dataclasses
import gc
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import pytest
import torch
from torch import nn

from engine.linears.install import install_linears
from engine.linears.linear_selftest import Layers, SelfTest
from engine.linears.products import ONEDNN, TORCH, MatmulLibrary, Way
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model, prepare
from engine.model.terse import TAPE_MODEL
from tests.engine.oracle import ARCHITECTURES, random_weights, tiny, tiny_config
from tests.kit import tolerance

needs_onednn = pytest.mark.skipif(ONEDNN is None, reason="this build of PyTorch has no packed products")
TOKENS = list(range(5, 42))


def packed(architecture: str, **extra: Any) -> LoadedModel:
    """As `tiny`, with packed weights."""
    model = random_weights(tiny_config(architecture, **extra))
    return prepare(model, None, name=architecture, layers="onednn")


class Always(SelfTest):
    """Chooses the last way that is offered."""

    def fastest(self, layers: Layers, ways: Any, fallback: Way) -> Way:
        return ways[-1]  # type: ignore[no-any-return]  # as the protocol says


@needs_onednn
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_model_over_regions_equals_the_dense_forward(architecture: str) -> None:
    """The canary reads parts of the rows, so the last layer is interrupted and runs again."""
    loaded = packed(architecture, layers=2)
    expected = canary.dense_logits(tiny(architecture, layers=2), TOKENS)
    tolerance.assert_logits(loaded, canary.dense_logits(loaded, TOKENS), expected)
    assert canary.check(loaded) < tolerance.of_model(loaded)
    assert "onednn" in str(loaded.linears)


@needs_onednn
@pytest.mark.parametrize("mode", ["auto", "compiled", "onednn"])
def test_the_embedded_default_is_served_in_every_mode(mode: Literal["auto", "compiled", "onednn"]) -> None:
    expected = canary.dense_logits(load_model(TAPE_MODEL, dtype="float32", layers="torch"), TOKENS)
    loaded = load_model(TAPE_MODEL, dtype="float32", device="cpu", layers=mode)
    tolerance.assert_logits(loaded, canary.dense_logits(loaded, TOKENS), expected)
    canary.check(loaded)


@needs_onednn
def test_the_canary_compares_with_the_weights_before_packing() -> None:
    """Its dense forward unpacks them, so a product that is wrong in the model alone is found."""
    loaded = packed("llama")
    assert ONEDNN is not None
    wrong = dataclasses.replace(ONEDNN, apply=lambda *given: 1.1 * ONEDNN.apply(*given))
    for module, part in loaded.linears._parts[:3]:
        part.product.library = wrong
        vars(module)["forward"] = part.forward
    with pytest.raises(ModelError, match="dense forward"):
        canary.check(loaded)


@needs_onednn
def test_siblings_are_found_by_what_they_read() -> None:
    """Tied weights stay alone: their original is needed elsewhere, and the copy is accounted."""
    loaded = packed("qwen2", layers=2, tie_word_embeddings=True)
    assert dict(loaded.linears.ways) == {
        "64+32+32 x 64 by onednn joint": 6,
        "64 x 64 by onednn": 2,
        "128+128 x 64 by onednn joint": 4,
        "64 x 128 by onednn": 2,
        "199 x 64 by onednn": 1,
    }
    embedding = loaded.model.model.embed_tokens.weight
    assert loaded.linears.tied_bytes == embedding.nbytes
    assert "0.1 MB for copies of tied weights" in str(loaded.linears)
    original = random_weights(tiny_config("qwen2", layers=2, tie_word_embeddings=True))
    assert torch.equal(embedding, original.model.embed_tokens.weight)
    assert loaded.model.lm_head.weight.shape == embedding.shape


@needs_onednn
def test_the_original_weights_are_freed_and_a_packed_model_is_not_saved(tmp_path: Path) -> None:
    model = random_weights(tiny_config("llama", layers=1))
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    originals = [ref(each.weight) for each in (attention.q_proj, attention.o_proj, mlp.up_proj)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    prepare(model, None, name="llama", layers="onednn")
    gc.collect()
    assert [original() for original in originals] == [None] * 3
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    with pytest.raises(RuntimeError, match="layers='torch'"):
        model.save_pretrained(tmp_path)


class Wrapped(nn.Linear):
    """As those of quantised and adapted models."""


class Net(nn.Module):
    """Layers of every kind; ``shared`` is called twice, ``hooked`` has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.wrapped, self.float16, self.unused = Wrapped(8, 8), nn.Linear(8, 8).half(), nn.Linear(8, 8)
        self.shared, self.hooked = nn.Linear(8, 8), nn.Linear(8, 8)
        self.hooked.forward = self.hooked.forward  # type: ignore[method-assign]  # as accelerate does

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """All of them but ``unused``."""
        joint = self.one(rows) + self.two(rows)
        other = self.two(joint) if joint.isnan().any() else self.shared(joint) + self.shared(rows)
        halves = self.float16(rows.half()).float() + self.hooked(input=rows) + self.wrapped(rows)
        return torch.cat((other + halves, self.narrow(rows.clone())), -1)


@torch.inference_mode()
@pytest.mark.parametrize("library", [TORCH, ONEDNN], ids=["torch", "onednn"])
def test_only_plain_layers_that_run_are_changed(library: MatmulLibrary | None) -> None:
    if library is None:
        pytest.skip("this build of PyTorch has no packed products")
    torch.manual_seed(0)
    net, rows = Net(), torch.randn(1, 5, 8)
    expected = net(rows)
    kept = {name: vars(layer).get("forward") for name, layer in net.named_children()}
    linears = install_linears(net, lambda: net(rows), "auto", Always(), None if library is TORCH else library)
    changed = {name for name, layer in net.named_children() if vars(layer).get("forward") != kept[name]}
    assert changed == {"one", "two"} | (set() if library is TORCH else {"shared", "narrow"})
    width = 8 * 3  # three layers deep
    tolerance.assert_sums(net(rows), expected, width=width)
    with linears.plain():
        tolerance.assert_sums(net(rows), expected, width=width)
    tolerance.assert_sums(net(rows), expected, width=width)


def test_forcing_onednn_needs_it() -> None:
    net = Net()
    with pytest.raises(ModelError, match=r"model\.layers"):
        install_linears(net, lambda: None, "onednn", packed=None)


def test_left_as_they_are() -> None:
    """Asked for, and on another device."""
    for mode, device in (("torch", "cpu"), ("auto", "meta")):
        net = Net().to(device)
        linears = install_linears(net, pytest.fail, mode)  # type: ignore[arg-type]  # a Mode
        assert not linears.ways
        assert str(linears) == "as they are"
