"""The closed bars of a session that wait for the engine, before they are encoded.

A session gets credits from the engine: that many of its bars may be there at a time. The others wait here, so
a session with too much data delays itself only. Of a source that cannot wait, at most one window waits: what
is older could never be shown, so it is skipped before it costs anything, and the next bar has a gap.

While such a session catches up (its bars come more than `_FASTER` times as fast as their source had them),
none is released before they come slower: a backlog of any length costs one window. What a source says of its
times may be wrong, so one window is released every `_HOLD_MOST_NS` anyway. Bars that were answered before a
restart are neither held nor skipped: they left traces in the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingest.bar_kernel import BAR, GAP, LATE, RESETS, ROLLED, Bars

_FASTER = 4
_HOLD_NS = 200_000_000
"""A bar that came too fast is held for this long, for the next one may come as fast."""
_HOLD_MOST_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class TapeWindow:
    """What a session's tape retains: tokens, records, event time in ns; 0 is no limit for the last two."""

    tokens: int = 4096
    records: int = 0
    span_ns: int = 0


class Backlog:
    """Waiting bars of one session, oldest first. ``skips``: of a source that cannot wait.

    ``skipped`` counts the skipped bars. One thread changes it; any may ask for its length.
    """

    def __init__(self, window: TapeWindow, *, skips: bool) -> None:
        self._window, self._skips = window, skips
        self._bars = np.zeros(0, BAR)
        self.shortest = 1
        """Tokens of the shortest line so far."""
        self._newest = (0, 0)
        """When source (wall clock) and ring (monotonic clock) had the newest bar's last record, ns."""
        self._held_until = self._released = 0
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._bars)

    @property
    def bars(self) -> Bars:
        """Those that wait, BAR [n]."""
        return self._bars

    @property
    def together(self) -> int:
        """How many of the oldest were closed by one record."""
        by = self._bars["closed_by"]
        return int(np.argmax(by != by[0])) or len(by) if len(by) else 0

    def restore(self, bars: Bars, shortest: int) -> None:
        """These bars wait, and nothing more is known of the session than its shortest line."""
        self._bars, self.shortest = bars, shortest

    @property
    def most(self) -> int:
        """The most bars that the window can hold."""
        by_tokens = max(1, self._window.tokens // self.shortest)
        return min(by_tokens, self._window.records or by_tokens)

    @property
    def full(self) -> bool:
        """A whole window waits, and the source can wait, too."""
        return not self._skips and len(self._bars) >= self.most

    def add(self, bars: Bars, *, all_count: bool = False) -> None:
        """Closed bars, BAR [n], follow those that wait. ``all_count``: none is skipped for now."""
        self._bars = np.concatenate([self._bars, bars]) if len(self._bars) else bars.copy()
        if self._skips and not all_count:
            self._look(bars)
            self._pass_over()

    def retain(self, window: TapeWindow) -> None:
        """The tape retains another window from now on."""
        self._window = window

    def held(self, now_ns: int) -> bool:
        """Whether the session is catching up at this time of the monotonic clock."""
        return now_ns < min(self._held_until, self._released + _HOLD_MOST_NS)

    def take(self, n: int, now_ns: int) -> Bars:
        """Remove and return the ``n`` oldest bars, BAR [n], fewer if there are fewer."""
        taken, self._bars = self._bars[:n], self._bars[n:]
        self._released = now_ns
        return taken

    def learn(self, lines: Sequence[Sequence[int]]) -> None:
        """These lines were made of its bars."""
        shortest = min(map(len, lines), default=self.shortest)
        self.shortest = shortest if self.shortest == 1 else min(self.shortest, shortest)

    def _look(self, bars: Bars) -> None:
        """Hold the session if its newest bar came too fast after the one before it."""
        before = self._newest if len(bars) == 1 else _times(bars[-2])
        source, ring = self._newest = _times(bars[-1])
        closed = int(bars[-1]["ts_closed"])
        if before[0] and source - before[0] > _FASTER * (ring - before[1]):
            if not self._held_until:
                self._released = closed
            self._held_until = closed + _HOLD_NS
        else:
            self._held_until = 0

    def _pass_over(self) -> None:
        bars, beyond = self._bars, len(self._bars) - self.most
        if self._window.span_ns:
            events = bars["ts_last_event"]  # they rise
            beyond = max(beyond, int(events.searchsorted(events[-1] - self._window.span_ns)))
        if beyond > 0:
            self._bars = bars[beyond:].copy()
            self._bars["flags"][0] |= GAP
            self._roll(bars[:beyond])
            if (bars["flags"][:beyond] & np.uint32(RESETS)).any():  # bars for a whole window wait behind it
                first = int((self._bars["flags"] & np.uint32(LATE) == 0).argmax())
                self._bars["flags"][first] |= np.uint32(RESETS)
                self._bars["split"][first] = 0
            self.skipped += beyond

    def _roll(self, skipped: Bars) -> None:
        """The first bar behind skipped ones, of each symbol of which one was rolled, is rolled."""
        for leg in np.unique(skipped["leg"][skipped["flags"] & np.uint32(ROLLED) != 0]).tolist():
            following = np.flatnonzero(self._bars["leg"] == leg)
            self._bars["flags"][following[:1]] |= np.uint32(ROLLED)


def _times(bar: np.void) -> tuple[int, int]:
    return int(bar["ts_source"]), int(bar["ts_ring"])
