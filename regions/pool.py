"""The paged pool: one K and one V tensor per layer, the allocator of their blocks, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet, ref

import numpy as np
import torch

from regions.allocator import BlockAllocator, Run


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Owner(Protocol):
    """Something that has one reference to each of some blocks."""

    def held_blocks(self) -> list[Run]:
        """The blocks it has a reference to."""


class Reclaimer(Protocol):
    """Something that holds blocks nobody needs right now, such as a prefix cache."""

    @property
    def reclaimable(self) -> int:
        """Blocks that `reclaim` could free at least."""

    def reclaim(self, blocks: int) -> None:
        """Free ``blocks`` blocks, or as many as possible."""


class KVPool:
    """KV of every layer, ``[kv_heads, slots, head_dim]``: slot = block * block_size + offset.

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
        self.layers = layers
        self.blocks = BlockAllocator(n_blocks)
        self.block_size = block_size
        self.owners: WeakSet[Owner] = WeakSet()
        self._reclaimers: list[ref[Reclaimer]] = []
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
    def reclaimers(self) -> list[Reclaimer]:
        """Those that are asked for blocks, in this order."""
        return [reclaimer for weak in self._reclaimers if (reclaimer := weak()) is not None]

    def add_reclaimer(self, reclaimer: Reclaimer) -> None:
        """Ask ``reclaimer`` after the others, for as long as somebody else keeps it."""
        self._reclaimers.append(ref(reclaimer))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken: those nobody refers to, and those a cache would give up."""
        return self.blocks.free_blocks + sum(reclaimer.reclaimable for reclaimer in self.reclaimers)

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self.blocks.total_blocks

    @property
    def bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def block_bytes(self) -> int:
        """Memory of one block over all layers, in bytes."""
        return self.bytes // self.total_blocks

    def take(self, blocks: int, *, behind: int | None = None, grows: bool = False) -> list[Run] | None:
        """As `BlockAllocator.take`, after asking the reclaimers for what is missing."""
        for reclaimer in self.reclaimers:
            if blocks <= self.blocks.free_blocks:
                break
            reclaimer.reclaim(blocks - self.blocks.free_blocks)
        return self.blocks.take(blocks, behind=behind, grows=grows)

    def copy_from(self, other: KVPool, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the blocks ``source`` of ``other`` (it may be this pool) to ``target`` here, in order.

        Both must hold as many blocks and not overlap. Copies between devices are queued on the current
        stream and not waited for when the host side is pinned.
        """
        crossing = self.device != other.device
        for (src, dst), count in _pieces(source, target):
            here = slice(dst * self.block_size, (dst + count) * self.block_size)
            there = slice(src * self.block_size, (src + count) * self.block_size)
            for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
                if not crossing:
                    mine[:, here].copy_(theirs[:, there])
                    continue
                # one head at a time: only a contiguous copy between devices is not waited for
                for to, of in zip(mine, theirs, strict=True):
                    to[here].copy_(of[there], non_blocking=True)

    def check_integrity(self) -> None:
        """Raise AssertionError unless allocator, free list and owners agree on every block."""
        self.blocks.check_integrity()
        counted = np.zeros(self.total_blocks, np.int32)
        for owner in self.owners:
            for start, stop in owner.held_blocks():
                counted[start:stop] += 1
        wrong = np.flatnonzero(counted != self.blocks.references)
        assert not wrong.size, (
            f"block {wrong[0]} has {self.blocks.references[wrong[0]]} references and "
            f"{counted[wrong[0]]} owners ({wrong.size} such blocks)"
        )


def _pieces(source: Sequence[Run], target: Sequence[Run]) -> list[tuple[tuple[int, int], int]]:
    """((source block, target block), count) for each stretch that is contiguous on both sides."""
    pieces: list[tuple[tuple[int, int], int]] = []
    sources, targets = list(source), list(target)
    if sum(run.blocks for run in sources) != sum(run.blocks for run in targets):
        raise ValueError("as many blocks must be copied to as from")
    while sources:
        src, dst = sources[0], targets[0]
        count = min(src.blocks, dst.blocks)
        pieces.append(((src.start, dst.start), count))
        sources[0:1] = [Run(src.start + count, src.stop)] if count < src.blocks else []
        targets[0:1] = [Run(dst.start + count, dst.stop)] if count < dst.blocks else []
    return pieces
