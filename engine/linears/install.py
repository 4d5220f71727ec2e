"""Gives the linear layers of a loaded model the fastest product for each shape; the modules stay.

One pass over a token shows which layers run and which of them get the same tensor, whatever they are called.
Then the layers are changed one input at a time, so that loading needs little more memory than the model. A
packed weight replaces the original, except where that is tied to another (the input embedding).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from engine.linears.linear_selftest import Layers, SelfTest
from engine.linears.products import ONEDNN, TORCH, MatmulLibrary, Part, Way, build
from engine.measurement_cache import Memory
from engine.model.architectures import ModelError

log = logging.getLogger(__name__)

Mode = Literal["auto", "torch", "onednn"]
DTYPES = (torch.float32, torch.bfloat16)
JOINT_LIMIT = 1 << 24
"""Most elements of a joint weight: with larger ones a call is no cost, and a copy of them is."""
SELF_TEST = SelfTest(memory=Memory())
"""Shared by all models of the process."""


@dataclass(frozen=True)
class Linears:
    """How a model's linear layers run.

    ``ways``: number of layers by shape and way, for the log. ``tied_bytes``: packed copies of weights whose
    originals are used elsewhere and stay.
    """

    ways: Counter[str] = field(default_factory=Counter)
    tied_bytes: int = 0
    _parts: tuple[tuple[nn.Module, Part], ...] = ()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Run every layer by PyTorch's default product meanwhile, its weight unpacked for each call.

        The oracle of the packed layers; slow, and for one thread.
        """
        for module, part in self._parts:
            vars(module)["forward"] = part.plain
        try:
            yield
        finally:
            for module, part in self._parts:
                vars(module)["forward"] = part.forward

    def __str__(self) -> str:
        """Layers by shape and way, and what it costs in memory."""
        ways = ", ".join(f"{count} of {what}" for what, count in self.ways.items()) or "as they are"
        copies = f"; {self.tied_bytes / 1e6:.1f} MB for copies of tied weights" if self.tied_bytes else ""
        return ways + copies


def install_linears(
    model: Any,
    run: Callable[[], object],
    mode: Mode = "auto",
    self_test: SelfTest = SELF_TEST,
    packed: MatmulLibrary | None = ONEDNN,
) -> Linears:
    """Let ``model``'s linear layers run the fastest way; ``run`` makes one pass over a token.

    Only plain `nn.Linear` on the CPU in float32 and bf16 are changed. ``mode``: `torch` changes nothing,
    `onednn` packs every weight that oneDNN multiplies correctly, siblings' weights jointly.
    Raises ModelError for `onednn` where PyTorch has none.
    """
    if mode == "onednn" and packed is None:
        raise ModelError("model.layers is onednn, but this build of PyTorch has no packed oneDNN products")
    if mode == "torch" or any(each.device.type != "cpu" for each in model.parameters()):
        return Linears()
    uses = _uses(model)
    ways: Counter[str] = Counter()
    parts: list[tuple[nn.Module, Part]] = []
    tied_bytes = 0
    for modules in _siblings(model, run, uses):
        layers, way = _way(modules, mode, self_test, packed)
        shape = "+".join(str(module.out_features) for module in modules)
        ways[f"{shape} x {modules[0].in_features} by {way}"] += len(modules)
        if way == Way(TORCH):
            continue
        tied_bytes += sum(m.weight.nbytes for m in modules if uses[m.weight.data_ptr()] > 1)
        parts += _replace(modules, build(way, layers.weights, layers.biases))
    found = Linears(ways, tied_bytes, tuple(parts))
    log.info("linear layers: %s", found)
    return found


@contextmanager
def lent(
    model: Any,
    run: Callable[[], object],
    self_test: SelfTest = SELF_TEST,
    packed: MatmulLibrary | None = ONEDNN,
) -> Iterator[None]:
    """Let the linear layers of a model on the CPU run as `install_linears` would, meanwhile.

    The modules keep their weights, so packed ones take as much memory again.
    """
    changed: list[nn.Module] = []
    try:
        for modules in _siblings(model, run, _uses(model)):
            layers, way = _way(modules, "auto", self_test, packed)
            if way != Way(TORCH):
                changed += modules
                for linear, part in zip(modules, build(way, layers.weights, layers.biases), strict=True):
                    vars(linear)["forward"] = part.forward
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _uses(model: nn.Module) -> Counter[int]:
    """How many modules have the weight at an address."""
    return Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))


def _way(
    modules: Sequence[nn.Linear], mode: Mode, self_test: SelfTest, packed: MatmulLibrary | None
) -> tuple[Layers, Way]:
    """Siblings' weights, and the way for them."""
    layers = Layers([module.weight for module in modules], [module.bias for module in modules])
    libraries = [TORCH, packed] if mode == "auto" else [packed]
    # forced, one way for all: the same floats at every start
    joint = [len(modules) > 1] if mode == "onednn" else sorted({False, len(modules) > 1})
    offered = [Way(library, each) for library in libraries if library for each in joint]
    return layers, self_test.fastest(layers, offered, Way(TORCH))


def _siblings(model: nn.Module, run: Callable[[], object], uses: Counter[int]) -> list[list[nn.Linear]]:
    """The layers that run, in their order; those of one parent that get the same tensor together."""
    calls: list[tuple[nn.Linear, torch.Tensor]] = []

    def saw(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if len(args) == 1:
            calls.append((module, args[0]))  # type: ignore[arg-type]  # hooked below

    parents = {child: parent for parent in model.modules() for child in parent.children()}
    hooks = [m.register_forward_pre_hook(saw) for m in model.modules() if _plain(m)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    counts = Counter(module for module, _ in calls)
    groups: dict[object, list[nn.Linear]] = {}
    # the calls keep their tensors, so that no id is used again
    for module, rows in calls:
        single = counts[module] > 1 or uses[module.weight.data_ptr()] > 1
        groups.setdefault(module if single else (parents[module], id(rows)), []).append(module)
    found: list[list[nn.Linear]] = []
    for group in groups.values():
        layers = list(dict.fromkeys(group))
        small = sum(layer.weight.numel() for layer in layers) <= JOINT_LIMIT
        alike = len({(layer.weight.dtype, layer.in_features) for layer in layers}) == 1
        found += [layers] if small and alike else [[layer] for layer in layers]
    return found


def _plain(module: nn.Module) -> bool:
    """Whether it is nothing but a linear layer: quantised, adapted and wrapped ones have other classes, they
    or their weights.
    """
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return type(module.weight.data) is torch.Tensor and module.weight.dtype in DTYPES


def _replace(modules: Sequence[nn.Linear], parts: Sequence[Part]) -> Iterator[tuple[nn.Module, Part]]:
    for module, part in zip(modules, parts, strict=True):
        vars(module)["forward"] = part.forward
        module.register_parameter("weight", nn.Parameter(part.shown(), requires_grad=False))
        if part.product.library.packs:
            module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        yield module, part


def _refuse(module: nn.Module, prefix: str, _: bool) -> None:
    raise RuntimeError(f"{prefix}weight is packed for this CPU: save a model loaded with layers='torch'")
