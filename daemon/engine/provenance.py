"""Which records a session's window holds, and which its state depends on, version by version.

It begins with the tape and goes with its snapshots, so it is known whether the bars were asked or read again,
and by which engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import dropwhile
from typing import NamedTuple

import msgspec

from daemon.protocol import Provenance, ReadRange
from regions.tape import KVState

UNKNOWN = 0
"""Number of a stream that is not known: see `ingest.plane.TapeRecord`."""


class OffsetSpan(NamedTuple):
    """The records of one bar: first to last offset in a stream, by its number in the ring.

    ``gap``: records before the last of them were lost or skipped.
    """

    stream: int
    first: int
    last: int
    gap: bool = False


class ProvenanceState(msgspec.Struct, frozen=True):
    """A `ProvenanceLog` as plain data. ``newest``: last offset by stream. For the others see there."""

    firsts: dict[int, list[tuple[int, int]]] = {}
    newest: dict[int, int] = {}
    bars: int = 0
    forgotten: int = 0
    state: int = 0
    state_first: dict[int, int] | None = None
    left: bool = False
    gap: int = 0

    @property
    def streams(self) -> set[int]:
        """Numbers of its streams."""
        return {*self.firsts, *self.newest} - {UNKNOWN}


class ProvenanceLog:
    """One session's. It remembers the bars of the window. ``known``: it hears of all bars of its tape.

    Bars have numbers from 1 on, in the order in which they came.
    """

    def __init__(self, cut: ProvenanceState | None = None, *, known: bool = True) -> None:
        """``cut``: it goes on from there."""
        cut = cut or ProvenanceState(state_first={} if known else None)
        self._firsts = {stream: deque(firsts) for stream, firsts in cut.firsts.items()}
        """By stream, bars and their first offsets: those of which no later bar has a lower one."""
        self._newest = dict(cut.newest)
        self._bars, self._forgotten = cut.bars, cut.forgotten
        """Numbers of the newest bar, and of the newest one that has left the window."""
        self._state = cut.state
        self._state_first = None if cut.state_first is None else dict(cut.state_first)
        """First offset by stream of what the state depends on; None: not known."""
        self._left = cut.left
        """Bars left the window that the state began with while it was prefilled."""
        self._gap = cut.gap
        """Number of the newest bar with a gap."""

    def cut(self) -> ProvenanceState:
        """As it is now."""
        firsts = {stream: list(bars) for stream, bars in self._firsts.items()}
        state = None if self._state_first is None else dict(self._state_first)
        return ProvenanceState(
            firsts,
            dict(self._newest),
            self._bars,
            self._forgotten,
            self._state,
            state,
            self._left,
            self._gap,
        )

    def committed(self, reads: Sequence[OffsetSpan], live: int, state: KVState) -> Provenance:
        """A version of these new bars, oldest first; its window has ``live`` bars, and KV of ``state``."""
        for read in reads:
            self._add(read)
        if state.number != self._state:
            self._state, self._left = state.number, state.left
            self._state_first = self._since(state.records)
        elif self._state_first is not None:
            for stream, first, _, _ in reads:
                self._state_first[stream] = min(first, self._state_first.get(stream, first))
        window = self._since(live)
        known = window is not None and UNKNOWN not in window
        if window is None or not known:  # they may lie anywhere before
            window = {stream: 0 for stream in self._newest if stream != UNKNOWN}
        self._forget(self._bars - live)
        ranges = self._ranges(window), self._ranges(self._state_first or {})
        since_gap = self._bars - self._gap + 1 if self._gap else 0
        return Provenance(
            state.records, self._left, *ranges, known, since_gap if since_gap <= state.records else 0
        )

    def _add(self, read: OffsetSpan) -> None:
        stream, first, last, gap = read
        self._bars += 1
        self._gap = self._bars if gap else self._gap
        firsts = self._firsts.setdefault(stream, deque())
        while firsts and firsts[-1][1] >= first:
            firsts.pop()
        firsts.append((self._bars, first))
        self._newest[stream] = max(last, self._newest.get(stream, last))

    def _since(self, bars: int) -> dict[int, int] | None:
        """First offset by stream of the newest ``bars`` bars; None if not all of them are remembered."""
        before = self._bars - bars
        if before < self._forgotten:
            return None
        found: dict[int, int] = {}
        for stream, firsts in self._firsts.items():
            for _, first in dropwhile(lambda each: each[0] <= before, firsts):
                found[stream] = first
                break
        return found

    def _forget(self, until: int) -> None:
        """Forget the bars up to this number."""
        self._forgotten = max(self._forgotten, until)
        for stream, firsts in list(self._firsts.items()):
            while firsts and firsts[0][0] <= until:
                firsts.popleft()
            if not firsts:
                del self._firsts[stream]

    def _ranges(self, firsts: dict[int, int]) -> tuple[ReadRange, ...]:
        if UNKNOWN in firsts:
            return ()
        return tuple(ReadRange(stream, first, self._newest[stream]) for stream, first in firsts.items())
