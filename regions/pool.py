"""The paged pool with its tensors: one K and one V per layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from regions.allocator import Run
from regions.block_pool import BlockPool


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool(BlockPool):
    """KV of every layer, ``[kv_heads, slots, head_dim]``.

    Head-major, so that an extent (a run of slots) is one strided view that attention reads in place.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        n_blocks: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pin: bool = False,
    ) -> None:
        super().__init__(n_blocks, block_size=block_size)
        self.layers = layers
        slots = n_blocks * block_size

        def zeros(layer: LayerShape, dim: int) -> torch.Tensor:
            # zeros, not empty: a NaN left in unwritten memory must never reach a masked product
            return torch.zeros(layer.kv_heads, slots, dim, dtype=dtype, device=device, pin_memory=pin)

        self.keys = [zeros(layer, layer.key_dim) for layer in layers]
        self.values = [zeros(layer, layer.value_dim) for layer in layers]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.keys[0].device

    @property
    def bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def move(self, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the KV of the blocks ``source`` to ``target``: as many blocks, in order, none in both."""
        self.copy_from(self, source, target)

    def copy_from(self, other: KVPool, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the blocks ``source`` of ``other`` (it may be this pool) to ``target`` here, in order.

        Both are as many blocks and do not overlap. Copies between devices are queued on the current
        stream and not waited for when the host side is pinned.
        """
        crossing = self.device != other.device
        for src, dst, count in _pieces(source, target):
            here = slice(dst * self.block_size, (dst + count) * self.block_size)
            there = slice(src * self.block_size, (src + count) * self.block_size)
            for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
                if not crossing:
                    mine[:, here].copy_(theirs[:, there])
                    continue
                # one head at a time: only a contiguous copy between devices is not waited for
                for to, of in zip(mine, theirs, strict=True):
                    to[here].copy_(of[there], non_blocking=True)


def _pieces(source: Sequence[Run], target: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(source block, target block, count) of each stretch that is contiguous on both sides."""
    src, dst = (np.concatenate([np.arange(*run) for run in runs]) for runs in (source, target))
    if len(src) != len(dst):
        raise ValueError("as many blocks must be copied to as from")
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    for first, last in pairwise((0, *breaks.tolist(), len(src))):
        yield int(src[first]), int(dst[first]), last - first
