"""File formats as declared data: a short TOML says where a file keeps its times, prices and sizes.

A new format is a new TOML file, not new code. The built-in ones are in ``feeds/formats``; docs describe every
key.
"""

import codecs
import datetime
from collections.abc import Callable, Collection, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeGuard, get_args

import msgspec

from feeds.codec import SIZES
from feeds.decimals import DIGITS, NANO, parse_fixed
from feeds.durations import Duration, parse_duration
from feeds.market_data import (
    ABOUT,
    Action,
    Bar,
    Book,
    Corporate,
    Quote,
    Recorded,
    Side,
    State,
    Status,
    Text,
    Trade,
    Unit,
)
from feeds.number_texts import POINTS, SEPARATORS
from feeds.timestamps import DAY_UNITS, EPOCH_UNITS, EXCEL, ParseTime, name_date, time_parser
from support import plugins

FORMATS = Path(__file__).parent / "formats"
OF_VENUES = FORMATS / "messages"
"""Those of messages."""
RECEIVE = "receive"
OTHER = "other"
"""Lines that match neither a record nor ``passed_over``."""

Ref = str | int
"""Where a value is: a column's name, or index in csv, a dotted path of members and array indices (JSON).

With ``each``, a path starts at the array's element, and at the whole line after ``$.``; ``@`` is the element.
"""

TEXTS = ("csv", "json", "jsonl", "jsonl-capture")
"""Containers of text; in others, values have a type."""
ENCODINGS = ("msgpack", "avro", "protobuf")
"""Containers of messages only."""
OF_MESSAGES = ("json", "jsonl", "csv", *ENCODINGS)
OF_MESSAGE = ("$key", "$topic", "$partition", "$offset", "$timestamp")
HEADER = "$headers."
"""Places in what comes with a message: its key, topic ..., and each of its headers by name."""
Kind = Literal["trade", "quote", "bar", "text", "status", "action", "book"]
RECORD_TYPES: dict[Kind, type[Recorded]] = {
    "trade": Trade, "quote": Quote, "bar": Bar, "text": Text, "status": Status, "action": Action, "book": Book
}  # fmt: skip
EVENTS: frozenset[Kind] = frozenset(("text", "status", "action", "book"))
"""Kinds of records that are in no bar."""
NUMBERS: dict[Kind, tuple[str, ...]] = {
    "trade": ("price", "size"),
    "quote": ("bid", "ask", "bid_size", "ask_size"),
    "bar": ("open", "high", "low", "close", "volume"),
    "text": (),
    "status": (),
    "action": ("factor", "amount"),
    "book": ("price", "size"),
}
"""The decimal numbers of a record; those of a book are its levels'."""
PRICES = frozenset(("price", "bid", "ask", "open", "high", "low", "close"))
OPTIONAL = frozenset(("bid_size", "ask_size", "volume"))
"""Numbers that a record may lack where there is a word for no value."""
UNFINISHED = "unfinished_candles"
"""The name of updates of a candle that a later one replaced."""
_DAY_NS = 86_400 * 10**9
_NOT_OF_FILES = frozenset(("idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "utf-7"))
_MAX_SKIPPED, _MAX_FIELD_LINES = 10_000, 1000
NEEDED: dict[Kind, tuple[str, ...]] = {
    "trade": ("price", "size"),
    "quote": ("bid", "ask"),
    "bar": ("open", "high", "low", "close"),
    "text": ("text",),
    "status": (),
    "action": (),
    "book": (),
}
"""Fields that a record needs, besides those that `_check_event` asks for."""
_MAY_HAVE: dict[Kind, tuple[str, ...]] = {
    "trade": ("id", "side"),
    "quote": ("bid_size", "ask_size"),
    "bar": ("volume",),
    "text": ("id",),
    "status": ("state", "reason"),
    "action": ("action", "factor", "amount", "new_symbol"),
    "book": ("bids", "asks"),
}
_COMMON = ("symbol", "venue", "seq")
_OF_KIND: dict[str, Kind] = {
    "state": "status", "state_values": "status", "action": "action", "action_values": "action",
    "effective": "action", "levels": "book", "side_values": "trade",
}  # fmt: skip
"""Keys that only one kind of record has."""


class FormatError(ValueError):
    """An unusable format declaration; the message names the file and the key."""


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lines that a record declaration covers: those whose ``field`` ends and begins like this.

    And has one of the ``values``, if there are any.
    """

    field: Ref
    suffix: str = ""
    prefix: str = ""
    values: list[str] = []

    def covers(self, value: str) -> bool:
        """Whether it is so."""
        if self.values and value not in self.values:
            return False
        return value.endswith(self.suffix) and value.startswith(self.prefix)


class TimeFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location and notation of the event time; format ``receive`` uses the receive time, of messages the
    broker's, or the time of their arrival.

    ``field``: one place, or several whose texts are joined by a blank, such as a date's and a time's.
    ``zones``: the names that ``%Z`` finds in the file, and which zones they mean. ``date``: for times of the
    day, how their date stands in the file's name (a strptime pattern).
    """

    format: str = ""
    field: Ref | list[Ref] = ""
    zone: str = "UTC"
    zones: dict[str, str] = {}
    date: str = ""

    @property
    def of_day(self) -> bool:
        """Whether it counts from midnight, so that the file needs a date."""
        return self.format in DAY_UNITS

    @property
    def counts(self) -> bool:
        """Whether it is a number."""
        return self.format in EPOCH_UNITS or self.format in DAY_UNITS or self.format == EXCEL

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The places of the texts that make the time."""
        return tuple(self.field) if isinstance(self.field, list) else (self.field,)

    def parser(self, day: datetime.date | None, *, whole_days: bool = False) -> ParseTime | None:
        """Its parser; ``day``: of times since midnight; ``whole_days``: a date alone is a time.

        None where it is the receive time. Raises ValueError: an unusable declaration.
        """
        if self.format == RECEIVE:
            return None
        return time_parser(self.format, self.zone, day, zones=self.zones, whole_days=whole_days)


class LevelFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a level of a book has its price and its size: paths that begin at the level."""

    price: str = "0"
    size: str = "1"


class ReceiveFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line of a ``jsonl-capture`` begins with: the receive time, and what ends it."""

    format: str = "epoch-ns"
    separator: str = " "


def _own_words(words: object) -> Callable[[], dict[str, Any]]:
    """Each word of a literal means itself."""
    return lambda: {each: each for each in get_args(words)}


class RecordFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of record in a file.

    ``stamp`` says which end of its interval a bar's time names. ``ready``: ``last`` if the file repeats a
    candle until it is finished, so that the last update before a newer opening counts. ``rounded`` names
    fields with binary noise from the file's writer: digits beyond the ninth are rounded (half to even).
    ``float_decimals``: of fields that are binary floats, also ``time``, how many decimals their numbers have.
    ``implied_decimals``: the last digits of prices that are written without a point. ``multiplier``: what a
    lot or a contract has, as decimal text; sizes and volumes are multiplied by it. ``signed``: the field
    whose sign is the side: below zero ``sell``, above it ``buy``, zero ``unknown``. ``each``: the array of
    which every element is a record (``$``: the line itself). ``signed_prices``: of a file,
    prices of zero and below are prices. ``state``, ``action``: of all records of a status or action, where no
    field tells; ``state_values``, ``action_values``: the words of that field. ``effective``: when an action
    takes effect, if it says. ``levels``: where those of a book have their numbers.
    """

    kind: Kind
    time: TimeFormat
    fields: dict[str, Ref]
    venue: str = ""
    symbol: str = ""
    unit: Unit = "base"
    side_values: dict[str, Side] = {}
    state: State | Literal[""] = ""
    state_values: dict[str, State] = msgspec.field(default_factory=_own_words(State))
    action: Corporate | Literal[""] = ""
    action_values: dict[str, Corporate] = msgspec.field(default_factory=_own_words(Corporate))
    effective: TimeFormat | None = None
    levels: LevelFormat = LevelFormat()
    rounded: list[str] = []
    float_decimals: dict[str, int] = {}
    implied_decimals: int = 0
    multiplier: str = ""
    signed: Literal["", "size"] = ""
    signed_prices: bool = False
    each: str = ""
    interval: Duration = Duration(0)
    stamp: Literal["open", "close"] = "open"
    ready: Literal["", "last"] = ""
    match: Match | None = None

    def time_parser(self, day: date | None) -> ParseTime | None:
        """The parser of its times; ``day``: of times since midnight. None where they are receive times.

        Raises:
            ValueError: an unusable declaration.
        """
        return self.time.parser(day, whole_days=self.kind == "bar" and self.interval >= _DAY_NS)

    def refs(self) -> Iterator[tuple[str, Ref]]:
        """The key and the place of everything that it reads from a row."""
        for name, ref in self.fields.items():
            yield f"fields.{name}", ref
        if self.time.format != RECEIVE:
            for ref in self.time.refs:
                yield "time.field", ref
        for ref in () if self.effective is None else self.effective.refs:
            yield "effective.field", ref
        if self.match is not None:
            yield "match.field", self.match.field


Order = Literal["auto", "oldest_first", "newest_first"]


class FileFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file, or the messages of a feed: container and records. Of files gzip, zip and zstd are detected.

    Containers: ``csv``; ``json``, an array of which each element is a row, or documents one after the other;
    ``jsonl``, one JSON document per line; ``jsonl-capture``, the same after a receive time; ``parquet``;
    ``arrow``, which is Feather, too; ``dbn``. Of messages also ``msgpack``, ``avro`` and ``protobuf``.
    ``schema`` names a file beside the format's: the schema that messages of Avro are written in, where no
    registry tells; or descriptors, as ``protoc --descriptor_set_out`` writes them, with the ``message``.
    ``passed_over``: lines known to hold no record, such as
    order-book deltas, counted by name. ``encoding``: of a file without a byte-order mark. ``skip_lines``:
    before the header. ``order``: ``auto`` looks at the first records. ``members``: which files of a folder or
    a zip archive are data, such as ``*.csv``.
    ``max_field_lines``: that a quoted field may extend over. ``ragged``: rows may have other numbers of cells
    than the header. ``decimal``, ``thousands``, ``null``: notation of numbers, and words for no value.
    """

    description: str
    container: Literal[
        "csv", "json", "jsonl", "jsonl-capture", "parquet", "arrow", "dbn", "msgpack", "avro", "protobuf"
    ]
    records: list[RecordFormat]
    header: bool = True
    delimiter: str = ","
    encoding: str = "utf-8"
    skip_lines: int = 0
    max_field_lines: int = 1
    ragged: bool = False
    members: str = ""
    order: Order = "auto"
    decimal: str = "."
    thousands: str = ""
    null: list[str] = []
    receive: ReceiveFormat = ReceiveFormat()
    passed_over: dict[str, Match] = {}
    schema: str = ""
    message: str = ""

    @property
    def signed_prices(self) -> bool:
        """Whether prices of zero and below are prices in it."""
        return any(record.signed_prices for record in self.records)

    @property
    def is_text(self) -> bool:
        """Whether it is a text, and has no values with a type."""
        return self.container in TEXTS

    def columns(self, kinds: Collection[Kind] = tuple(RECORD_TYPES)) -> set[Ref]:
        """The places that these kinds of records are read from, and those that tell of what kind a row is."""
        used: set[Ref] = {ref for record in self.records if record.kind in kinds for _, ref in record.refs()}
        used |= {record.match.field for record in self.records if record.match is not None}
        return used | {match.field for match in self.passed_over.values()}

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


def load_format(name_or_path: str | Path, *, of_messages: bool = False) -> FileFormat:
    """The built-in format of that name, a plug-in's, or the one declared in that file; of a file or
    ``of_messages``.

    Raises:
        FormatError: no such format, or an unusable declaration.
        PluginError: it is a plug-in's, which cannot be loaded.
    """
    built_in = [OF_VENUES] * of_messages + [FORMATS]
    paths = (folder / f"{name_or_path}.toml" for folder in built_in)
    path = next(filter(Path.is_file, paths), None) or _of_plugin(str(name_or_path)) or Path(name_or_path)
    try:
        text = path.read_bytes()
    except OSError as error:
        known = ", ".join(names(of_messages=of_messages))
        raise FormatError(f"format {str(name_or_path)!r} is neither {known} nor a readable file") from error
    try:
        form = msgspec.toml.decode(text, type=FileFormat, dec_hook=lambda _, value: parse_duration(value))
        _check_file(form)
        (_check_for_messages if of_messages else _check_for_files)(form)
    except RecursionError:
        raise FormatError(f"{path.name}: nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"{path.name}: {error}") from error
    if form.schema:
        form = msgspec.structs.replace(form, schema=str(path.parent / form.schema))
    return form


def names(*, of_messages: bool = False) -> list[str]:
    """Names of the built-in formats of files, or ``of_messages``, and of plug-ins' formats, of either."""
    built_in = _names(OF_VENUES if of_messages else FORMATS)
    return sorted({*built_in, *plugins.found(plugins.FORMATS, built_in)})


def _names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.toml")}


def _of_plugin(name: str) -> Path | None:
    """The file of a plug-in's format: NAME.toml in the package that the entry point NAME refers to."""
    entry = plugins.found(plugins.FORMATS, _names(FORMATS) | _names(OF_VENUES)).get(name)
    if entry is None:
        return None
    package = plugins.loaded(entry, "package", _is_package)
    return Path(package.__path__[0], f"{name}.toml")


def _is_package(found: object) -> TypeGuard[ModuleType]:
    return isinstance(found, ModuleType) and hasattr(found, "__path__")


def _check_file(form: FileFormat) -> None:
    if not form.records:
        raise ValueError("records: at least one is needed")
    _check_text(form)
    _check_numbers(form)
    _check_schema(form)
    if form.receive != ReceiveFormat() and form.container != "jsonl-capture":
        raise ValueError("receive: only a jsonl-capture has receive times")
    if form.receive.format not in EPOCH_UNITS:
        raise ValueError(f"receive.format: {form.receive.format!r} is not one of {', '.join(EPOCH_UNITS)}")
    if not form.receive.separator:
        raise ValueError("receive.separator: missing")
    for name in (OTHER, UNFINISHED):
        if name in form.passed_over:
            raise ValueError(f"passed_over.{name}: this name counts lines that no declaration covers")
    for index, record in enumerate(form.records):
        _check_record(form, record, f"records[{index}]")


def _check_for_files(form: FileFormat) -> None:
    if form.container in ENCODINGS:
        raise ValueError(f"container: {form.container} is one of messages")
    for index, record in enumerate(form.records):
        where = f"records[{index}]"
        if record.time.format == RECEIVE and form.container != "jsonl-capture":
            raise ValueError(f"{where}.time.format: only a jsonl-capture has receive times")
        if "seq" in record.fields:
            raise ValueError(f"{where}.fields.seq: lines of files are numbered as they stand")
        for name, ref in record.refs():
            if isinstance(ref, str) and (ref in OF_MESSAGE or ref.startswith(HEADER)):
                raise ValueError(f"{where}.{name}: {ref} is of messages")


def _check_for_messages(form: FileFormat) -> None:
    if form.container not in OF_MESSAGES:
        raise ValueError(f"container: of messages it is one of {', '.join(OF_MESSAGES)}")
    if form.order != "auto" or form.members or form.skip_lines:
        raise ValueError("order, members, skip_lines: messages have none")
    for index, record in enumerate(form.records):
        if record.time.of_day:
            raise ValueError(f"records[{index}].time.format: nothing says of which day messages are")
        if record.ready:
            raise ValueError(
                f"records[{index}].ready: a message cannot wait for the next one; match those of finished "
                "candles by the member that tells, such as Binance's k.x"
            )


def _check_schema(form: FileFormat) -> None:
    if (form.schema or form.message) and form.container not in ("avro", "protobuf"):
        raise ValueError(f"schema, message: {form.container} has none")
    if form.container == "avro" and form.message:
        raise ValueError("message: the schema of Avro tells it")
    if bool(form.schema) != bool(form.message) and form.container == "protobuf":
        raise ValueError("schema, message: Protobuf needs both, or neither where a registry tells them")


def _check_text(form: FileFormat) -> None:
    if len(form.delimiter) != 1 or form.delimiter in '"\r\n':
        raise ValueError("delimiter: must be one character, and neither a quotation mark nor a line end")
    try:
        codec = codecs.lookup(form.encoding)
    except (LookupError, ValueError) as error:
        raise ValueError(f"encoding: {form.encoding[:32]!r} is not known") from error
    if not getattr(codec, "_is_text_encoding", True) or codec.name in _NOT_OF_FILES:
        raise ValueError(f"encoding: {form.encoding!r} is not an encoding of files")
    for name, value, most in (
        ("skip_lines", form.skip_lines, _MAX_SKIPPED),
        ("max_field_lines", form.max_field_lines, _MAX_FIELD_LINES),
    ):
        least = int(name == "max_field_lines")
        if not least <= value <= most:
            raise ValueError(f"{name}: must be {least} to {most}")
    if form.container != "csv":
        for name, changed in (("max_field_lines", form.max_field_lines > 1), ("ragged", form.ragged)):
            if changed:
                raise ValueError(f"{name}: only a csv file has cells")


def _check_numbers(form: FileFormat) -> None:
    if form.decimal not in POINTS:
        raise ValueError(f"decimal: must be one of {' '.join(POINTS)}")
    if form.thousands and form.thousands not in SEPARATORS:
        raise ValueError(f"thousands: must be empty or one of {', '.join(map(repr, SEPARATORS))}")
    if form.thousands == form.decimal:
        raise ValueError(f"thousands: {form.thousands!r} already is the decimal point")


def _check_record(form: FileFormat, record: RecordFormat, where: str) -> None:
    _check_fields(record, where)
    if record.float_decimals and form.is_text:
        raise ValueError(f"{where}.float_decimals: a {form.container} file holds no binary floats")
    _check_meaning(record, where)
    if record.kind == "book" and "json" not in form.container and form.container not in ENCODINGS:
        raise ValueError(f"{where}.kind: a {form.container} file has no levels of books")
    if record.each and "json" not in form.container and form.container not in ENCODINGS:
        raise ValueError(f"{where}.each: a {form.container} file has no arrays")
    if "@" in record.fields.values() and not record.each:
        raise ValueError(f"{where}.fields: @ is an element of an array that each names")
    _check_time(record.time, f"{where}.time", partial(record.time_parser, date.min))
    for name, ref in record.refs():
        if isinstance(ref, int) and form.container != "csv":
            raise ValueError(f"{where}.{name}: a column index needs a csv file")
        if isinstance(ref, int) and ref < 0:
            raise ValueError(f"{where}.{name}: columns count from 0")
        if isinstance(ref, str) and form.container == "csv" and not form.header:
            raise ValueError(f"{where}.{name}: a column name needs a header line; use a column index")


def _check_fields(record: RecordFormat, where: str) -> None:
    known = (*NEEDED[record.kind], *_MAY_HAVE[record.kind], *_COMMON)
    for name in record.fields:
        if name not in known:
            raise ValueError(
                f"{where}.fields.{name}: a {record.kind} has no such field; it has {', '.join(known)}"
            )
    for name in NEEDED[record.kind]:
        if name not in record.fields:
            raise ValueError(f"{where}.fields.{name}: missing")
    numbers = NUMBERS[record.kind]
    for name in record.rounded:
        if name not in numbers:
            raise ValueError(f"{where}.rounded: {name} is not one of {', '.join(numbers)}")
    for name, decimals in record.float_decimals.items():
        declared = name in ("time", "effective") or record.kind == "book" or name in record.fields
        if not (declared and name in (*numbers, "time", "effective") and 0 <= decimals <= NANO):
            raise ValueError(f"{where}.float_decimals.{name}: must be 0 to {NANO}, of a number in fields")
    for name in ("venue", "symbol"):
        if not getattr(record, name) and name not in record.fields:
            raise ValueError(
                f"{where}.{name}: missing, and {where}.fields.{name} does not say where to find it"
            )


def _check_meaning(record: RecordFormat, where: str) -> None:
    if (record.kind == "bar") != bool(record.interval):
        raise ValueError(f"{where}.interval: needed for bars, and only for them")
    if record.ready and record.kind != "bar":
        raise ValueError(f"{where}.ready: only bars have updates")
    if not 0 <= record.implied_decimals <= DIGITS:
        raise ValueError(f"{where}.implied_decimals: must be 0 to {DIGITS}")
    _check_multiplier(record, where)
    if record.signed and record.kind != "trade":
        raise ValueError(f"{where}.signed: only trades have a side")
    if record.signed and "side" in record.fields:
        raise ValueError(f"{where}.signed: the side is already found at fields.side")
    defaults = RecordFormat(kind=record.kind, time=record.time, fields={})
    for key, kind in _OF_KIND.items():
        if record.kind != kind and getattr(record, key) != getattr(defaults, key):
            raise ValueError(f"{where}.{key}: only a {kind} has it")
    if record.kind in EVENTS:
        _check_event(record, where)


def _check_multiplier(record: RecordFormat, where: str) -> None:
    if not record.multiplier:
        return
    if not SIZES.intersection(NUMBERS[record.kind]):
        raise ValueError(f"{where}.multiplier: a {record.kind} has no sizes")
    try:
        factor = parse_fixed(record.multiplier)
    except ValueError as error:
        raise ValueError(f"{where}.multiplier: {error}") from None
    if factor <= 0:
        raise ValueError(f"{where}.multiplier: must be above 0")


def _check_event(record: RecordFormat, where: str) -> None:
    for name in ("state", "action"):
        if record.kind == _OF_KIND[name] and bool(getattr(record, name)) == (name in record.fields):
            raise ValueError(f"{where}: either {name} says it of all records, or fields.{name} of each")
    if record.action and (needed := ABOUT[record.action]) not in record.fields:
        raise ValueError(f"{where}.fields.{needed}: missing")
    if record.kind == "book" and not {"bids", "asks"} & set(record.fields):
        raise ValueError(f"{where}.fields: a book needs bids or asks")
    if (time := record.effective) is not None:
        if time.of_day or time.format == RECEIVE:
            raise ValueError(f"{where}.effective.format: {time.format} says of no day")
        _check_time(time, f"{where}.effective", partial(time.parser, None, whole_days=True))


def _check_time(time: TimeFormat, where: str, parse: Callable[[], object]) -> None:
    if time.format == RECEIVE:
        if time != TimeFormat(format=RECEIVE):
            raise ValueError(f"{where}: receive times need no other key")
        return
    if time.field in ("", []) or "" in time.refs:
        raise ValueError(f"{where}.field: missing")
    if time.date and not time.of_day:
        raise ValueError(f"{where}.date: only {', '.join(DAY_UNITS)} need one")
    if time.zone != "UTC" and time.format in EPOCH_UNITS:
        raise ValueError(f"{where}.zone: {time.format} counts in UTC")
    if time.zones and "%Z" not in time.format:
        raise ValueError(f"{where}.zones: only a pattern with %Z finds names of zones")
    try:
        parse()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
