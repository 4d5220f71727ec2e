"""Quantised weights: codes of 8 or 4 bits, with a float16 scale and offset for each `GROUP` inputs.

That is the form of GGUF's Q4_0, Q4_1 and Q8_0, among others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.compiled.packed_products import BLOCK_BYTES, GROUP, PANEL

Codes = npt.NDArray[np.uint8]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BITS = {"int8": 8, "int4": 4}
"""Of the matrices of layers, by `model.weights`; those of a head have 8."""


@dataclass(frozen=True)
class Quantised:
    """A matrix [outputs, inputs]: scale * code + offset.

    ``codes``: uint8 [outputs, inputs]; ``scales``, ``offsets``: float16 [outputs, groups of inputs], where
    the last group may be shorter.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int) -> Quantised:
        """``weight`` rounded to ``bits``: the codes of a group reach from its least to its greatest weight.

        Raises ValueError for weights that are not finite in float16.
        """
        inputs, most = weight.shape[1], 2**bits - 1
        short = -inputs % GROUP
        padded = weight.detach().float()
        if short:  # with what the group has
            padded = torch.cat((padded, padded[:, -1:].expand(-1, short)), 1)
        groups = torch.unflatten(padded, 1, (-1, GROUP))
        offsets = groups.amin(2).half()
        scales = ((groups.amax(2) - offsets.float()) / most).half()
        if not (offsets.isfinite().all() and scales.isfinite().all()):
            raise ValueError("a weight is not finite, or beyond float16")
        steps = (groups - offsets.float()[..., None]) / scales.float()[..., None].clamp(min=1e-30)
        codes = steps.round_().clamp_(0, most).to(torch.uint8).flatten(1)[:, :inputs]
        return cls(codes.contiguous(), scales, offsets, bits)

    def expanded(self) -> torch.Tensor:
        """Its weights in float32, as the products have them."""
        inputs = self.codes.shape[1]
        scales, offsets = (
            each.float().repeat_interleave(GROUP, 1)[:, :inputs] for each in (self.scales, self.offsets)
        )
        return (self.codes.float() * scales).add_(offsets)  # the product is exact

    def joined(self, rows: Callable[..., torch.Tensor], *others: Quantised) -> Quantised:
        """What ``rows`` makes of the outputs of this one and ``others``; it only moves them."""
        parts = [self, *others]
        codes, scales, offsets = (
            rows(*(getattr(each, name) for each in parts)) for name in ("codes", "scales", "offsets")
        )
        return Quantised(codes, scales, offsets, max(each.bits for each in parts))

    def packed(self, *, pairs: bool) -> Codes:
        """In blocks as of `packed_products`, [panels, groups, bytes]."""
        outputs = len(self.codes)
        groups, panels = self.scales.shape[1], -(-outputs // PANEL)

        def filled(part: torch.Tensor, columns: int) -> Any:
            short = panels * PANEL - outputs
            return nn.functional.pad(part, (0, columns - part.shape[1], 0, short)).numpy()

        codes = filled(self.codes, groups * GROUP).reshape(panels, PANEL, groups, -1, 2 if pairs else 1)
        codes = codes.transpose(0, 2, 3, 1, 4).reshape(panels, groups, -1, PANEL * (2 if pairs else 1))
        if self.bits == 4:
            low, high = np.split(codes, 2, -1)
            codes = low | high << 4
        blocks = np.empty((panels, groups, BLOCK_BYTES[self.bits]), np.uint8)
        for begin, part in ((0, self.scales), (2 * PANEL, self.offsets)):
            heads = filled(part, groups).reshape(panels, PANEL, groups).transpose(0, 2, 1)
            blocks[:, :, begin : begin + 2 * PANEL] = np.ascontiguousarray(heads).view(np.uint8)
        blocks[:, :, 4 * PANEL :] = codes.reshape(panels, groups, -1)
        return blocks


def is_matrix(name: str) -> bool:
    """Whether a tensor of a plain decoder multiplies rows."""
    return name == HEAD or name.endswith("_proj.weight")


def quantised(tensors: Mapping[str, torch.Tensor], weights: str) -> dict[str, Quantised]:
    """The matrices among the ``tensors`` of a plain decoder, by name; an embedding if it is tied to the head.

    Raises ValueError as `Quantised.of`, naming the tensor.
    """
    found: dict[str, Quantised] = {}
    for name, tensor in tensors.items():
        if is_matrix(name):
            try:
                found[name] = Quantised.of(tensor, 8 if name == HEAD else BITS[weights])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    if tensors[EMBEDDING].data_ptr() == tensors[HEAD].data_ptr():
        found[EMBEDDING] = found[HEAD]
    return found
