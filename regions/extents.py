"""Extents and position frames: where a reader's context lies, and how its query is rotated.

Keys are stored rotated at a *local position* and never rewritten. Every extent has the stream coordinate of
its frame's position 0 (``origin``). A query in a frame with origin ``q`` is rotated by ``q - origin``
positions before it attends to the extent's keys, so the relative distance is that of the stream coordinates.
The frozen prefix gets coordinates that end right before the oldest live record. The tape is thus always
anchored behind the prefix, and local positions stay bounded however long the stream runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from regions.allocator import Run


class Extent(NamedTuple):
    """``length`` slots in one position frame; ``coord``: stream coordinate of the first key."""

    slot: int
    length: int
    coord: int
    origin: int


class Segment(NamedTuple):
    """``length`` consecutive tokens of one position frame: an extent without its slots."""

    length: int
    coord: int
    origin: int

    @property
    def max_position(self) -> int:
        """Highest local position of its tokens."""
        return self.coord + self.length - self.origin - 1


SlotRange = tuple[int, int]
"""(first slot, number of slots)."""


@dataclass(frozen=True)
class Placement:
    """The slots of a target's next tokens, and the extents they see.

    ``context``: extents that every new token sees. ``slots``: ranges for the new KV, in order. ``coord``:
    stream coordinate of the first new token; its position is ``coord - origin``. ``windows``: where not all
    of them see the same extents, those that each token from a number on sees, the first number being 0.
    ``own``: stream coordinate from which on a fork's tokens are its own.
    """

    context: tuple[Extent, ...]
    slots: tuple[SlotRange, ...]
    coord: int
    origin: int
    windows: tuple[tuple[int, tuple[Extent, ...]], ...] = ()
    own: int | None = None


def extend(extents: list[Extent], slots: Iterable[SlotRange], coord: int, origin: int) -> None:
    """Append written ranges to ``extents``; merge where slots and frame continue."""
    for slot, count in slots:
        last = extents[-1] if extents else None
        if last and last.slot + last.length == slot and last.origin == origin:
            extents[-1] = last._replace(length=last.length + count)
        else:
            extents.append(Extent(slot, count, coord, origin))
        coord += count


def drop_oldest(extents: list[Extent], tokens: int) -> None:
    """Remove the first ``tokens`` tokens of ``extents``, whose coordinates are consecutive."""
    if extents:
        extents[:] = between(extents, extents[0].coord + tokens, extents[-1].coord + extents[-1].length)


def between(extents: Iterable[Extent], start: int, stop: int) -> list[Extent]:
    """The part of ``extents`` at coordinates ``start`` to ``stop`` (exclusive)."""
    kept: list[Extent] = []
    for extent in extents:
        low, high = max(start, extent.coord), min(stop, extent.coord + extent.length)
        if low < high:
            kept.append(Extent(extent.slot + low - extent.coord, high - low, low, extent.origin))
    return kept


def anchor(extents: Iterable[Extent], origin: int) -> tuple[Extent, ...]:
    """Move the coordinates of ``extents`` (stored with origin 0) by ``origin``."""
    return tuple(Extent(e.slot, e.length, e.coord + origin, e.origin + origin) for e in extents)


def keep_oldest(extents: list[Extent], tokens: int) -> None:
    """Keep only the first ``tokens`` tokens of ``extents``, whose coordinates are consecutive."""
    if extents:
        extents[:] = between(extents, extents[0].coord, extents[0].coord + tokens)


def relay(extents: Iterable[Extent], ranges: Iterable[SlotRange]) -> list[Extent]:
    """The same tokens, coordinates and frames in other slots; merged where slots and frame continue."""
    laid: list[Extent] = []
    targets = list(ranges)
    for extent in extents:
        coord, left = extent.coord, extent.length
        while left:
            slot, count = targets[0]
            here = min(left, count)
            extend(laid, [(slot, here)], coord, extent.origin)
            coord, left = coord + here, left - here
            targets[0:1] = [(slot + here, count - here)] if here < count else []
    return laid


def blocks_of(extents: Iterable[Extent], block_size: int) -> list[Run]:
    """The blocks under ``extents``, in order."""
    return [Run(e.slot // block_size, -(-(e.slot + e.length) // block_size)) for e in extents]
