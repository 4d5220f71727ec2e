"""The market regime of a session at a bar: how volatile it is, the time of day, and whether there was a gap.

A regime has a name, such as ``wild/12-18/gap``.
The symbol is the session's, so it needs no part in the name.
"""

from __future__ import annotations

import msgspec

_FAST, _SLOW = 16, 512
"""Bars over which the recent and the usual true range are taken, with weights that fall exponentially."""
_CALM, _WILD = 0.75, 1.33
"""Recent over usual true range, below and above which a market is calm and wild."""
_HOUR_NS, _HOURS = 3_600_000_000_000, 6
_LONG, _APART = 8, 64
"""Times the mean distance of the latest bars, and their number, above which there is a gap between two."""
_SINCE = 32
"""Bars that still show a gap."""


class RegimeTracker(msgspec.Struct, frozen=True):
    """What a session's bars so far say of the next one. Ranges are shares of the close, times ns.

    ``bars``: their number. ``fast``, ``slow``: mean true ranges. ``apart``: mean distance of bars in time.
    ``since_gap``: bars since the last gap; ``last``: the newest bar's event time, and ``close`` its close.
    """

    bars: int = 0
    fast: float = 0.0
    slow: float = 0.0
    apart: float = 0.0
    since_gap: int = _SINCE
    last: int = 0
    close: int = 0

    def after(self, at: int, high: int, low: int, close: int, *, gap: bool = False) -> RegimeTracker:
        """The state after a bar with newest event time ``at``; ``gap``: records before it are missing."""
        if not self.bars:
            spread = (high - low) / max(abs(close), 1)
            return RegimeTracker(1, spread, spread, 0.0, 0 if gap else _SINCE, at, close)
        spread = (max(high, self.close) - min(low, self.close)) / max(abs(close), 1)
        step, n = float(max(at - self.last, 0)), self.bars
        if n == 1:
            apart = step
        else:
            gap |= step > _LONG * self.apart > 0
            apart = self.apart + (min(step, _LONG * self.apart or step) - self.apart) / min(n, _APART)
        return RegimeTracker(
            n + 1,
            self.fast + (spread - self.fast) / min(n + 1, _FAST),
            self.slow + (spread - self.slow) / min(n + 1, _SLOW),
            apart,
            0 if gap else min(self.since_gap + 1, _SINCE),
            at,
            close,
        )

    @property
    def name(self) -> str:
        """The regime's name."""
        ratio = self.fast / self.slow if self.slow else 1.0
        volatility = "calm" if ratio < _CALM else "wild" if ratio > _WILD else "usual"
        begin = self.last // _HOUR_NS % 24 // _HOURS * _HOURS
        gap = "/gap" if self.since_gap < _SINCE else ""
        return f"{volatility}/{begin:02d}-{begin + _HOURS:02d}{gap}"
