"""The frozen region: an immutable prefix with many readers, and the contexts made of it.

A reader of a data version, a frozen prefix or a cached prefix refers to one object instead of its blocks, so
adding and removing a reader costs the same for any length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from regions.allocator import Run
from regions.extents import Extent, between, blocks_of, extend
from regions.pool_metadata import BlockPool


class SharedBlocks:
    """One reference to each block of ``runs``; the last reader releases it."""

    def __init__(self, pool: BlockPool, runs: Iterable[Run]) -> None:
        self.blocks = list(runs)
        self.readers = 1
        self._pool = pool
        pool.blocks.share(self.blocks)
        pool.owners.add(self)

    def retain(self) -> SharedBlocks:
        """Add a reader."""
        self._check()
        self.readers += 1
        return self

    def release(self) -> None:
        """Remove a reader."""
        self._check()
        self.readers -= 1
        if not self.readers:
            self._pool.owners.discard(self)
            self._pool.blocks.release(self.blocks)
            self.blocks = []

    def referenced_blocks(self) -> list[Run]:
        """See `Owner`."""
        return self.blocks

    def _check(self) -> None:
        if not self.readers:
            raise RuntimeError("these blocks were already released")


@dataclass(frozen=True)
class Context:
    """What a reader sees before its own tokens: extents, and the blocks that keep them in the pool.

    ``coord``: stream coordinate of the reader's first own token; its local position is ``coord - origin``.
    ``base``: stream coordinate of the first token of the anchored frozen prefix (the origin of a new frame).
    ``version``: data version, 0 without a tape. ``prefix``: the tokens of the frozen prefix it begins with,
    where they are known. A frozen or cached prefix has coordinate and origin 0.
    """

    extents: tuple[Extent, ...] = ()
    blocks: tuple[SharedBlocks, ...] = ()
    coord: int = 0
    origin: int = 0
    base: int = 0
    version: int = 0
    prefix: tuple[int, ...] = ()

    @cached_property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(extent.length for extent in self.extents)

    def retain(self) -> Context:
        """Add a reader; returns the same object."""
        for shared in self.blocks:
            shared.retain()
        return self

    def release(self) -> None:
        """Remove a reader."""
        for shared in self.blocks:
            shared.release()


def alias(pool: BlockPool, extents: Iterable[Extent], tokens: int) -> Context:
    """The first ``tokens`` tokens of a prompt's ``extents`` as a context with its own references.

    The prompt must begin at coordinate 0 in the frame of origin 0, so that its keys equal those of every
    other prompt with the same tokens.
    """
    kept: list[Extent] = []
    for extent in between(extents, 0, tokens):
        extend(kept, [(extent.slot, extent.length)], extent.coord, extent.origin)
    return Context(tuple(kept), (SharedBlocks(pool, blocks_of(kept, pool.block_size)),), coord=tokens)
