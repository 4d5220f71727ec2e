"""The paged pool with its tensors: keys and values of each layer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from regions.allocator import Run
from regions.extents import SlotRange
from regions.kv_codes import row_numbers, stored
from regions.pool_metadata import BlockPool


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one attention layer's KV per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool(BlockPool):
    """KV of every layer, ``[kv_heads, slots, head_dim]``; of int8, in rows as of `regions.kv_codes`.

    Head-major, so that an extent (a run of slots) is one strided view, which attention reads in place. In
    pinned memory (``pin``), which only copies read, it is slot-major: one transfer moves a run.
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
        self._pages: list[tuple[mmap.mmap, int]] = []
        """Memory on the host that can be given back, and bytes of a block of each head in it."""
        slots = n_blocks * block_size

        def zeros(layer: LayerShape, dim: int) -> torch.Tensor:
            # zeros, not empty: a NaN in unwritten memory must never enter a masked product
            row = row_numbers(dim, dtype)
            shape = layer.kv_heads, slots, row
            if pin:
                turned = slots, layer.kv_heads, row
                return torch.zeros(turned, dtype=dtype, pin_memory=True).transpose(0, 1)
            if torch.device(device).type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            memory = _untouched_zeros(math.prod(shape) * dtype.itemsize)
            self._pages.append((memory, block_size * row * dtype.itemsize))
            return torch.frombuffer(memory, dtype=dtype).view(shape)

        self.keys = [zeros(layer, layer.key_dim) for layer in layers]
        self.values = [zeros(layer, layer.value_dim) for layer in layers]

    @staticmethod
    def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block of ``block_size`` tokens in all layers, bytes."""
        rows = (
            layer.kv_heads * sum(row_numbers(dim, dtype) for dim in (layer.key_dim, layer.value_dim))
            for layer in layers
        )
        return sum(rows) * block_size * dtype.itemsize

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of each layer in turn."""
        return [tensor for layer in zip(self.keys, self.values, strict=True) for tensor in layer]

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
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def put(self, layer: int, slots: torch.Tensor | slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``key`` and ``value`` [kv_heads, slots, dim] of one layer, as this pool holds them."""
        self.keys[layer][:, slots] = stored(key, self.dtype)
        self.values[layer][:, slots] = stored(value, self.dtype)

    def resize(self, blocks: int) -> None:
        """See `BlockAllocator.resize`. What is free above the limit is no longer memory of this process."""
        self.trim()
        self.blocks.resize(blocks)
        self.trim()

    def trim(self) -> None:
        """Give back the memory of blocks that a lower limit has retired; only the host's can be."""
        retired, self.blocks.retired = self.blocks.retired, []
        for memory, block in self._pages if retired else ():
            head = self.capacity * block
            for base in range(0, len(memory), head):
                for start, stop in retired:
                    first = -(-(base + start * block) // mmap.PAGESIZE) * mmap.PAGESIZE
                    length = (base + stop * block) // mmap.PAGESIZE * mmap.PAGESIZE - first
                    if length > 0:
                        memory.madvise(mmap.MADV_DONTNEED, first, length)

    def move(self, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the KV of the blocks ``source`` to as many blocks ``target``, in order, without overlap."""
        self.copy_from(self, source, target)

    def copy_from(self, other: KVPool, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the blocks ``source`` of ``other`` (or of this pool) to ``target`` here, in order.

        Both have as many blocks and must not overlap. Copies between devices are queued on the current stream
        and do not block if the host side is pinned; the blocks on the host are one run.
        """
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        if self.device != other.device:
            _cross(pairs, source, target, self.block_size, out=self.device.type == "cpu")
            return
        for src, dst, count in pieces(source, target):
            here = slice(dst * self.block_size, (dst + count) * self.block_size)
            there = slice(src * self.block_size, (src + count) * self.block_size)
            for mine, theirs in pairs:
                mine[:, here].copy_(theirs[:, there])


def _cross(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    source: Sequence[Run],
    target: Sequence[Run],
    size: int,
    *,
    out: bool,
) -> None:
    """Copy blocks of ``size`` slots between a device and one run in pinned memory (``out``: to that).

    ``pairs``: (to, from) of each tensor. The device gathers and scatters: a tensor takes one transfer.
    """
    (run,), on_device = (target, source) if out else (source, target)
    here = slice(run.start * size, run.stop * size)
    device = pairs[0][1 if out else 0].device
    index = slots_on(device, [(start * size, (stop - start) * size) for start, stop in on_device])
    for to, of in pairs:
        mine, theirs = to.transpose(0, 1), of.transpose(0, 1)  # [slots, kv_heads, head_dim]
        if out:
            mine[here].copy_(theirs.index_select(0, index), non_blocking=True)
        else:
            packed = mine.new_empty((len(index), *mine.shape[1:]))
            mine.index_copy_(0, index, packed.copy_(theirs[here], non_blocking=True))


def slots_on(device: torch.device, ranges: Iterable[SlotRange]) -> torch.Tensor:
    """The slots of ``ranges`` in order, int64 on ``device``; queued on a GPU's current stream."""
    slots = torch.from_numpy(np.concatenate([np.arange(slot, slot + count) for slot, count in ranges]))
    return slots.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else slots


def _untouched_zeros(size: int) -> mmap.mmap:
    """Zeros on the host whose pages take memory when they are first written; `torch.zeros` writes them all.

    Raises MemoryError.
    """
    # in small pages: large ones, which NumPy asks for, make a question at most 2 % faster, but of a window of
    # few tokens they take what a full one needs
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes: {error.strerror}") from error


def pieces(source: Sequence[Run], target: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(source block, target block, count) of each stretch that is contiguous in both."""
    src, dst = (np.concatenate([np.arange(*run) for run in runs]) for runs in (source, target))
    if len(src) != len(dst):
        raise ValueError("source and target must have equally many blocks")
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    for first, last in pairwise((0, *breaks.tolist(), len(src))):
        yield int(src[first]), int(dst[first]), last - first
