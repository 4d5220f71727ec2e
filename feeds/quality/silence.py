"""Symbols that are dead while their source is connected, by what is usual for them at that time of day.

Of each symbol the gaps between event times are counted in 24 histograms, one an hour of UTC, in steps of a
quarter of an octave; old gaps count less and less. A symbol is silent when nothing came for ``factor`` times
the P99 of its gaps in this hour, or of all hours while this one has few.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from feeds.quality.calendar import Calendar
from support.numba_kernel import kernel

HOURS, BUCKETS = 24, 152
"""The last bucket is of gaps of three days and more."""
LEAST = 200
"""Gaps before anything is said of a symbol, or of an hour."""
_MOST = 1 << 14
"""Gaps of an hour that are counted; then each count is halved."""
_HOUR_NS, _US = 3600 * 10**9, 1000.0
_LAST_KIND = 3
"""Records of higher kinds, see `ingest.record`, are signs of life and no data."""
_REFRESH_NS = 10**9
Counts = npt.NDArray[np.uint32]
"""Gaps of one symbol by hour and bucket."""


@kernel
def bucket_of(gap_ns: int) -> int:
    """The bucket of a gap: at most 2^(bucket / 4) us."""
    if gap_ns <= _US:
        return 0
    found: int = min(BUCKETS - 1, int(np.ceil(4.0 * np.log2(gap_ns / _US))))
    return found


@kernel
def learn(records: Any, counts: Any, totals: Any, newest: Any, seen: Any, without: int, now: int) -> None:
    """Count the gaps of records, by their members symbol, kind, flags and ts_event.

    ``counts``: uint32 [symbols, HOURS, BUCKETS], and ``totals`` their sums; ``newest``: event times, int64
    [symbols]; ``seen``: when something came, int64 [symbols]. Records with a flag of ``without`` teach
    nothing.
    """
    for i in range(records.shape[0]):
        record = records[i]
        symbol = record["symbol"]
        if symbol >= seen.shape[0] or record["flags"] & without:
            continue
        seen[symbol] = now
        event = np.int64(record["ts_event"])
        if record["kind"] > _LAST_KIND or event < newest[symbol]:
            continue
        if newest[symbol] > 0:
            hour = event // _HOUR_NS % HOURS
            own = counts[symbol, hour]
            own[bucket_of(event - newest[symbol])] += np.uint32(1)
            totals[symbol, hour] += np.uint32(1)
            if totals[symbol, hour] > _MOST:
                for bucket in range(BUCKETS):
                    own[bucket] >>= np.uint32(1)
                totals[symbol, hour] = own.sum()
        newest[symbol] = event


class SilenceMonitor:
    """Learns what is usual for the symbols of one source, and says which are silent.

    ``calendars``: by venue; one without is always open. Clocks are passed in: ``now`` is monotonic, ``wall``
    is not, both in ns.
    """

    def __init__(
        self,
        factor: float = 3.0,
        floor_ns: int = 10**9,
        calendars: Mapping[str, Calendar] | None = None,
        *,
        without: int = 0,
    ) -> None:
        self._factor, self._floor_ns, self._without = factor, floor_ns, without
        self._calendars = calendars or {}
        self._numbers: dict[str, int] = {}
        self._restored: dict[str, Callable[[], Counts]] = {}
        """What was learnt before, of symbols that have not been read since."""
        self._counts = np.zeros((0, HOURS, BUCKETS), np.uint32)
        self._totals = np.zeros((0, HOURS), np.uint32)
        self._newest, self._seen = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._limits: dict[int, tuple[int, int]] = {}
        """By symbol: until when it counts (monotonic), and the limit, ns; 0: not known."""
        self._silent: dict[str, int] = {}
        """Silent symbols, and when something of them came last (monotonic)."""

    def read(self, numbers: Mapping[str, int]) -> None:
        """Watch these symbols, VENUE:SYMBOL, by their numbers in records."""
        more = max(numbers.values(), default=-1) + 1 - len(self._seen)
        if more > 0:
            self._counts = np.concatenate([self._counts, np.zeros((more, HOURS, BUCKETS), np.uint32)])
            self._totals = np.concatenate([self._totals, np.zeros((more, HOURS), np.uint32)])
            self._newest, self._seen = (
                np.concatenate([each, np.zeros(more, np.int64)]) for each in (self._newest, self._seen)
            )
        for symbol in numbers.keys() & self._restored.keys():
            number = numbers[symbol]
            self._counts[number] += self._restored.pop(symbol)()
            self._totals[number] = self._counts[number].sum(axis=1)
        self._numbers = dict(numbers)  # last: another thread may look its counts up

    def restore(self, learnt: Mapping[str, Callable[[], Counts]]) -> None:
        """Go on from what `learnt` returned, before the first `read`; each is called when it is needed."""
        self._restored |= learnt

    def learnt(self) -> dict[str, Counts]:
        """The gaps of each symbol of which something is known. Any thread."""
        numbers = self._numbers  # before the counts, see `read`
        counts = self._counts
        return {symbol: counts[number] for symbol, number in numbers.items() if counts[number].sum() >= LEAST}

    def learn(self, records: npt.NDArray[np.void], now: int) -> None:
        """Records have come."""
        learn(records, self._counts, self._totals, self._newest, self._seen, self._without, now)

    def p99_ns(self, symbol: str, wall: int) -> int:
        """The P99 of a symbol's gaps at this time of day, at most a fifth too long; 0 while unknown."""
        counts = self._counts[self._numbers[symbol]]
        own = counts[wall // _HOUR_NS % HOURS]
        if own.sum() < LEAST:
            own = counts.sum(axis=0)
        total = int(own.sum())
        if total < LEAST:
            return 0
        bucket = int(np.searchsorted(np.cumsum(own), 0.99 * total))
        return int(2 ** (bucket / 4) * _US)

    def silence_ns(self, symbol: str, now: int, wall: int) -> int:
        """For how long nothing came of a symbol while its venue was open; 0 before anything did."""
        number = self._numbers.get(symbol)
        if number is None or self._seen[number] == 0:
            return 0
        quiet = now - int(self._seen[number])
        calendar = self._calendars.get(symbol.partition(":")[0])
        if calendar is None:
            return quiet
        opened = calendar.opened(wall)
        return 0 if opened is None else min(quiet, wall - opened)

    def is_silent(self, symbol: str, now: int, wall: int) -> bool:
        """Whether nothing came of a symbol for too long."""
        quiet = self.silence_ns(symbol, now, wall)
        if quiet <= self._floor_ns:
            return False
        number = self._numbers[symbol]
        until, limit = self._limits.get(number, (0, 0))
        if now >= until:
            limit = int(self._factor * self.p99_ns(symbol, wall))
            self._limits[number] = now + _REFRESH_NS, limit
        return 0 < limit < quiet

    @property
    def silent(self) -> int:
        """How many symbols are silent, as of the last call of `newly_silent`."""
        return len(self._silent)

    def has_seen(self, symbol: str) -> bool:
        """Whether anything of a symbol came from this source."""
        number = self._numbers.get(symbol)
        return number is not None and bool(self._seen[number])

    def newly_silent(self, now: int, wall: int, is_read: Callable[[str], bool]) -> list[str]:
        """The symbols that have become silent since the last call.

        One that is not read now, such as of another daemon's partition, is not: its quiet time begins again.
        """
        for symbol, number in self._numbers.items():
            if self._seen[number] and not is_read(symbol):
                self._seen[number] = now
        silent = {
            symbol: int(self._seen[number])
            for symbol, number in self._numbers.items()
            if self.is_silent(symbol, now, wall)
        }
        found, self._silent = silent.items() - self._silent.items(), silent
        return sorted(symbol for symbol, _ in found)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    layout = [("symbol", "u4"), ("ts_event", "u8"), ("kind", "u1"), ("flags", "u1")]
    monitor = SilenceMonitor()
    monitor.read({"V:S": 0})
    monitor.learn(np.zeros(1, layout), 1)
