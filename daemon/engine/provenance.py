"""Which records a session's window holds, and which its state depends on, version by version.

It begins with the tape and goes with its snapshots, so it is known whether the bars were asked or read again,
and by which engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec import structs

from daemon.protocol import Provenance
from ingest.record import ReadRange
from regions.tape import KVState

_NUMBER = itemgetter(0)
_UNKNOWN = 0
"""Number of a stream that is not known."""


class BarOrigin(NamedTuple):
    """Where the records of one bar were read; without ``reads`` that is not known.

    ``gap``: records before the last of them were lost or skipped.
    """

    reads: tuple[ReadRange, ...]
    gap: bool = False


class ProvenanceLog(msgspec.Struct):
    """One session's. It remembers the bars of the window, which have numbers from 1 on, as they came.

    ``firsts``: by stream, bars and their first offsets: those of which no later bar has a lower one.
    ``newest``: last offset by stream. ``bars``, ``forgotten``: numbers of the newest bar, and of the newest
    one that has left the window. ``state``: number of the window's KV; ``state_first``: first offset by
    stream of what it depends on, None: not known; ``left``: bars left the window that it began with while it
    was prefilled. ``gap``: number of the newest bar with a gap.
    """

    firsts: dict[int, list[tuple[int, int]]] = {}
    newest: dict[int, int] = {}
    bars: int = 0
    forgotten: int = 0
    state: int = 0
    state_first: dict[int, int] | None = {}
    left: bool = False
    gap: int = 0

    @property
    def streams(self) -> set[int]:
        """Numbers of its streams."""
        return {*self.firsts, *self.newest} - {_UNKNOWN}

    def copied(self) -> ProvenanceLog:
        """As it is now; it does not change with this one."""
        firsts = {stream: list(bars) for stream, bars in self.firsts.items()}
        state = None if self.state_first is None else dict(self.state_first)
        return structs.replace(self, firsts=firsts, newest=dict(self.newest), state_first=state)

    def committed(self, bars: Sequence[BarOrigin], live: int, state: KVState) -> Provenance:
        """A version of these new bars, oldest first; its window has ``live`` bars, and KV of ``state``."""
        reads = [read for bar in bars for read in self._add(bar)]
        if state.number != self.state:
            self.state, self.left = state.number, state.left
            self.state_first = self._since(state.records)
        elif self.state_first is not None:
            for stream, first, _ in reads:
                self.state_first[stream] = min(first, self.state_first.get(stream, first))
        window = self._since(live)
        known = window is not None and _UNKNOWN not in window
        if window is None or not known:  # they may lie anywhere before
            window = {stream: 0 for stream in self.newest if stream != _UNKNOWN}
        self._forget(self.bars - live)
        ranges = self._ranges(window), self._ranges(self.state_first or {})
        since_gap = self.bars - self.gap + 1 if self.gap else 0
        return Provenance(
            state.records, self.left, *ranges, known, since_gap if since_gap <= state.records else 0
        )

    def _add(self, bar: BarOrigin) -> Sequence[ReadRange]:
        """Where the bar's records were read."""
        self.bars += 1
        self.gap = self.bars if bar.gap else self.gap
        reads = bar.reads or (ReadRange(_UNKNOWN, 0, 0),)
        for stream, first, last in reads:
            firsts = self.firsts.setdefault(stream, [])
            while firsts and firsts[-1][1] >= first:
                firsts.pop()
            firsts.append((self.bars, first))
            self.newest[stream] = max(last, self.newest.get(stream, last))
        return reads

    def _since(self, bars: int) -> dict[int, int] | None:
        """First offset by stream of the newest ``bars`` bars; None if not all of them are remembered."""
        before = self.bars - bars
        if before < self.forgotten:
            return None
        found: dict[int, int] = {}
        for stream, firsts in self.firsts.items():
            at = bisect_right(firsts, before, key=_NUMBER)
            if at < len(firsts):
                found[stream] = firsts[at][1]
        return found

    def _forget(self, until: int) -> None:
        """Forget the bars up to this number."""
        self.forgotten = max(self.forgotten, until)
        for firsts in self.firsts.values():
            del firsts[: bisect_right(firsts, until, key=_NUMBER)]
        self.firsts = {stream: firsts for stream, firsts in self.firsts.items() if firsts}

    def _ranges(self, firsts: dict[int, int]) -> tuple[ReadRange, ...]:
        if _UNKNOWN in firsts:
            return ()
        return tuple(ReadRange(stream, first, self.newest[stream]) for stream, first in firsts.items())
