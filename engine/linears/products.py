"""Products of rows with weights: by PyTorch's default library, or by oneDNN with the weight packed once.

Siblings are linear layers that get the same tensor, such as the projections to queries, keys and values. They
may be one joint product: the sibling that is called first computes it for all, and leaves the others' columns
on the input itself. So they are found only with that very tensor, and live no longer than it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import linear

Apply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _same(weight: torch.Tensor) -> torch.Tensor:
    return weight


@dataclass(frozen=True)
class MatmulLibrary:
    """Multiplies rows with a weight [out, in] in a layout of its own.

    ``pack`` makes that layout, ``unpack`` reverts it exactly, ``apply(rows, packed, bias)`` is `F.linear`.
    ``packs``: the layout is a copy, otherwise the weight itself.
    """

    name: str
    apply: Apply
    pack: Callable[[torch.Tensor], torch.Tensor] = _same
    unpack: Callable[[torch.Tensor], torch.Tensor] = _same
    packs: bool = False


TORCH = MatmulLibrary("torch", linear)
"""PyTorch's own choice: BLAS in float32, oneDNN with weights as they are in bf16."""


def _onednn() -> MatmulLibrary | None:
    operators: Any = torch.ops.mkldnn
    # not a public interface; torch.compile's own CPU code calls the same two
    names = ("_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):  # type: ignore[no-untyped-call]
        return None
    pack, product = (getattr(operators, name).default for name in names)

    def apply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = product(rows, packed, bias, "none", [], None)
        return output

    return MatmulLibrary("onednn", apply, pack, torch.Tensor.to_dense, packs=True)


ONEDNN = _onednn()
"""OneDNN with packed weights; None where this build of PyTorch has no such products."""


@dataclass(frozen=True)
class Way:
    """How the linear layers of one input are computed: each alone, or all in one ``joint`` product."""

    library: MatmulLibrary
    joint: bool = False

    def __str__(self) -> str:
        """As in the log."""
        return f"{self.library.name} joint" if self.joint else self.library.name


@dataclass(frozen=True)
class Part:
    """One layer's columns ``start`` to ``stop`` of a product, as ``number`` of its siblings."""

    product: Product
    number: int
    start: int
    stop: int

    @property
    def forward(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer's forward pass: [..., in] to [..., stop - start]."""
        product = self.product
        if product.siblings > 1:
            return partial(product.part, self.number)
        apply, packed, bias = product.library.apply, product.packed, product.bias
        return lambda rows: apply(rows, packed, bias)

    def plain(self, rows: torch.Tensor) -> torch.Tensor:
        """The same by PyTorch's default library, with the weight unpacked for this call."""
        bias = self.product.bias
        return linear(rows, self._weight(), None if bias is None else bias[self.start : self.stop])

    def shown(self) -> torch.Tensor:
        """What the layer shows as its weight: the weight, or NaN of its shape that take no memory."""
        if not self.product.library.packs:
            return self._weight()
        packed = self.product.packed
        nothing = torch.full((), torch.nan, dtype=packed.dtype)
        return nothing.expand(self.stop - self.start, packed.shape[1])

    def _weight(self) -> torch.Tensor:
        return self.product.library.unpack(self.product.packed)[self.start : self.stop]


class Product:
    """One product for layers with ``weights`` [out, in] and ``biases`` [out] that get the same input."""

    def __init__(
        self, library: MatmulLibrary, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> None:
        self.library = library
        self._sizes = [weight.shape[0] for weight in weights]
        self._key = f"_foretick_joint_{id(self)}"
        self.packed = library.pack(weights[0] if len(weights) == 1 else torch.cat(list(weights)))
        self.bias = None
        if any(bias is not None for bias in biases):
            pairs = zip(weights, biases, strict=True)
            self.bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])

    @property
    def siblings(self) -> int:
        """How many layers it computes."""
        return len(self._sizes)

    @property
    def parts(self) -> list[Part]:
        """The layers' parts, in the order of their weights."""
        bounds = pairwise(accumulate(self._sizes, initial=0))
        return [Part(self, number, *bound) for number, bound in enumerate(bounds)]

    def part(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """The columns of sibling ``number``; each is handed out once."""
        on_input = rows.__dict__
        parts = on_input.get(self._key)
        if parts is None or parts[number] is None:
            parts = list(torch.split(self.library.apply(rows, self.packed, self.bias), self._sizes, -1))
            on_input[self._key] = parts
        mine: torch.Tensor = parts[number]
        parts[number] = None
        return mine


def build(way: Way, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> list[Part]:
    """The layers' parts when they are computed in this way."""
    if way.joint:
        return Product(way.library, weights, biases).parts
    alone = (Product(way.library, [w], [b]) for w, b in zip(weights, biases, strict=True))
    return [part for product in alone for part in product.parts]
