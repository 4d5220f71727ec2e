"""A row of a file as records: parsed exactly as one record declaration says."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from feeds.codec import YEAR_1990, YEAR_2100, MalformedRecord, check_record
from feeds.decimals import Fixed
from feeds.event_rows import EventReader
from feeds.file_format import EVENTS, NUMBERS, RECORD_TYPES, FileFormat, Match, RecordFormat
from feeds.file_rows import Row
from feeds.market_data import ZERO, Recorded
from feeds.moments import order_of
from feeds.row_values import RowValues
from feeds.text_lines import Refuse
from feeds.timestamps import ParseTime
from feeds.wall_times import MINUTE_NS, Moment

_INCLUSIVE = (1, 100, 10**3, 10**6, 10**9)
"""How long before a boundary an inclusive stamp at the close is, ns: one unit of the clock that wrote it."""


class ParsedRecord(NamedTuple):
    """A record as a line says it, before the order of the file has been looked at.

    ``declared``: the number of its declaration. ``fold_ns``: how much later it was if its local time, which
    occurs twice, is the second.
    """

    line: int
    declared: int
    fold_ns: int
    record: Recorded

    @property
    def series(self) -> tuple[int, str]:
        """What its time is compared with: records of this symbol and declaration."""
        return self.declared, self.record.key


Group = list[ParsedRecord]
"""What one line holds, by event time."""


def matches(match: Match | None, row: Row) -> bool:
    """Whether a declaration covers a row."""
    if match is None:
        return True
    value = row.get(match.field)
    return value is not None and match.covers(value)


def grid_ns(interval_ns: int) -> int:
    """The grid that bars of an interval open on: its own below a minute, else whole minutes."""
    return gcd(interval_ns, MINUTE_NS)


@dataclass(slots=True)
class RowReader:
    """One record declaration, with its parsers built once. ``width``: cells of its rows without names."""

    number: int
    form: RecordFormat
    values: RowValues
    events: EventReader | None  # None: its records are in bars
    parse_time: ParseTime | None  # None: the file has only receive times
    ragged: bool
    needs: int  # cells of a row without names
    any_price: bool  # also zero and below
    width: int = 0

    @classmethod
    def compile(cls, form: FileFormat, day: date | None, *, any_price: bool = False) -> "list[RowReader]":
        """A reader for each declaration; ``day``: of times since midnight.

        ``any_price``: prices may be zero and below, whatever the format says.
        """
        found = []
        for number, each in enumerate(form.records):
            needs = 1 + max((ref for _, ref in each.refs() if isinstance(ref, int)), default=-1)
            events = EventReader.of(form, each) if each.kind in EVENTS else None
            time, any_own = each.time_parser(day), any_price or each.signed_prices
            values = RowValues.of(form, each)
            found.append(cls(number, each, values, events, time, form.ragged, needs, any_own))
        return found

    def group(self, row: Row, refuse: Refuse) -> Group:
        """The records of a row, or of the elements of its array, by event time; the unusable ones refused."""
        found: Group = []
        for part in self._parts(row, refuse):
            try:
                found.append(self._parsed(part))
            except MalformedRecord as error:
                key, moment = self._subject(part)
                refuse(row.line, MalformedRecord(error.reason, error.message, key=key, ts_event=moment))
        if len(found) < 2:
            return found
        if not any(each.fold_ns for each in found):
            return [found[at] for at in order_of([each.record.ts_event for each in found])]
        return _turned(found)

    def _parts(self, row: Row, refuse: Refuse) -> Sequence[Row]:
        if not self.form.each:
            return [row]
        try:
            return row.elements(self.form.each)
        except MalformedRecord as error:
            refuse(row.line, error)
            return []

    def _parsed(self, row: Row) -> ParsedRecord:
        self._check_width(row)
        form, received = self.form, row.received
        moment = Moment(received) if self.parse_time is None else self._time(row, self.parse_time)
        event = _opening(moment.ns, form) if form.kind == "bar" else moment.ns
        record = RECORD_TYPES[form.kind](
            venue=self.values.name(row, "venue", form.venue),
            symbol=self.values.name(row, "symbol", form.symbol),
            ts_event=event,
            ts_recv=received or event,
            clock="receive" if self.parse_time is None else "exchange",
            **self._members(row),
        )
        check_record(record, any_price=self.any_price)
        self.width = row.width
        return ParsedRecord(row.line, self.number, moment.fold_ns, record)

    def _subject(self, row: Row) -> tuple[str, int]:
        """Symbol and time of an unusable row, as far as they can be read: "" and 0 where not."""
        moment, values, form = row.received, self.values, self.form
        try:
            key = f"{values.name(row, 'venue', form.venue)}:{values.name(row, 'symbol', form.symbol)}"
        except MalformedRecord:
            return "", 0
        if self.parse_time is not None:
            try:
                moment = self._time(row, self.parse_time).ns
            except MalformedRecord:
                return key, 0
        event = _opening(moment, form) if form.kind == "bar" else moment
        return key, event if YEAR_1990 <= event < YEAR_2100 else 0

    def _check_width(self, row: Row) -> None:
        if 0 < row.width < self.needs and not self.ragged:
            raise MalformedRecord(
                "missing_field", f"{row.width} cells, and the format names the {self.needs}th"
            )
        if self.width and row.width != self.width and not self.ragged:
            raise MalformedRecord("type", f"{row.width} cells, where rows before it have {self.width}")

    def _time(self, row: Row, parse: ParseTime) -> Moment:
        return self.values.moment(row, "time", self.form.time, parse)

    def _members(self, row: Row) -> dict[str, Any]:
        """All but venue, symbol and times."""
        found = self._values(row) if self.events is None else self.events.members(row)
        if "seq" in self.form.fields:
            found["seq"] = self.values.seq(row)
        return found

    def _values(self, row: Row) -> dict[str, Any]:
        """The members of a record that is in bars."""
        form = self.form
        values: dict[str, Any] = {"unit": form.unit}
        for name in NUMBERS[form.kind]:
            if name in form.fields and (value := self.values.number(row, name)) is not None:
                values[name] = value
        if form.kind == "trade":
            values["id"] = self.values.optional(row, "id")
            values["side"] = self.values.side(row)
            if form.signed:
                size = values[form.signed]
                values["side"] = "sell" if size < 0 else "buy" if size else "unknown"
                values[form.signed] = Fixed(abs(size))
        if form.kind == "bar":
            values.setdefault("volume", ZERO)
            values["interval_ns"] = int(form.interval)
        return values


def _turned(found: Group) -> Group:
    """Records of one array whose local times occur twice: turned round if most of them go back."""
    times = [each.record.ts_event for each in found]
    back = sum(a > b for a, b in pairwise(times))
    on = sum(a < b for a, b in pairwise(times))
    return found[::-1] if back > on else found


def _opening(stamp: int, form: RecordFormat) -> int:
    """When a bar opens. A stamp one clock unit before a boundary, such as ...59.999, is that boundary's."""
    if form.stamp == "open":
        return stamp
    grid = grid_ns(form.interval)
    if stamp % grid:
        stamp = next(
            (stamp + unit for unit in _INCLUSIVE if unit < grid and not (stamp + unit) % grid), stamp
        )
    return stamp - form.interval
