"""File formats as declared data: a short TOML says where a file keeps its times, prices and sizes.

A new format is a new TOML file, not new code. The built-in ones are in ``feeds/formats``; docs describe every
key.
"""

from datetime import date
from pathlib import Path
from typing import Literal

import msgspec

from feeds.decimals import DIGITS
from feeds.durations import Duration, parse_duration
from feeds.messages import Bar, Quote, Side, Trade, Unit
from feeds.timestamps import DAY_UNITS, EPOCH_UNITS, name_date, time_parser

FORMATS = Path(__file__).parent / "formats"
RECEIVE = "receive"
OTHER = "other"
"""Lines that match neither a record nor ``passed_over``."""

Ref = str | int
"""Where a value is: a column name or index (csv), a dotted path of members and array indices (JSON).

With ``each``, a path starts at the array's element, and at the whole line after ``$.``.
"""

Kind = Literal["trade", "quote", "bar"]
RECORD_TYPES: dict[Kind, type[Trade] | type[Quote] | type[Bar]] = {"trade": Trade, "quote": Quote, "bar": Bar}
FIXED_FIELDS: dict[Kind, tuple[str, ...]] = {
    "trade": ("price", "size"),
    "quote": ("bid", "ask", "bid_size", "ask_size"),
    "bar": ("open", "high", "low", "close", "volume"),
}
PRICES = frozenset(("price", "bid", "ask", "open", "high", "low", "close"))
_OPTIONAL = frozenset(("bid_size", "ask_size", "volume"))
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
    """Location and notation of the event time; format ``receive`` uses the receive time.

    ``date``: for times of the day, how their date stands in the file's name (a strptime pattern).
    """

    format: str = ""
    field: Ref = ""
    zone: str = "UTC"
    date: str = ""

    @property
    def of_day(self) -> bool:
        """Whether it counts from midnight, so that the file needs a date."""
        return self.format in DAY_UNITS


class ReceiveFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line of a ``jsonl-capture`` begins with: the receive time, and what ends it."""

    format: str = "epoch-ns"
    separator: str = " "


class RecordFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of record in a file.

    ``stamp`` says which end of its interval a bar's time names. ``rounded`` names fields with binary noise
    from the file's writer: digits beyond the ninth are rounded (half to even). In all other fields such
    digits make a line malformed. ``implied_decimals``: the last digits of prices that are written without a
    point. ``each``: the array of which every element is a record (``$``: the line itself).
    """

    kind: Kind
    time: TimeFormat
    fields: dict[str, Ref]
    venue: str = ""
    symbol: str = ""
    unit: Unit = "base"
    side_values: dict[str, Side] = {}
    rounded: list[str] = []
    implied_decimals: int = 0
    each: str = ""
    interval: Duration = Duration(0)
    stamp: Literal["open", "close"] = "open"
    match: Match | None = None


class FileFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole file: its container and the records in it. Gzip, zip and zstd are detected.

    Containers: ``csv``; ``jsonl``, one JSON document per line; ``jsonl-capture``, the same after a receive
    time. ``passed_over``: lines known to hold no record, such as order-book deltas, counted by name.
    """

    description: str
    container: Literal["csv", "jsonl", "jsonl-capture"]
    records: list[RecordFormat]
    header: bool = True
    delimiter: str = ","
    receive: ReceiveFormat = ReceiveFormat()
    passed_over: dict[str, Match] = {}

    def date_of(self, *file_names: str) -> date | None:
        """The date in the first of these names that has one; None if no time counts from midnight.

        Raises:
            FormatError: a date is needed, and not found.
        """
        timed = next((record.time for record in self.records if record.time.of_day), None)
        if timed is None:
            return None
        try:
            if not timed.date:
                raise ValueError("nothing says on which day")
            return name_date(timed.date, *file_names)
        except ValueError as error:
            raise FormatError(
                f"times are {timed.format}, which count from midnight, but {error}: give the date, or "
                "declare in time.date how it stands in the file's name"
            ) from error


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
    if form.receive != ReceiveFormat() and form.container != "jsonl-capture":
        raise ValueError("receive: only a jsonl-capture has receive times")
    if form.receive.format not in EPOCH_UNITS:
        raise ValueError(f"receive.format: {form.receive.format!r} is not one of {', '.join(EPOCH_UNITS)}")
    if not form.receive.separator:
        raise ValueError("receive.separator: missing")
    if OTHER in form.passed_over:
        raise ValueError(f"passed_over.{OTHER}: is the name of all lines without a declaration")
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
    if not 0 <= record.implied_decimals <= DIGITS:
        raise ValueError(f"{where}.implied_decimals: must be 0 to {DIGITS}")
    if record.each and form.container == "csv":
        raise ValueError(f"{where}.each: a csv file has no arrays")
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
    if time.date and not time.of_day:
        raise ValueError(f"{where}.date: only {', '.join(DAY_UNITS)} need one")
    try:
        time_parser(time.format, time.zone, date.min)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _refs(record: RecordFormat) -> dict[str, Ref]:
    refs = {f"fields.{name}": ref for name, ref in record.fields.items()}
    if record.time.format != RECEIVE:
        refs["time.field"] = record.time.field
    if record.match is not None:
        refs["match.field"] = record.match.field
    return refs
