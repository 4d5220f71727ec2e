"""Market data files as records: parsed exactly as the format declares, in file order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feeds.codec import MalformedRecord, check_record
from feeds.decimal9 import Fixed9, parse_fixed9, round_fixed9
from feeds.file_format import FIXED_FIELDS, RECEIVE, RECORD_TYPES, FileFormat, RecordFormat, Ref
from feeds.messages import AnyRecord
from feeds.rows import Get, rows
from feeds.timestamps import ParseTime, time_parser

OnMalformed = Callable[[int, MalformedRecord], None]
"""Called for every unusable line: line number (from 1; 0: the file itself), what is wrong."""


def read_records(
    path: str | Path,
    form: FileFormat,
    *,
    from_ns: int | None = None,
    until_ns: int | None = None,
    on_malformed: OnMalformed | None = None,
) -> Iterator[AnyRecord]:
    """Records in file order, those with ``from_ns`` <= event time < ``until_ns``.

    ``seq`` numbers all records of the file from 1, including those left out, so it names the same record
    however much of the file is read. Without receive times in the file, ``ts_recv`` is ``ts_event``.
    Malformed lines yield nothing.

    Raises:
        OSError: the file cannot be opened.
    """
    refuse = on_malformed or _ignore
    readers = [_Reader.compile(record) for record in form.records]
    seq = 0
    for line, received, get in rows(Path(path), form, refuse):
        reader = next((each for each in readers if each.matches(get)), None)
        if reader is None:
            continue
        try:
            record = reader.record(get, received, seq + 1)
        except MalformedRecord as error:
            refuse(line, error)
            continue
        seq += 1
        inside = (from_ns is None or record.ts_event >= from_ns) and (
            until_ns is None or record.ts_event < until_ns
        )
        if inside:
            yield record


@dataclass(frozen=True, slots=True)
class _Reader:
    """One record declaration, with its time parser built once."""

    form: RecordFormat
    parse_time: ParseTime | None  # None: the file has only receive times

    @classmethod
    def compile(cls, form: RecordFormat) -> "_Reader":
        time = form.time
        return cls(form, None if time.format == RECEIVE else time_parser(time.format, time.zone))

    def matches(self, get: Get) -> bool:
        match = self.form.match
        if match is None:
            return True
        value = get(match.field)
        return value is not None and value.endswith(match.suffix) and value.startswith(match.prefix)

    def record(self, get: Get, received: int, seq: int) -> AnyRecord:
        form = self.form
        event = received if self.parse_time is None else self._time(self.parse_time, get)
        values: dict[str, Any] = {
            name: _fixed(get, name, form.fields[name], name in form.rounded)
            for name in FIXED_FIELDS[form.kind]
            if name in form.fields
        }
        if form.kind == "trade":
            values["id"] = get(form.fields["id"]) or "" if "id" in form.fields else ""
            values["side"] = self._side(get)
        elif form.kind == "bar":
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
            return parse(text)
        except (ValueError, OverflowError) as error:
            raise MalformedRecord("timestamp_unit", f"time: {error}") from None

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


def _fixed(get: Get, name: str, ref: Ref, rounded: bool) -> Fixed9:
    text = _present(get, name, ref)
    try:
        return round_fixed9(text) if rounded else parse_fixed9(text)
    except ValueError as error:
        raise MalformedRecord(
            "size" if "size" in name or name == "volume" else "price", f"{name}: {error}"
        ) from None


def _ignore(line: int, error: MalformedRecord) -> None:
    """Ignore malformed lines."""
