"""Local times that occur twice, when clocks are put back: the order of the file says which is meant."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from feeds.codec import MalformedRecord
from feeds.file_format import RecordFormat
from feeds.row_records import ParsedRecord
from feeds.text_lines import Refuse
from feeds.timestamps import Instant
from feeds.wall_times import MINUTE_NS

MAX_HELD = 1_000_000
"""Records that are held until it is seen which hour they are of."""
DISORDER_NS = MINUTE_NS
"""Times that go back by less are out of order, and say nothing about the hour."""


@dataclass(slots=True, eq=False)
class _Held:
    """A record that waits, or one behind it. ``parsed`` is None once it was refused."""

    parsed: ParsedRecord | None
    ambiguous: bool = False

    def settle(self, parsed: ParsedRecord | None) -> None:
        """It is this record, or None: refused."""
        self.parsed, self.ambiguous = parsed, False


@dataclass(slots=True)
class _Hour:
    """The repeated hour of one series: its newest time, as of the first occurrence, and what is ambiguous."""

    newest: int
    fold_ns: int
    second: bool = False
    ambiguous: list[_Held] = field(default_factory=list)

    @property
    def over(self) -> int:
        """A time from which on no record can be of the hour, even one that is late."""
        return self.newest + 2 * self.fold_ns + DISORDER_NS

    def begin_second(self, time: int) -> None:
        """The second occurrence begins: what was ambiguous is of the first one."""
        self.second, self.newest = True, time
        for held in self.take_ambiguous():
            held.settle(held.parsed)

    def reach(self, time: int) -> None:
        """Note the time of a record of the hour."""
        self.newest = max(self.newest, time)

    def take_ambiguous(self) -> list[_Held]:
        """Take all that is ambiguous; nothing is any more."""
        found, self.ambiguous = self.ambiguous, []
        return found


class RepeatedHours:
    """Settles which occurrence of a local time is meant, for each symbol, from times that go back.

    Records of the hour, and all behind them, wait until one of the symbol goes back by a minute or more:
    those before it are of the first occurrence, it and those behind it of the second. Where the file has the
    hour only once, its records are refused.
    """

    def __init__(self, forms: Sequence[RecordFormat], refuse: Refuse) -> None:
        self._forms, self._refuse = forms, refuse
        self._hours: dict[tuple[int, str], _Hour] = {}
        self._over = 0  # no hour is over for other symbols before this time
        self._held: deque[_Held] = deque()

    def settle(self, records: Iterator[ParsedRecord]) -> Iterator[ParsedRecord]:
        """Records in their order, each with the instant that is meant."""
        for parsed in records:
            if not parsed.fold_ns and not self._hours:
                yield parsed
                continue
            self._take(parsed)
            yield from self._released()
        for hour in self._hours.values():
            self._give_up(hour)
        yield from self._released()

    def _take(self, parsed: ParsedRecord) -> None:
        held = _Held(parsed, ambiguous=parsed.fold_ns > 0)
        self._held.append(held)
        if parsed.fold_ns:
            self._place(held, parsed)
        self._pass(parsed)
        if len(self._held) > MAX_HELD:
            for hour in self._hours.values():
                self._give_up(hour)

    def _place(self, held: _Held, parsed: ParsedRecord) -> None:
        """Put a record whose time occurs twice into its hour."""
        time = parsed.record.ts_event
        hour = self._hours.get(parsed.series)
        if hour is None or abs(time - hour.newest) >= parsed.fold_ns:
            if hour is not None:
                self._give_up(hour)
            hour = self._hours[parsed.series] = _Hour(time, parsed.fold_ns)
            self._over = min(self._over, hour.over) if len(self._hours) > 1 else hour.over
        back = self._goes_back(hour, parsed, first=not (hour.ambiguous or hour.second))
        if back and hour.second:
            held.settle(None)
            self._refuse_one(parsed, "it is in the file more than twice")
            return
        if back:
            hour.begin_second(time)
        hour.reach(time)
        if hour.second:
            held.settle(_later(parsed))
        else:
            hour.ambiguous.append(held)

    def _goes_back(self, hour: _Hour, parsed: ParsedRecord, *, first: bool) -> bool:
        back = hour.newest - parsed.record.ts_event
        if back >= DISORDER_NS:
            return True
        form = self._forms[parsed.declared]
        # bars as long as the hour have one opening in it, twice
        return not (back or first) and not form.ready and form.interval >= parsed.fold_ns

    def _pass(self, parsed: ParsedRecord) -> None:
        """Note that a time was reached: what is ambiguous about an hour that is over stays so."""
        time = parsed.record.ts_event
        own = self._hours.get(parsed.series)
        if own is not None and not parsed.fold_ns and time > own.newest:
            self._give_up(own)
        if time <= self._over:
            return
        for series, hour in list(self._hours.items()):
            if time > hour.over:
                self._give_up(hour)
                del self._hours[series]
        self._over = min((hour.over for hour in self._hours.values()), default=0)

    def _give_up(self, hour: _Hour) -> None:
        for held in hour.take_ambiguous():
            if held.parsed is not None:
                self._refuse_one(held.parsed, "the order of the file does not say which is meant")
            held.settle(None)

    def _refuse_one(self, parsed: ParsedRecord, why: str) -> None:
        first = parsed.record.ts_event
        times = f"{Instant(first)} and {Instant(first + parsed.fold_ns)}"
        self._refuse(
            parsed.line,
            MalformedRecord(
                "timestamp_unit",
                f"time: a local time that occurs twice, at {times}: {why}",
                key=parsed.record.key,
                ts_event=first,
            ),
        )

    def _released(self) -> Iterator[ParsedRecord]:
        """What nothing ambiguous stands before."""
        while self._held and not self._held[0].ambiguous:
            parsed = self._held.popleft().parsed
            if parsed is not None:
                yield parsed


def _later(parsed: ParsedRecord) -> ParsedRecord:
    """The same at the second occurrence."""
    record = parsed.record
    event = record.ts_event + parsed.fold_ns
    received = event if record.ts_recv == record.ts_event else record.ts_recv
    later = msgspec.structs.replace(record, ts_event=event, ts_recv=received)
    return parsed._replace(record=later, fold_ns=0)
