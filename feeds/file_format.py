"""File formats as declared data: a short TOML says where a file keeps its times, prices and sizes.

A new format is a new TOML file, not new code. The built-in ones are in ``feeds/formats``; docs describe every
key.
"""

from pathlib import Path
from typing import Literal

import msgspec

from feeds.durations import Duration, parse_duration
from feeds.messages import Bar, Quote, Side, Trade, Unit
from feeds.timestamps import time_parser

FORMATS = Path(__file__).parent / "formats"
RECEIVE = "receive"

Ref = str | int
"""Where a value is: a column name or index (csv), a dotted member path (JSON)."""

Kind = Literal["trade", "quote", "bar"]
RECORD_TYPES: dict[Kind, type[Trade] | type[Quote] | type[Bar]] = {"trade": Trade, "quote": Quote, "bar": Bar}
FIXED_FIELDS: dict[Kind, tuple[str, ...]] = {
    "trade": ("price", "size"),
    "quote": ("bid", "ask", "bid_size", "ask_size"),
    "bar": ("open", "high", "low", "close", "volume"),
}
_OPTIONAL = frozenset(("bid_size", "ask_size"))
_TEXT_FIELDS: dict[Kind, tuple[str, ...]] = {
    "trade": ("symbol", "venue", "id", "side"),
    "quote": ("symbol", "venue"),
    "bar": ("symbol", "venue"),
}


class FormatError(ValueError):
    """An unusable format declaration; the message names the file and the key."""


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lines a record declaration covers: those whose ``field`` ends (or begins) like this."""

    field: Ref
    suffix: str = ""
    prefix: str = ""


class TimeFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location and notation of the event time; format ``receive`` uses the receive time."""

    format: str
    field: Ref = ""
    zone: str = "UTC"


class RecordFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of record in a file.

    ``stamp`` says which end of its interval a bar's time names. ``rounded`` names fields with binary noise
    from the file's writer: digits beyond the ninth are rounded (half to even). In all other fields such
    digits make a line malformed.
    """

    kind: Kind
    time: TimeFormat
    fields: dict[str, Ref]
    venue: str = ""
    symbol: str = ""
    unit: Unit = "base"
    side_values: dict[str, Side] = {}
    rounded: list[str] = []
    interval: Duration = Duration(0)
    stamp: Literal["open", "close"] = "open"
    match: Match | None = None


class FileFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole file: its container and the records in it. Gzip is detected.

    Containers: ``csv``; ``jsonl``, one JSON document per line; ``jsonl-capture``, the same after the receive
    time in ns and a blank.
    """

    description: str
    container: Literal["csv", "jsonl", "jsonl-capture"]
    records: list[RecordFormat]
    header: bool = True
    delimiter: str = ","


def load_format(name_or_path: str | Path) -> FileFormat:
    """The built-in format of that name, or the one declared in that file.

    Raises:
        FormatError: no such format, or an unusable declaration.
    """
    path = FORMATS / f"{name_or_path}.toml"
    if not path.is_file():
        path = Path(name_or_path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise FormatError(
            f"format {str(name_or_path)!r} is neither {', '.join(names())} nor a readable file"
        ) from error
    try:
        form = msgspec.toml.decode(text, type=FileFormat, dec_hook=lambda _, value: parse_duration(value))
        _check_file(form)
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"{path.name}: {error}") from error
    return form


def names() -> list[str]:
    """Names of the built-in formats."""
    return sorted(path.stem for path in FORMATS.glob("*.toml"))


def _check_file(form: FileFormat) -> None:
    if not form.records:
        raise ValueError("records: at least one is needed")
    if len(form.delimiter) != 1:
        raise ValueError("delimiter: must be one character")
    for index, record in enumerate(form.records):
        _check_record(form, record, f"records[{index}]")


def _check_record(form: FileFormat, record: RecordFormat, where: str) -> None:
    known = FIXED_FIELDS[record.kind] + _TEXT_FIELDS[record.kind]
    for name in record.fields:
        if name not in known:
            raise ValueError(
                f"{where}.fields.{name}: a {record.kind} has no such field; it has {', '.join(known)}"
            )
    for name in FIXED_FIELDS[record.kind]:
        if name not in record.fields and name not in _OPTIONAL:
            raise ValueError(f"{where}.fields.{name}: missing")
    for name in record.rounded:
        if name not in FIXED_FIELDS[record.kind]:
            raise ValueError(f"{where}.rounded: {name} is not one of {', '.join(FIXED_FIELDS[record.kind])}")
    for name in ("venue", "symbol"):
        if not getattr(record, name) and name not in record.fields:
            raise ValueError(
                f"{where}.{name}: missing, and {where}.fields.{name} does not say where to find it"
            )
    if (record.kind == "bar") != bool(record.interval):
        raise ValueError(f"{where}.interval: needed for bars, and only for them")
    _check_time(form, record.time, f"{where}.time")
    for name, ref in _refs(record).items():
        if isinstance(ref, int) and form.container != "csv":
            raise ValueError(f"{where}.{name}: a column index needs a csv file")
        if isinstance(ref, str) and form.container == "csv" and not form.header:
            raise ValueError(f"{where}.{name}: a column name needs a header line; use a column index")


def _check_time(form: FileFormat, time: TimeFormat, where: str) -> None:
    if time.format == RECEIVE:
        if form.container != "jsonl-capture":
            raise ValueError(f"{where}.format: only a jsonl-capture has receive times")
        return
    if time.field == "":
        raise ValueError(f"{where}.field: missing")
    try:
        time_parser(time.format, time.zone)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _refs(record: RecordFormat) -> dict[str, Ref]:
    refs = {f"fields.{name}": ref for name, ref in record.fields.items()}
    if record.time.format != RECEIVE:
        refs["time.field"] = record.time.field
    if record.match is not None:
        refs["match.field"] = record.match.field
    return refs
