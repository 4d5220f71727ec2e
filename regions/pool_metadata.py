"""Metadata of the paged pool: allocator, owners of references, and caches that free blocks on demand.

It has no tensors, so the scheduler's simulator and tests run on it; `regions.kv_tensors` adds the keys and
values.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet, ref

import numpy as np

from regions.allocator import BlockAllocator, Run


class Owner(Protocol):
    """Has a reference to each of its blocks."""

    def referenced_blocks(self) -> list[Run]:
        """Its blocks."""


class Reclaimer(Protocol):
    """Keeps blocks that can be freed on demand, such as a prefix cache."""

    @property
    def reclaimable(self) -> int:
        """A lower bound on the blocks that `reclaim` can free."""

    def reclaim(self, blocks: int) -> None:
        """Free ``blocks`` blocks, or as many as possible."""


class BlockPool:
    """``n_blocks`` blocks of ``block_size`` slots: slot = block * block_size + offset."""

    def __init__(self, n_blocks: int, *, block_size: int = 16) -> None:
        self.blocks = BlockAllocator(n_blocks)
        self.block_size = block_size
        self.owners: WeakSet[Owner] = WeakSet()
        self.leaving = 0
        """Blocks that become free as soon as their KV is copied elsewhere: what needs them waits."""
        self._reclaimers: list[ref[Reclaimer]] = []

    @property
    def reclaimers(self) -> list[Reclaimer]:
        """The reclaimers, in the order in which they are called."""
        return [reclaimer for weak in self._reclaimers if (reclaimer := weak()) is not None]

    def add_reclaimer(self, reclaimer: Reclaimer) -> None:
        """Add a reclaimer, to be called after the others. Only a weak reference is kept."""
        self._reclaimers.append(ref(reclaimer))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken: free ones, and those that reclaimers can free."""
        return self.blocks.free_blocks + sum(reclaimer.reclaimable for reclaimer in self.reclaimers)

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool, free or in use."""
        return self.blocks.total_blocks

    @property
    def capacity(self) -> int:
        """The most blocks that the pool can be resized to."""
        return self.blocks.capacity

    def take(self, blocks: int, *, behind: int | None = None, grows: bool = False) -> list[Run] | None:
        """As `BlockAllocator.take`; reclaimers free the missing blocks first."""
        for reclaimer in self.reclaimers:
            if blocks <= self.blocks.free_blocks:
                break
            reclaimer.reclaim(blocks - self.blocks.free_blocks)
        return self.blocks.take(blocks, behind=behind, grows=grows)

    def resize(self, blocks: int) -> None:
        """See `BlockAllocator.resize`."""
        self.blocks.resize(blocks)
        self.blocks.retired.clear()

    def move(self, source: Sequence[Run], target: Sequence[Run]) -> None:
        """Copy the KV of the blocks ``source`` to as many blocks ``target``; does nothing without tensors."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless allocator, free list and owners agree on every block."""
        self.blocks.check_integrity()
        counted = np.zeros(self.capacity, np.int32)
        for owner in self.owners:
            for start, stop in owner.referenced_blocks():
                counted[start:stop] += 1
        wrong = np.flatnonzero(counted != self.blocks.references)
        assert not wrong.size, (
            f"block {wrong[0]} has {self.blocks.references[wrong[0]]} references and "
            f"{counted[wrong[0]]} owners ({wrong.size} such blocks)"
        )
