"""The paged pool with its tensors: keys and values of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from regions.allocator import Run
from regions.pool_metadata import BlockPool

_ALIGNED = 64
"""Bytes."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one attention layer's KV per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool(BlockPool):
    """KV of every layer, ``[kv_heads, slots, head_dim]``.

    Head-major, so that an extent (a run of slots) is one strided view, which attention reads in place.
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
            # zeros, not empty: a NaN in unwritten memory must never enter a masked product
            shape = layer.kv_heads, slots, dim
            if pin or torch.device(device).type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)
            return _untouched_zeros(shape, dtype)

        self.keys = [zeros(layer, layer.key_dim) for layer in layers]
        self.values = [zeros(layer, layer.value_dim) for layer in layers]

    @staticmethod
    def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block of ``block_size`` tokens in all layers, bytes."""
        numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        return numbers * block_size * dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.keys[0].device

    @property
    def bytes(self) -> int:
        """Memory of all layers, bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def move(self, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the KV of the blocks ``source`` to as many blocks ``target``, in order, without overlap."""
        self.copy_from(self, source, target)

    def copy_from(self, other: KVPool, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the blocks ``source`` of ``other`` (or of this pool) to ``target`` here, in order.

        Both have as many blocks and must not overlap. Copies between devices are queued on the current stream
        and do not block if the host side is pinned.
        """
        crossing = self.device != other.device
        for src, dst, count in _pieces(source, target):
            here = slice(dst * self.block_size, (dst + count) * self.block_size)
            there = slice(src * self.block_size, (src + count) * self.block_size)
            for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
                if not crossing:
                    mine[:, here].copy_(theirs[:, there])
                    continue
                # one head at a time: only contiguous copies between devices do not block
                for to, of in zip(mine, theirs, strict=True):
                    to[here].copy_(of[there], non_blocking=True)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host whose pages take memory when they are first written; `torch.zeros` writes them all.

    Aligned as PyTorch's own tensors. Raises MemoryError.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def _pieces(source: Sequence[Run], target: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(source block, target block, count) of each stretch that is contiguous in both."""
    src, dst = (np.concatenate([np.arange(*run) for run in runs]) for runs in (source, target))
    if len(src) != len(dst):
        raise ValueError("source and target must have equally many blocks")
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    for first, last in pairwise((0, *breaks.tolist(), len(src))):
        yield int(src[first]), int(dst[first]), last - first
