"""Amends closed bars by late records: a tape is only appended to, so a changed bar is written again.

A late record of a bar that the tape still retains makes one correction, a record of its own: the bar's line
as it is now, after the word `amend`. One of a bar that is not there any more, or never was, is dropped.
"""

from collections.abc import Callable

import numpy as np

from ingest.backlog import TapeWindow
from ingest.bar_kernel import AMENDS, BAR, EMPTY, EVENT, GAP, LATE, NEVER, OF_MOMENT, RESETS, Bars
from ingest.plane_state import LateUpdateState, Rows
from ingest.retained import Retained
from ingest.volumes import Volume, put_volume, volume_of

Lines = Callable[[Bars], list[list[int]]]
"""The token ids of each bar's line."""
_OF_CORRECTION = (
    *("ts_source", "ts_ring", "ts_closed", "ring_wait"),
    *("streams", "firsts", "lasts"),
    *("late_open", "refused_open"),
)
"""What a correction has from the late record, not from its bar."""
_Key = tuple[int, int]
"""Number of its symbol among the session's, and opening in ns."""


class Amender:
    """The bars that a session's tape retains, and late records merged into them.

    ``amended`` counts the corrections. The result doesn't depend on batches.
    """

    def __init__(self, lines: Lines, window: TapeWindow) -> None:
        self.amended = 0
        self._lines = lines
        self._retained: Retained[_Key | None] = Retained(window)
        """The records on the tape by their bars; None: a correction, or an event."""
        self._bars: dict[_Key, np.void] = {}
        self._newest = 0
        self._late_open = NEVER
        """Opening of the newest bar of which a late record was dropped."""
        self._gap = 0
        """Flag of a dropped record, for the next bar."""

    def retain(self, window: TapeWindow) -> None:
        """The tape retains another window from the next bar on."""
        self._retained.change(window)

    def cut(self) -> LateUpdateState:
        """Its state."""
        bars = np.array(list(self._bars.values()), BAR) if self._bars else np.zeros(0, BAR)
        return LateUpdateState(self._retained.rows(), Rows.of(bars), self._newest, self._gap, self._late_open)

    def restore(self, cut: LateUpdateState) -> None:
        """Go on from a cut. Raises ValueError for rows of another layout."""
        bars = cut.bars.array(BAR)
        self._bars = {(int(bar["leg"]), int(bar["ts_open"])): bar.copy() for bar in bars}
        self._retained.restore(cut.retained)
        self._newest, self._gap, self._late_open = cut.newest, cut.gap, cut.late_open

    def encode(self, rows: Bars) -> tuple[Bars, list[list[int]]]:
        """Closed bars and late records, BAR [n], as the bars and corrections to append, with their lines."""
        made, lines = [np.zeros(0, rows.dtype)], []
        for number in range(len(rows)):
            row = rows[number : number + 1].copy()
            if row["flags"][0] & RESETS:
                self._forget()
            if row["flags"][0] & EVENT:
                key = None
            elif row["flags"][0] & LATE:
                found = self._merge(row)
                if not found:
                    self._gap |= int(row["flags"][0]) & GAP
                    continue
                key = None
            else:
                key = int(row["leg"][0]), int(row["ts_open"][0])
                self._bars[key] = row[0].copy()
                self._bars[key]["flags"] &= ~np.uint32(OF_MOMENT)
            row["flags"] |= self._gap
            row["late_open"] = np.maximum(row["late_open"], self._late_open)
            self._gap = 0
            (line,) = self._lines(row)
            self._retain(key, len(line), int(row["ts_last_event"][0]))
            made.append(row)
            lines.append(line)
        return np.concatenate(made), lines

    def _merge(self, row: Bars) -> bool:
        """Merge a late record into its bar, and make ``row`` the correction; False: there is no such bar."""
        late = row[0].copy()
        opened = int(late["ts_open"])
        if late["n_ticks"]:
            opened -= opened % int(late["interval"]) if late["interval"] else 0
        bar = self._bars.get((int(late["leg"]), opened))
        if bar is None:
            self._late_open = max(self._late_open, opened)
            return False
        moment = late["flags"] & np.uint32(OF_MOMENT)
        late["flags"] ^= moment
        merge(bar, late)
        row[0] = bar
        row["flags"] |= AMENDS | moment
        for name in _OF_CORRECTION:
            row[name] = late[name]
        row["ts_last_event"] = self._newest
        self.amended += 1
        return True

    def _forget(self) -> None:
        """The window is reset."""
        self._retained.clear()
        self._bars.clear()

    def _retain(self, key: _Key | None, tokens: int, event: int) -> None:
        """Append a record and forget the bars that leave for it."""
        for gone in self._retained.add(key, tokens, event):
            if gone is not None:
                self._bars.pop(gone, None)
        self._newest = max(self._newest, event)


def merge(bar: np.void, late: np.void) -> None:
    """Change a closed bar, in place, to what it were if a late record had been in time.

    A late ready-made bar replaces the first one.
    """
    bar["flags"] = (bar["flags"] | (late["flags"] & ~np.uint32(LATE))) & ~np.uint32(EMPTY)
    if late["n_ticks"] == 0 or bar["n_ticks"] == 0:
        for name in ("o", "h", "l", "c", "v", "v_high", "v_low"):
            bar[name] = late[name]
        if late["n_ticks"]:
            bar["n_ticks"] = 1
            bar["ts_first_event"] = bar["ts_last_event"] = late["ts_open"]
        return
    price, event = late["c"], late["ts_open"]
    if event < bar["ts_first_event"]:
        bar["ts_first_event"], bar["o"] = event, price
    if event >= bar["ts_last_event"]:
        bar["ts_last_event"], bar["c"] = event, price
    bar["h"], bar["l"] = max(bar["h"], price), min(bar["l"], price)
    put_volume(bar, Volume.of(volume_of(bar).exact + volume_of(late).exact))
    bar["n_ticks"] += 1
