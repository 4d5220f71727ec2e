"""A row of a file as records: parsed exactly as one record declaration says."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from feeds.codec import YEAR_1990, YEAR_2100, MalformedRecord, check_record
from feeds.decimals import NANO, BinaryFloat, Fixed, fixed_of_float, parse_fixed, round_fixed
from feeds.file_format import (
    FIXED_FIELDS,
    OPTIONAL,
    PRICES,
    RECORD_TYPES,
    FileFormat,
    Match,
    RecordFormat,
    Ref,
)
from feeds.file_rows import Row
from feeds.market_data import ZERO, AnyRecord
from feeds.moments import order_of
from feeds.number_texts import Plain, plain_numbers, shifted, shown
from feeds.text_lines import Refuse
from feeds.timestamps import ParseTime, likely_unit
from feeds.wall_times import MINUTE_NS, Moment

_INCLUSIVE = (1, 100, 10**3, 10**6, 10**9)
"""How long before a boundary an inclusive stamp at the close is, ns: one unit of the clock that wrote it."""

_SEQ_DIGITS = 20


class ParsedRecord(NamedTuple):
    """A record as a line says it, before the order of the file has been looked at.

    ``declared``: the number of its declaration. ``fold_ns``: how much later it was if its local time, which
    occurs twice, is the second.
    """

    line: int
    declared: int
    fold_ns: int
    record: AnyRecord

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
    parse_time: ParseTime | None  # None: the file has only receive times
    time_refs: tuple[Ref, ...]
    plain: Plain | None  # None: numbers are decimal text as they stand
    null: frozenset[str]
    ragged: bool
    needs: int  # cells of a row without names
    any_price: bool  # also zero and below
    width: int = 0

    @classmethod
    def compile(cls, form: FileFormat, day: date | None, *, any_price: bool = False) -> "list[RowReader]":
        """A reader for each declaration; ``day``: of times since midnight.

        ``any_price``: prices may be zero and below, whatever the format says.
        """
        plain, null = plain_numbers(form.decimal, form.thousands), frozenset(form.null)
        found = []
        for number, each in enumerate(form.records):
            needs = 1 + max((ref for _, ref in each.refs() if isinstance(ref, int)), default=-1)
            time = each.time_parser(day)
            any_own = any_price or each.signed_prices
            found.append(cls(number, each, time, each.time.refs, plain, null, form.ragged, needs, any_own))
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
        moment = Moment(received) if self.parse_time is None else self._time(self.parse_time, row)
        event = _opening(moment.ns, form) if form.kind == "bar" else moment.ns
        record = RECORD_TYPES[form.kind](
            venue=self._name(row, "venue", form.venue),
            symbol=self._name(row, "symbol", form.symbol),
            ts_event=event,
            ts_recv=received or event,
            clock="receive" if self.parse_time is None else "exchange",
            unit=form.unit,
            **self._values(row),
        )
        check_record(record, any_price=self.any_price)
        self.width = row.width
        return ParsedRecord(row.line, self.number, moment.fold_ns, record)

    def _subject(self, row: Row) -> tuple[str, int]:
        """Symbol and time of an unusable row, as far as they can be read: "" and 0 where not."""
        moment = row.received
        try:
            key = f"{self._name(row, 'venue', self.form.venue)}:{self._name(row, 'symbol', self.form.symbol)}"
        except MalformedRecord:
            return "", 0
        if self.parse_time is not None:
            try:
                moment = self._time(self.parse_time, row).ns
            except MalformedRecord:
                return key, 0
        event = _opening(moment, self.form) if self.form.kind == "bar" else moment
        return key, event if YEAR_1990 <= event < YEAR_2100 else 0

    def _check_width(self, row: Row) -> None:
        if 0 < row.width < self.needs and not self.ragged:
            raise MalformedRecord(
                "missing_field", f"{row.width} cells, and the format names the {self.needs}th"
            )
        if self.width and row.width != self.width and not self.ragged:
            raise MalformedRecord("type", f"{row.width} cells, where rows before it have {self.width}")

    def _values(self, row: Row) -> dict[str, Any]:
        form = self.form
        values: dict[str, Any] = {}
        for name in FIXED_FIELDS[form.kind]:
            if name in form.fields and (value := self._fixed(row, name)) is not None:
                values[name] = value
        if form.kind == "trade":
            values["id"] = self._id(row)
            values["side"] = self._side(row)
            if form.signed:
                size = values[form.signed]
                values["side"] = "sell" if size < 0 else "buy" if size else "unknown"
                values[form.signed] = Fixed(abs(size))
        if "seq" in form.fields:
            values["seq"] = self._seq(row)
        if form.kind == "bar":
            values.setdefault("volume", ZERO)
            values["interval_ns"] = int(form.interval)
        return values

    def _time(self, parse: ParseTime, row: Row) -> Moment:
        texts = [self._present(row, "time", ref) for ref in self.time_refs]
        text = " ".join(texts)
        try:
            if isinstance(texts[0], BinaryFloat):
                text = str(self._of_float("time", texts[0]))
                texts = [text]
            plain = self.plain if self.form.time.counts else None
            moment = parse(text if plain is None else " ".join(map(plain, texts)))
        except (ValueError, OverflowError) as error:
            raise MalformedRecord("timestamp_unit", f"time: {error}") from None
        if not YEAR_1990 <= moment.ns < YEAR_2100 and (unit := likely_unit(text, YEAR_1990, YEAR_2100)):
            raise MalformedRecord(
                "timestamp_unit",
                f"time: {text[:100]} as {self.form.time.format} is not in the years 1990 to 2099; it looks "
                f"like {unit}: declare that as time.format",
            )
        return moment

    def _fixed(self, row: Row, name: str) -> Fixed | None:
        """The number of a field; None where an optional one has none."""
        ref = self.form.fields[name]
        if self.null and name in OPTIONAL and self._says_none(row, ref):
            return None
        text = self._present(row, name, ref)
        try:
            return self.read_number(name, text)
        except ValueError as error:
            raise MalformedRecord(
                "size" if "size" in name or name == "volume" else "price", f"{name}: {error}"
            ) from None

    def read_number(self, name: str, text: str) -> Fixed:
        """The number of a field from its text. Raises ValueError."""
        form = self.form
        if isinstance(text, BinaryFloat):
            return self._of_float(name, text)
        if self.plain is not None:
            text = self.plain(text)
        if form.implied_decimals and name in PRICES:
            text = shifted(text, form.implied_decimals)
        return round_fixed(text, NANO) if name in form.rounded else parse_fixed(text)

    def _of_float(self, name: str, text: BinaryFloat) -> Fixed:
        decimals = self.form.float_decimals.get(name)
        if decimals is None:
            raise ValueError(f"{text} is a binary float: declare float_decimals.{name}")
        return fixed_of_float(text, decimals, rounded=name in self.form.rounded)

    def _side(self, row: Row) -> str:
        ref = self.form.fields.get("side")
        if ref is None or (self.null and self._says_none(row, ref)):
            return "unknown"
        text = self._present(row, "side", ref)
        side = self.form.side_values.get(text)
        if side is None:
            raise MalformedRecord("type", f"side: {shown(text)} is not among side_values")
        return side

    def _name(self, row: Row, name: str, constant: str) -> str:
        ref = self.form.fields.get(name)
        return constant if ref is None else str(self._present(row, name, ref))

    def _id(self, row: Row) -> str:
        ref = self.form.fields.get("id")
        value = None if ref is None else row.get(ref)
        return "" if value is None or value in self.null else str(value)

    def _seq(self, row: Row) -> int:
        text = self._present(row, "seq", self.form.fields["seq"])
        if not (text.isascii() and text.isdecimal() and len(text) <= _SEQ_DIGITS):
            raise MalformedRecord("type", f"seq: {shown(text)} is not a number of 64 bits")
        return int(text)

    def _says_none(self, row: Row, ref: Ref) -> bool:
        """Whether a word for no value stands there, or JSON's null; not if nothing does."""
        value = row.get(ref)
        return row.is_null(ref) if value is None else value in self.null

    def _present(self, row: Row, name: str, ref: Ref) -> str:
        value = row.get(ref)
        if value is None or value in self.null:
            raise MalformedRecord("missing_field", f"{name}: nothing at {ref!r}")
        return value


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
