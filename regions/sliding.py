"""The sliding region: the records that a tape keeps, and their KV, in the pool or offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from regions.allocator import Run
from regions.block_pool import BlockPool
from regions.block_table import BlockTable
from regions.ephemeral import Fork
from regions.extents import Extent, Placement, SlotRange, drop_oldest, extend, relay
from regions.frozen import SharedBlocks
from regions.offload.store import Stored, StoredLost


@dataclass(frozen=True)
class Retention:
    """How much of the tape stays: at most ``tokens`` tokens and, unless 0, at most ``records`` records, none
    of them older than ``span_ns`` of event time before the newest.
    """

    tokens: int
    records: int = 0
    span_ns: int = 0


class LiveRecord(NamedTuple):
    """A record of the window: its tokens and its event time, ns."""

    tokens: Sequence[int]
    ts_event: int


class Stretch(NamedTuple):
    """``length`` consecutive tokens of one position frame: an extent without its slots."""

    length: int
    coord: int
    origin: int

    @property
    def max_position(self) -> int:
        """The highest local position of its tokens."""
        return self.coord + self.length - self.origin - 1


class TapeState(msgspec.Struct, frozen=True):
    """All of a tape but the KV itself and the frozen prefix: enough to go on from stored KV.

    ``origin``: of the frame the next token is written in. ``stretches``: the records' tokens by frame.
    """

    version: int
    evicted_tokens: int
    evicted_records: int
    origin: int
    records: tuple[LiveRecord, ...]
    stretches: tuple[Stretch, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the window."""
        return sum(len(record.tokens) for record in self.records)

    def check(self, frame_limit: int) -> None:
        """Raise ValueError unless records and stretches agree, with all positions below ``frame_limit``."""
        coord = self.evicted_tokens
        for stretch in self.stretches:
            if stretch.coord != coord or stretch.length < 1:
                raise ValueError(f"the stored window has a hole at token {coord}")
            if stretch.max_position >= frame_limit:
                raise ValueError(
                    f"stored positions reach {stretch.max_position}, the frame limit is {frame_limit}"
                )
            coord += stretch.length
        if coord != self.evicted_tokens + self.tokens:
            raise ValueError("the stored window and its records have different lengths")


class WindowKV:
    """Slots that grow at the tail and are given back at the head, and the extents over them.

    While it is offloaded (`stored`) it has no slots. What is evicted meanwhile is noted and dropped once it
    is back: the version that was offloaded stays whole until the next one is committed. It is `lost` when
    what was stored cannot be had back, until `replace` brings other KV.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.stored: Stored | None = None
        self.lost = False
        self._pool = pool
        self._table = BlockTable(pool, grows=True)
        self._extents: list[Extent] = []
        self._evicted = 0

    @property
    def resident(self) -> bool:
        """It is in the pool."""
        return self.stored is None and not self.lost

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Oldest first. Raises RuntimeError unless resident."""
        if not self.resident:
            raise RuntimeError("a window that is not in the pool has no extents in it")
        return tuple(self._extents)

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The extents without their slots."""
        return tuple(Stretch(e.length, e.coord, e.origin) for e in self._extents)

    @property
    def live_ranges(self) -> tuple[SlotRange, ...]:
        """Its slots, oldest token first; none unless resident."""
        return self._table.live_ranges()

    @property
    def live_runs(self) -> list[Run]:
        """The blocks with a live token."""
        return self._table.live_runs()

    def share(self) -> SharedBlocks:
        """One more reference to each of those blocks."""
        return SharedBlocks(self._pool, self.live_runs)

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit, those to come back to included."""
        return self._table.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """Take blocks for ``n`` more tokens; False, and nothing changed, when the pool cannot."""
        return self._table.acquire(n)

    def next(self, n: int) -> tuple[SlotRange, ...]:
        """The ranges of the next ``n`` slots; their blocks must have been acquired."""
        return self._table.next(n)

    def wrote(self, placement: Placement, n: int) -> None:
        """The ``n`` tokens of ``placement`` are in KV."""
        extend(self._extents, placement.slots, placement.coord, placement.origin)
        self._table.advance(n)

    def drop_oldest(self, tokens: int) -> None:
        """Evict the oldest ``tokens`` tokens, at once or when it is back."""
        if not self.resident:
            self._evicted += tokens
            return
        drop_oldest(self._extents, tokens)
        self._table.drop_oldest(tokens)

    def offload(self, stored: Stored) -> None:
        """``stored`` has all of it from here on."""
        self._table.unmap()
        self.stored = stored

    def swap_in(self, n: int) -> bool:
        """Fetch it as it was offloaded, with room for ``n`` more tokens; `drop_evicted` is to follow.

        False, and nothing changed, when the pool has no room. Raises StoredLost: it is lost then.
        """
        assert self.stored is not None  # the caller asked
        try:
            if not self._table.swap_in(self.stored, n):
                return False
        except StoredLost:
            self.stored.release()
            self.stored, self.lost = None, True
            raise
        self.stored = None
        self._extents = relay(self._extents, self._table.live_ranges())
        return True

    def drop_evicted(self) -> None:
        """Drop what was evicted while it was offloaded."""
        evicted, self._evicted = self._evicted, 0
        self.drop_oldest(evicted)

    def compact(self) -> bool:
        """Copy it to one run of blocks, if it lies in several and one is free; tokens keep their frames."""
        if not self._table.compact():
            return False
        self._extents = relay(self._extents, self._table.live_ranges())
        return True

    def replace(self, fresh: Fork) -> int:
        """Go on with what ``fresh`` has, detached from it; returns the origin of its newest frame."""
        table, extents, origin = fresh.detach()
        self.release()
        self._table, self._extents = table, extents
        return origin

    def expect(self, state: TapeState, stored: Stored) -> None:
        """``stored`` has the window of ``state``. For one that has nothing yet."""
        self._table.expect(state.tokens)
        self._extents = [Extent(0, s.length, s.coord, s.origin) for s in state.stretches]
        self.stored = stored

    def release(self) -> None:
        """Give everything back, here and where it is stored."""
        if self.stored is not None:
            self.stored.release()
            self.stored = None
        self._evicted, self.lost = 0, False
        self._table.release()
