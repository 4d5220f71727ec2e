"""Market data files as records: parsed exactly as the format declares, in file order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import IO, Any

from feeds.codec import YEAR_1990, YEAR_2100, MalformedRecord, check_record
from feeds.containers import Corrupt, Opened, texts
from feeds.decimals import NANO, Fixed, parse_fixed, round_fixed
from feeds.file_format import (
    FIXED_FIELDS,
    OTHER,
    PRICES,
    RECEIVE,
    RECORD_TYPES,
    FileFormat,
    Match,
    RecordFormat,
    Ref,
)
from feeds.messages import ZERO, AnyRecord
from feeds.rows import Row, rows
from feeds.timestamps import ParseTime, likely_unit, time_parser

Get = Callable[[Ref], str | None]
"""A row's value at a reference as text; None if absent."""

OnMalformed = Callable[[int, MalformedRecord], None]
"""Called for every unusable line: line number (from 1; 0: the file itself), what is wrong."""

OnPassedOver = Callable[[int, str], None]
"""Called for every line without a record: its number, and its name in ``passed_over`` or ``other``."""


def read_records(
    path: str | Path,
    form: FileFormat,
    *,
    from_ns: int | None = None,
    until_ns: int | None = None,
    day: date | None = None,
    on_malformed: OnMalformed | None = None,
    on_passed_over: OnPassedOver | None = None,
    opened: Opened | None = None,
) -> Iterator[AnyRecord]:
    """Records in file order, those with ``from_ns`` <= event time < ``until_ns``.

    ``seq`` numbers all records of the file from 1, including those left out, so it names the same record
    however much of the file is read. Without receive times in the file, ``ts_recv`` is ``ts_event``.
    Malformed lines yield nothing. ``day``: of times since midnight, instead of the date in the file's name.

    Raises:
        OSError: the file cannot be opened. FormatError: times count from midnight of an unknown day.
    """
    refuse = on_malformed or _ignore
    pass_over = on_passed_over or _ignore
    path, seq = Path(path), 0
    try:
        for name, text in texts(path, opened):
            today = day or form.date_of(path.name, name)
            for record in read_text(text, form, today, refuse, pass_over, after=seq):
                seq = record.seq
                if (from_ns is None or record.ts_event >= from_ns) and (
                    until_ns is None or record.ts_event < until_ns
                ):
                    yield record
    except Corrupt as error:
        refuse(0, MalformedRecord("type", str(error)))


def read_text(
    text: IO[bytes],
    form: FileFormat,
    day: date | None,
    refuse: OnMalformed,
    pass_over: OnPassedOver,
    *,
    after: int = 0,
    numbered: bool = True,
) -> Iterator[AnyRecord]:
    """Records of one text in its order; ``seq`` counts on from ``after``, or is 0 unless ``numbered``."""
    readers = [_Reader.compile(record, day) for record in form.records]
    seq = after
    for row in rows(text, form, refuse):
        reader = next((each for each in readers if matches(each.form.match, row)), None)
        if reader is None:
            pass_over(row.line, _name_of(form, row))
            continue
        for part in reader.parts(row, refuse):
            try:
                record = reader.record(part, seq + 1 if numbered else 0)
            except MalformedRecord as error:
                refuse(row.line, error)
                continue
            seq = record.seq
            yield record


def matches(match: Match | None, row: Row) -> bool:
    """Whether a declaration covers a row."""
    if match is None:
        return True
    value = row.get(match.field)
    return value is not None and value.endswith(match.suffix) and value.startswith(match.prefix)


def _name_of(form: FileFormat, row: Row) -> str:
    """The name under which a row without a record is counted."""
    return next((name for name, match in form.passed_over.items() if matches(match, row)), OTHER)


@dataclass(frozen=True, slots=True)
class _Reader:
    """One record declaration, with its time parser built once."""

    form: RecordFormat
    parse_time: ParseTime | None  # None: the file has only receive times

    @classmethod
    def compile(cls, form: RecordFormat, day: date | None) -> "_Reader":
        time = form.time
        return cls(form, None if time.format == RECEIVE else time_parser(time.format, time.zone, day))

    def parts(self, row: Row, refuse: OnMalformed) -> list[Row]:
        """The row, or the elements of its array."""
        if not self.form.each:
            return [row]
        try:
            return row.elements(self.form.each)
        except MalformedRecord as error:
            refuse(row.line, error)
            return []

    def record(self, row: Row, seq: int) -> AnyRecord:
        form, get, received = self.form, row.get, row.received
        event = received if self.parse_time is None else self._time(self.parse_time, get)
        values: dict[str, Any] = {
            name: _fixed(get, name, form) for name in FIXED_FIELDS[form.kind] if name in form.fields
        }
        if form.kind == "trade":
            values["id"] = get(form.fields["id"]) or "" if "id" in form.fields else ""
            values["side"] = self._side(get)
        elif form.kind == "bar":
            values.setdefault("volume", ZERO)
            values["interval_ns"] = int(form.interval)
            if form.stamp == "close":
                event -= form.interval
        record = RECORD_TYPES[form.kind](
            venue=self._name(get, "venue", form.venue),
            symbol=self._name(get, "symbol", form.symbol),
            ts_event=event,
            ts_recv=received or event,
            seq=seq,
            clock="receive" if self.parse_time is None else "exchange",
            unit=form.unit,
            **values,
        )
        check_record(record)
        return record

    def _time(self, parse: ParseTime, get: Get) -> int:
        text = _present(get, "time", self.form.time.field)
        try:
            moment = parse(text)
        except (ValueError, OverflowError) as error:
            raise MalformedRecord("timestamp_unit", f"time: {error}") from None
        if not YEAR_1990 <= moment < YEAR_2100 and (unit := likely_unit(text, YEAR_1990, YEAR_2100)):
            raise MalformedRecord(
                "timestamp_unit",
                f"time: {text} as {self.form.time.format} is not in the years 1990 to 2099; it looks like "
                f"{unit}: declare that as time.format",
            )
        return moment

    def _side(self, get: Get) -> str:
        ref = self.form.fields.get("side")
        if ref is None:
            return "unknown"
        text = _present(get, "side", ref)
        side = self.form.side_values.get(text)
        if side is None:
            raise MalformedRecord("type", f"side: {text!r} is not among side_values")
        return side

    def _name(self, get: Get, name: str, constant: str) -> str:
        ref = self.form.fields.get(name)
        return constant if ref is None else _present(get, name, ref)


def _present(get: Get, name: str, ref: Ref) -> str:
    value = get(ref)
    if value is None:
        raise MalformedRecord("missing_field", f"{name}: nothing at {ref!r}")
    return value


def _fixed(get: Get, name: str, form: RecordFormat) -> Fixed:
    text = _present(get, name, form.fields[name])
    try:
        value = round_fixed(text, NANO) if name in form.rounded else parse_fixed(text)
        if not (form.implied_decimals and name in PRICES):
            return value
        shifted, rest = divmod(value, 10**form.implied_decimals)
        if rest:
            raise ValueError(f"{text!r} with {form.implied_decimals} implied decimals is finer than 1e-18")
        return Fixed(shifted)
    except ValueError as error:
        raise MalformedRecord(
            "size" if "size" in name or name == "volume" else "price", f"{name}: {error}"
        ) from None


def _ignore(line: int, what: object) -> None:
    """Ignore malformed lines, and those passed over."""
