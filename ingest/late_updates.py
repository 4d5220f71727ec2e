"""Changes of closed bars: by late records, and by a split.

A tape is only appended to. A late record of a bar that the tape still retains makes one correction, a record
of its own: the bar's line as it is now, after the word `amend`. One of a bar that is not there any more, or
never was, is dropped. A split may begin the tape again, with the bars of before it adjusted.
"""

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ingest.backlog import TapeWindow
from ingest.bar_kernel import AMENDS, BAR, EMPTY, EVENT, GAP, LATE, NEVER, OF_MOMENT, RESETS, Bars
from ingest.compact import Restart
from ingest.feed_rules import SPLITS
from ingest.plane_state import LateUpdateState, Rows
from ingest.retained import Retained
from ingest.splits import adjusted, ratio_of
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
    """The bars that a session's tape retains, and what changes them.

    ``amended`` counts the corrections. The result doesn't depend on batches.
    """

    def __init__(self, lines: Lines, window: TapeWindow, *, amends: bool = True) -> None:
        """``amends``: late records make corrections, or are left out."""
        self.amended = 0
        self._lines, self._amends = lines, amends
        self._retained: Retained[_Key | None] = Retained(window)
        """The records on the tape by their bars; None: a correction, or an event."""
        self._bars: dict[_Key, np.void] = {}
        self._newest = 0
        self._splits: list[tuple[int, int, float]] = []
        """Those that adjusted the window: of which symbol, the time of the first price behind, the factor."""
        self._restart: Restart | None = None
        """The window that begins before the next record, once there is one."""
        self._late_open = NEVER
        """Opening of the newest bar of which a late record was dropped."""
        self._gap = 0
        """Flag of a dropped record, for the next bar."""

    def change(self, window: TapeWindow, *, amends: bool) -> None:
        """The tape retains another window from the next bar on; ``amends``: as at first."""
        self._retained.change(window)
        self._amends = amends

    def cut(self) -> LateUpdateState:
        """Its state."""
        bars = self._kept()
        times = self._newest, self._gap, self._late_open
        begins = self._restart is not None
        return LateUpdateState(self._retained.rows(), Rows.of(bars), *times, self._splits, begins)

    def restore(self, cut: LateUpdateState) -> None:
        """Go on from a cut. Raises ValueError for rows of another layout."""
        bars = cut.bars.array(BAR)
        self._bars = {(int(bar["leg"]), int(bar["ts_open"])): bar.copy() for bar in bars}
        self._retained.restore(cut.retained)
        self._newest, self._gap, self._late_open = cut.newest, cut.gap, cut.late_open
        self._splits = list(cut.splits)
        self._restart = self._window(self._lines(bars)) if cut.begins else None

    def encode(self, rows: Bars) -> tuple[Bars, list[list[int]], dict[int, Restart]]:
        """Closed bars and late records, BAR [n], as the bars and corrections to append, with their lines.

        And by the number of a bar among those the window that begins before it.
        """
        made, lines, restarts = [np.zeros(0, rows.dtype)], list[list[int]](), dict[int, Restart]()
        for number in range(len(rows)):
            row = rows[number : number + 1].copy()
            if row["flags"][0] & RESETS:
                self._begin_again(row[0])
            if row["flags"][0] & EVENT:
                key = None
            elif row["flags"][0] & LATE:
                if not self._amends or not self._merge(row):
                    self._gap |= int(row["flags"][0]) & GAP
                    continue
                key = None
            else:
                key = int(row["leg"][0]), int(row["ts_open"][0])
                self._bars[key] = row[0].copy()
                self._bars[key]["flags"] &= ~np.uint32(OF_MOMENT)
                self._bars[key]["split"] = 0
            if self._restart is not None:
                restarts[len(lines)], self._restart = self._restart, None
            row["flags"] |= self._gap
            row["late_open"] = np.maximum(row["late_open"], self._late_open)
            self._gap = 0
            (line,) = self._lines(row)
            self._retain(key, len(line), int(row["ts_last_event"][0]))
            made.append(row)
            lines.append(line)
        return np.concatenate(made), lines, restarts

    def _merge(self, row: Bars) -> bool:
        """Merge a late record into its bar, and make ``row`` the correction; False: there is no such bar."""
        late = row[0].copy()
        opened = int(late["ts_open"])
        moment_ns = opened
        if late["n_ticks"]:
            opened -= opened % int(late["interval"]) if late["interval"] else 0
        bar = self._bars.get((int(late["leg"]), opened))
        if bar is None or not self._in_new_units(late, moment_ns):
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

    def _in_new_units(self, late: np.void, moment_ns: int) -> bool:
        """Put a late record of before a split into the units behind it; False: they do not fit."""
        with suppress(ArithmeticError):
            for leg, behind, factor in self._splits:
                if leg == late["leg"] and moment_ns < behind:
                    _adjust(late, factor)
            return True
        return False

    def _begin_again(self, row: np.void) -> None:
        """The window begins before this bar: empty, or with its bars in the units behind a split."""
        bars, leg, factor = np.zeros(0, BAR), int(row["leg"]), float(row["split"])
        try:
            if factor > 0:
                bars = np.array([self._bars[key] for key in self._retained if key is not None], BAR)
                for number in np.flatnonzero(bars["leg"] == leg).tolist():
                    _adjust(bars[number], factor)
                self._splits = [*self._splits[1 - SPLITS :], (leg, int(row["ts_first_event"]), factor)]
            else:
                self._splits = []
        except ArithmeticError:
            bars, self._splits = bars[:0], []
        self._retained.clear()
        self._bars.clear()
        lines = self._lines(bars)
        for bar, line in zip(bars, lines, strict=True):
            key = int(bar["leg"]), int(bar["ts_open"])
            self._bars[key] = bar.copy()
            self._retain(key, len(line), int(bar["ts_last_event"]))
        self._restart = self._window(lines[len(lines) - len(self._bars) :])

    def _kept(self) -> Bars:
        """The bars that are retained, BAR [n]."""
        return np.array(list(self._bars.values()), BAR) if self._bars else np.zeros(0, BAR)

    def _window(self, lines: list[list[int]]) -> Restart:
        """The bars that are retained, as a window; ``lines``: theirs."""
        bars = self._kept()
        events, opened = bars["ts_last_event"].tolist(), bars["ts_open"].tolist()
        window = ((tuple(line), event) for line, event in zip(lines, events, strict=True))
        return Restart(None, tuple(window), tuple(opened))

    def _retain(self, key: _Key | None, tokens: int, event: int) -> None:
        """Append a record and forget the bars that leave for it."""
        for gone in self._retained.add(key, tokens, event):
            if gone is not None:
                self._bars.pop(gone, None)
        self._newest = max(self._newest, event)


def _adjust(bar: np.void, factor: float) -> None:
    """Change a bar, in place, to the units behind a split. Raises OverflowError."""
    prices, volume = adjusted([int(bar[name]) for name in "ohlc"], volume_of(bar), ratio_of(factor))
    bar["o"], bar["h"], bar["l"], bar["c"] = prices
    put_volume(bar, volume)


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
