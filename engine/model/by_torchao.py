"""Weights that torchao quantises: the matrices of layers become codes of 8 or 4 bits, on a GPU.

transformers' layers run with them; the embedding and the head stay as they are. torchao is imported only
here, and only where `model.weights` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.device import out_of_memory
from engine.model.architectures import ModelError

GROUP = 32
"""Inputs that share a scale and an offset in 4 bits."""


@dataclass(frozen=True)
class Form:
    """One of torchao's forms of weights. ``asked``: as `model.weights` has it; ``config``: torchao's class.

    ``off``: the most that a code may be off, as a share of its row's largest weight. ``capability``: the
    least of a GPU: torchao's kernel of 4 bits needs 8.0, and the compiler of layers has floats of 8 bits
    from 8.9 on.
    """

    asked: str
    config: str
    off: float
    capability: tuple[int, int] = (0, 0)
    options: Mapping[str, Any] = field(default_factory=dict)


# torch's own kernel multiplies by packed tiles; torchao's default form needs a further package
_TILES = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
FORMS = {
    "torchao-int8": Form("int8", "Int8WeightOnlyConfig", 0.01),
    "torchao-int4": Form("int4", "Int4WeightOnlyConfig", 0.1, (8, 0), _TILES),
    "torchao-fp8": Form("fp8", "Float8WeightOnlyConfig", 0.08, (8, 9)),
}
"""By how weights are held."""


def config_of(held: str, device: str) -> Any:
    """What torchao takes for weights ``held`` so. Raises ModelError where it or the ``device`` cannot."""
    form = FORMS[held]
    if device != "cpu" and (has := torch.cuda.get_device_capability(device)) < form.capability:
        least, found = (".".join(map(str, each)) for each in (form.capability, has))
        raise ModelError(
            f"model.weights is {form.asked}, for a GPU of compute capability {least} or more, and this one's "
            f"is {found}: take int8"
        )
    try:
        import torchao.quantization as found_in

        return getattr(found_in, form.config)(**form.options)
    except (ImportError, AttributeError, TypeError) as error:
        raise ModelError(
            f"model.weights is {form.asked}, which torchao holds on a GPU: pip install torchao ({error})"
        ) from error


def quantise(model: Any, held: str, device: str) -> None:
    """Hold the matrices of the layers of ``model`` as codes, on ``device``, one after the other.

    Raises ModelError where torchao cannot, and where its codes are not those of the weights.
    """
    form, config, head = FORMS[held], config_of(held, device), model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is head:
            continue
        if is_coded(module):
            raise ModelError(
                f"model.weights is {form.asked}, but the model's files hold codes: set it to auto"
            )
        try:
            _quantise(module.to(device), config, form)
        except (ImportError, ValueError, RuntimeError, AssertionError) as error:
            if out_of_memory(error):
                raise
            raise ModelError(f"model.weights is {form.asked}, but {name}: {error}") from error


def _quantise(module: nn.Linear, config: Any, form: Form) -> None:
    """One matrix. Raises ValueError where its codes are not those of its weights, and what torchao raises."""
    from torchao.quantization import quantize_

    given = module.weight.data
    quantize_(module, config, lambda *_: True)
    if not is_coded(module):
        raise ValueError(f"torchao leaves a matrix of {given.shape[1]} inputs as it is")
    most = form.off * given.abs().amax(1, keepdim=True).float() + 1e-6
    if not bool(((expanded(module.weight.data).float() - given.float()).abs() <= most).all()):
        raise ValueError("torchao's codes are not those of its weights")


def is_coded(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is a tensor of torchao's, by us or in the model's files."""
    return isinstance(module, nn.Linear) and type(module.weight.data).__module__.startswith("torchao.")


@torch.inference_mode()
def expanded(weight: torch.Tensor) -> torch.Tensor:
    """The weights that codes stand for, [outputs, inputs].

    A form that does not say so itself shows them by its product with each single input.
    """
    if type(weight).dequantize is not torch.Tensor.dequantize:
        return weight.dequantize()
    return functional.linear(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device), weight).T


@contextmanager
def with_expanded(model: nn.Module) -> Iterator[None]:
    """Let layers multiply by what their codes expand to meanwhile, in torch's own products: the oracle."""

    def plain(module: Any, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, expanded(module.weight.data), module.bias)

    coded = [module for module in model.modules() if is_coded(module)]
    for module in coded:
        vars(module)["forward"] = partial(plain, module)
    try:
        yield
    finally:
        for module in coded:
            del vars(module)["forward"]


def code_bytes(model: nn.Module) -> int:
    """Memory of codes, with their scales and offsets."""
    weights: list[Any] = [module.weight.data for module in model.modules() if is_coded(module)]
    return sum(getattr(each, name).nbytes for each in weights for name in each.__tensor_flatten__()[0])
