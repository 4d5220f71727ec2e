"""Blocks under many readers at once, and the immutable past they make up.

A reader of a data version, of a frozen prefix or of a cached prefix holds the object, not its blocks: taking
and dropping a reader costs the same at any length of context.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from regions.allocator import Run
from regions.extents import Extent
from regions.pool import KVPool


class Held:
    """One reference to each block of ``runs``, given back when the last holder lets go."""

    def __init__(self, pool: KVPool, runs: Iterable[Run]) -> None:
        self.blocks = list(runs)
        self._pool = pool
        self._holders = 1
        pool.blocks.share(self.blocks)
        pool.owners.add(self)

    def retain(self) -> Held:
        """One holder more."""
        if not self._holders:
            raise RuntimeError("these blocks were already given back")
        self._holders += 1
        return self

    def release(self) -> None:
        """One holder less."""
        if not self._holders:
            raise RuntimeError("these blocks were already given back")
        self._holders -= 1
        if not self._holders:
            self._pool.owners.discard(self)
            self._pool.blocks.release(self.blocks)
            self.blocks = []

    @property
    def holders(self) -> int:
        """How many hold it."""
        return self._holders

    def held_blocks(self) -> list[Run]:
        """The blocks this object has a reference to."""
        return self.blocks


@dataclass(frozen=True)
class Past:
    """What a reader sees before its own tokens: extents, and the holds that keep them in place.

    ``coord``: stream coordinate of the reader's first own token; its local position is ``coord - origin``.
    ``base``: stream coordinate at which the anchored frozen prefix begins (the origin of a fresh frame).
    ``version``: the data version, 0 without a tape. A frozen or cached prefix begins at coordinate 0 and has
    origin 0.
    """

    extents: tuple[Extent, ...] = ()
    holds: tuple[Held, ...] = ()
    coord: int = 0
    origin: int = 0
    base: int = 0
    version: int = 0

    @cached_property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return sum(extent.length for extent in self.extents)

    def retain(self) -> Past:
        """One reader more; the same object."""
        for held in self.holds:
            held.retain()
        return self

    def release(self) -> None:
        """One reader less."""
        for held in self.holds:
            held.release()
