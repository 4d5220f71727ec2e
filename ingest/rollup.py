"""What has left a session's window, as longer bars: the rollup region (*Attention Once* section 6.2).

Bars go into tiers, finest first: each tier keeps a number of bars of one interval, aligned to the epoch by
their opening. A tier's oldest bar goes into the next tier, and the last tier's is forgotten. So every bar is
in exactly one longer bar, and each longer bar reaches to the opening of the next. Where two tiers meet, and
where the window begins, one may hold less than its interval; each says how many bars it is made of. All
numbers are Python integers: nothing is rounded before it is printed, and nothing saturates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from ingest.lines import NAMES, LineSpec, bar_row, clock_text, decimal, line_of
from ingest.volumes import SCALE as VOLUME_SCALE
from ingest.volumes import Volume

END = "The newest bars, one by one:\n"
"""Behind the lines of the rollup."""
_SECOND = 10**9


def introduction(spec: LineSpec) -> str:
    """Before the lines of the rollup."""
    next_one = "the next one of its symbol" if spec.symbols else "the next one"
    count = "number of bars, and gap where data is missing"
    columns = line_of([*(["symbol"] if spec.symbols else []), "date", "time", *NAMES, count], spec.form)
    return f"Older bars first, summed up; each line reaches to {next_one}: {columns}"


class SummedBar(NamedTuple):
    """One or more bars of one symbol as one: times in ns, prices in units of the session's `price_scale`.

    ``ts_open`` is the opening of the first one. ``gap``: data was lost in it or right before it. ``leg``:
    number of the symbol among the session's. ``volume`` is in 1e-9, with ``volume_high`` and ``volume_low``:
    see `ingest.volumes`.
    """

    ts_open: int
    open: int
    high: int
    low: int
    close: int
    volume: int
    bars: int = 1
    gap: bool = False
    leg: int = 0
    volume_high: int = 0
    volume_low: int = 0

    @property
    def exact_volume(self) -> int:
        """In units of 1e-18."""
        return Volume(self.volume_high, self.volume, self.volume_low).exact

    def followed_by(self, later: SummedBar) -> SummedBar:
        """Both as one."""
        volume = Volume.of(self.exact_volume + later.exact_volume)
        return SummedBar(
            self.ts_open,
            self.open,
            max(self.high, later.high),
            min(self.low, later.low),
            later.close,
            volume.nano,
            self.bars + later.bars,
            self.gap or later.gap,
            self.leg,
            volume.high,
            volume.low,
        )


class RollupTier(NamedTuple):
    """At most ``bars`` bars of one interval (ns), of each symbol."""

    interval_ns: int
    bars: int


class Rollup:
    """Sums up the bars of one session, each symbol's in order of their opening."""

    def __init__(self, tiers: Sequence[RollupTier]) -> None:
        self._tiers = tuple(tiers)
        self._legs: dict[int, list[deque[SummedBar]]] = {}

    def add(self, bar: SummedBar) -> None:
        """A bar that is newer than all others of its symbol."""
        kept = self._legs.setdefault(bar.leg, [deque() for _ in self._tiers])
        for tier, bars in zip(self._tiers, kept, strict=True):
            if bars and bars[-1].ts_open // tier.interval_ns == bar.ts_open // tier.interval_ns:
                bars[-1] = bars[-1].followed_by(bar)
                return
            bars.append(bar)
            if len(bars) <= tier.bars:
                return
            bar = bars.popleft()

    def cut(self) -> dict[int, list[list[SummedBar]]]:
        """The bars of each tier, by number of the symbol."""
        return {leg: [list(bars) for bars in kept] for leg, kept in self._legs.items()}

    def restore(self, cut: Mapping[int, Sequence[Sequence[SummedBar]]]) -> None:
        """Go on from a cut of a rollup with the same tiers."""
        self._legs = {leg: [deque(bars) for bars in kept] for leg, kept in cut.items()}

    @property
    def bars(self) -> list[SummedBar]:
        """Oldest first; those that open together in the order of their symbols."""
        found = [bar for kept in self._legs.values() for bars in kept for bar in bars]
        return sorted(found, key=lambda bar: (bar.ts_open, bar.leg))


def rollup_line(bar: SummedBar, spec: LineSpec, interval_ns: int) -> str:
    """The line of a bar that sums up bars of ``interval_ns``; its date and time are UTC."""
    head = [spec.symbols[bar.leg]] if spec.symbols else []
    date = datetime.fromtimestamp(bar.ts_open // _SECOND, UTC).date().isoformat()
    head += [date, clock_text(bar.ts_open, interval_ns)]
    prices = (bar.open, bar.high, bar.low, bar.close)
    numbers = [decimal(price, spec.price_decimals, spec.price_scale) for price in prices]
    numbers.append(decimal(bar.exact_volume, spec.volume_decimals, VOLUME_SCALE))
    return bar_row(head, numbers, [str(bar.bars), *(["gap"] if bar.gap else [])], spec.form)


def newest_within(lines: Iterable[Sequence[int]], most: int) -> list[Sequence[int]]:
    """The newest of ``lines`` (tokens, oldest first) that are at most ``most`` tokens together."""
    kept: list[Sequence[int]] = []
    for line in reversed(list(lines)):
        most -= len(line)
        if most < 0:
            break
        kept.append(line)
    return kept[::-1]
