"""Messages in declared formats as records: the formats of files, and what comes with a message."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from feeds.codec import MalformedRecord
from feeds.columns import Columns
from feeds.columns.decode import COLUMNS
from feeds.columns.json_scanner import scan_json
from feeds.columns.msgpack_scanner import scan_msgpack
from feeds.columns.places import Integers, Places, Scanned
from feeds.decoding import Undecodable, decoded
from feeds.documents import Document
from feeds.envelopes import without_mark
from feeds.file_format import HEADER, OF_MESSAGE, FileFormat, FormatError, Ref
from feeds.file_rows import Row, decode_json, rows
from feeds.market_data import Recorded
from feeds.moments import order_of
from feeds.number_texts import shown
from feeds.payloads.payload_decoder import Decoded, PayloadDecoder, PayloadRecord, malformed
from feeds.payloads.scanned_columns import ScannedColumns
from feeds.payloads.schema_registry import SchemaRegistry, split
from feeds.payloads.tables import document_column
from feeds.row_records import ParsedRecord, RowReader, matches
from feeds.source import Incoming
from feeds.subjects import Subject
from feeds.tables.convert import PLAIN_KINDS, TableReader
from feeds.tables.table import Column, Table, words_column
from feeds.text_lines import Refuse

_WHOLE = np.dtype((np.void, COLUMNS.itemsize))
"""A row of columns as its bytes, which are copied faster than member by member."""
_MOST_SHOWN = 3
"""Unusable records of one message that its DLQ record tells of."""


class Documents(Protocol):
    """Payloads of one encoding."""

    def document(self, payload: bytes) -> Any:
        """The document in a payload. Raises MalformedRecord."""

    def scan(self, raw: bytes, ends: Integers, places: Places) -> Scanned | None:
        """What compiled code finds in ``raw``, payloads up to each of ``ends``; None: nothing.

        One of them is not empty.
        """


class JsonDocuments:
    """JSON; a registry's five bytes in front tell nothing that is needed."""

    def document(self, payload: bytes) -> Any:
        """See `Documents`."""
        text = without_mark(split(payload)[1])
        try:
            return decoded(decode_json, text)
        except Undecodable as error:
            raise MalformedRecord("json", f"{error}: {shown(text[:200].decode(errors='replace'))}") from None

    def scan(self, raw: bytes, ends: Integers, places: Places) -> Scanned:
        """See `Documents`."""
        return scan_json(raw, ends, places)


class MsgpackDocuments:
    """Msgpack."""

    def document(self, payload: bytes) -> Any:
        """See `Documents`."""
        try:
            return decoded(msgspec.msgpack.decode, payload)
        except Undecodable as error:
            raise MalformedRecord("msgpack", str(error)) from None

    def scan(self, raw: bytes, ends: Integers, places: Places) -> Scanned:
        """See `Documents`."""
        return scan_msgpack(raw, ends, places)


def documents_of(form: FileFormat, registry: SchemaRegistry | None) -> Documents | None:
    """Reads the payloads of a format; None of lines of text. Raises FormatError."""
    match form.container:
        case "json":
            return JsonDocuments()
        case "msgpack":
            return MsgpackDocuments()
        case "avro" | "protobuf":
            try:
                if form.container == "avro":
                    from feeds.payloads.avro import AvroDocuments

                    return AvroDocuments(form, registry)
                from feeds.payloads.protobuf import ProtobufDocuments

                return ProtobufDocuments(form, registry)
            except ModuleNotFoundError as error:
                extra = form.container
                what = f"container {extra} needs {error.name}: pip install 'foretick[{extra}]'"
                raise FormatError(what) from error
    return None


@dataclass(frozen=True, slots=True)
class _MessageRow:
    """A row of a message, and what came with it."""

    row: Row
    message: Incoming

    @property
    def line(self) -> int:
        return self.row.line

    @property
    def width(self) -> int:
        return self.row.width

    @property
    def received(self) -> int:
        return _received(self.message)

    def get(self, ref: Ref) -> str | None:
        if isinstance(ref, str) and _is_of_message(ref):
            return _of_message(self.message, ref)
        return self.row.get(ref)

    def is_null(self, ref: Ref) -> bool:
        return self.row.is_null(ref)

    def elements(self, ref: str, of: str = "") -> Sequence[Row]:
        return [_MessageRow(each, self.message) for each in self.row.elements(ref, of)]


def _is_of_message(ref: str) -> bool:
    return ref[:1] == "$" and (ref in OF_MESSAGE or ref.startswith(HEADER))


def _of_message(message: Incoming, ref: str) -> str | None:
    """What came with a message, as text; None where it did not."""
    if ref.startswith(HEADER):
        return _text(message.headers.get(ref.removeprefix(HEADER)))
    match ref:
        case "$key":
            return _text(message.key)
        case "$topic":
            return message.topic
        case "$timestamp":
            return str(message.ts_source_ns) if message.ts_source_ns else None
    return str(message.partition if ref == "$partition" else message.offset)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _received(message: Incoming) -> int:
    """The broker's time, which is the same whenever the message is read; else that of its arrival."""
    return message.ts_source_ns or message.ts_recv_ns


class FormatDecoder:
    """See `PayloadDecoder`. ``registry``: of payloads with the id of a schema in front.

    ``max_bytes``: of a message.
    """

    def __init__(self, form: FileFormat, max_bytes: int, registry: SchemaRegistry | None = None) -> None:
        """Raises FormatError."""
        self._form, self._max_bytes = form, max_bytes
        self._registry = registry if form.container in ("avro", "protobuf") else None
        self._documents = documents_of(form, registry)
        self._readers = RowReader.compile(form, None, any_price=True)
        self._refs = sorted(set(map(str, form.columns(PLAIN_KINDS))))
        self._places = Places.compile(ref for ref in self._refs if not _is_of_message(ref))
        self._tables = self._table_reader()
        self._positions: Mapping[str, int] = {}

    def _table_reader(self) -> TableReader | None:
        """None where records are read one by one."""
        plain = all(reader.values.plain is None for reader in self._readers)
        has_arrays = any(each.each for each in self._form.records if each.kind in PLAIN_KINDS)
        if self._documents is None or not plain or has_arrays:
            return None
        return TableReader.compile(self._form, self._readers)

    @property
    def failed(self) -> int:
        """See `PayloadDecoder`."""
        return 0 if self._registry is None else self._registry.failed

    def read_symbols(self, symbols: Sequence[str]) -> None:
        """See `PayloadDecoder`."""
        self._positions = {symbol: at for at, symbol in enumerate(symbols)}

    async def prepare(self, messages: Sequence[Incoming]) -> None:
        """See `PayloadDecoder`."""
        if self._registry is not None:
            await self._registry.load({n for each in messages if (n := split(each.payload)[0]) is not None})

    def columns(self, messages: Sequence[Incoming]) -> Columns:
        """See `PayloadDecoder`. Compiled code reads plain payloads, `Documents.document` the others."""
        columns = np.zeros(len(messages), COLUMNS)
        if self._tables is None or self._documents is None:
            return columns
        payloads = [each.payload if each.fault is None else b"" for each in messages]
        sizes = np.fromiter(map(len, payloads), np.int64, len(payloads))
        if (sizes > self._max_bytes).any():
            payloads = [each if len(each) <= self._max_bytes else b"" for each in payloads]
            sizes[sizes > self._max_bytes] = 0
        usable = sizes > 0
        if not usable.any():
            return columns
        if self._places is not None:
            scanned = self._documents.scan(b"".join(payloads), np.cumsum(sizes), self._places)
            if scanned is not None:
                read = np.flatnonzero(scanned.read & usable)
                self._take(
                    columns, messages, read, ScannedColumns(scanned, read, self._places.numbers).column
                )
                usable &= ~scanned.read
        documents, places = list[Any](), list[int]()
        for at in np.flatnonzero(usable).tolist():
            try:
                document = self._documents.document(payloads[at])
            except MalformedRecord:
                continue
            if isinstance(document, dict):
                documents.append(document)
                places.append(at)
        self._take(columns, messages, np.array(places, np.int64), partial(document_column, documents))
        return columns

    def _take(
        self,
        columns: Columns,
        messages: Sequence[Incoming],
        places: Integers,
        column: Callable[[str], Column | None],
    ) -> None:
        """Read the messages at these places, by the ``column`` of each reference, unless one is None."""
        if self._tables is None or not len(places):
            return
        plain = messages if len(places) == len(messages) else [messages[at] for at in places.tolist()]
        found = dict[str, Column]()
        for ref in self._refs:
            if _is_of_message(ref):
                made: Column | None = words_column([_of_message(each, ref) for each in plain])
            else:
                made = column(ref)
            if made is None:
                return
            found[ref] = made
        received = np.array([each.ts_source_ns or each.ts_recv_ns for each in plain], np.int64)
        read, keys = self._tables.read(Table(1, len(plain), found, received))
        read["key"] = keys.numbers(self._positions)[read["key"]] if keys.names else -1
        columns.view(_WHOLE)[places] = read.view(_WHOLE)

    def parts(self, message: Incoming) -> Decoded:
        """See `PayloadDecoder`. All unusable records of a message are one part."""
        payload, errors = message.payload, list[MalformedRecord]()
        records, passed_over = self.read(message, lambda line, error: errors.append(error))
        parts = [PayloadRecord(payload, each) for each in records]
        if errors:
            parts.append(PayloadRecord(payload, _joined(errors), self._subjects(errors, message)))
        return Decoded(parts, passed_over)

    def read(self, message: Incoming, refuse: Refuse) -> tuple[list[Recorded], int]:
        """The records of a message by time, and how many rows hold none as is known. Never raises.

        ``refuse`` gets what is unusable, with the number of its row from 1; 0 is the whole message.
        """
        payload, found, passed_over = message.payload, list[ParsedRecord](), 0
        try:
            if len(payload) > self._max_bytes:
                what = f"{len(payload)} bytes are more than the limit of {self._max_bytes}"
                raise MalformedRecord("oversize", what)
            for row in self._rows(message, refuse):
                reader = next((each for each in self._readers if matches(each.form.match, row)), None)
                if reader is None:
                    passed_over += 1
                else:
                    found += reader.group(row, refuse)
        except Exception as error:  # whatever one message provokes is its own fault
            refuse(0, malformed(error))
        records = [_settled(each, message) for each in found]
        return [records[at] for at in order_of([each.ts_event for each in records])], passed_over

    def _rows(self, message: Incoming, refuse: Refuse) -> Iterator[Row]:
        if self._documents is None:
            try:
                for each in rows(io.BytesIO(message.payload), self._form, refuse, _ignore):
                    yield _MessageRow(each, message)
            except FormatError as error:
                raise MalformedRecord("type", str(error)) from None
            return
        document = self._documents.document(message.payload)
        for line, each in enumerate(document if isinstance(document, list) else [document], 1):
            yield _MessageRow(Document(line, 0, each, each), message)

    def _subjects(self, errors: Iterable[MalformedRecord], message: Incoming) -> Sequence[Subject]:
        named = list(dict.fromkeys(Subject(each.key, each.ts_event) for each in errors if each.key))
        return named or self.subjects(message)

    @property
    def has_fields(self) -> bool:
        """Whether `value` finds something: its messages need no schema to be read."""
        return self._form.container in ("json", "msgpack")

    @property
    def has_registry(self) -> bool:
        """Whether `prepare` has something to get."""
        return self._registry is not None

    def value(self, message: Incoming, ref: str, decoded_by: dict[str, Any]) -> str | None:
        """What stands at ``ref`` in a message, as text; None where nothing does, or it is no document.

        ``decoded_by``: what the message is by container, for others to look into.
        """
        kind = self._form.container
        if kind not in decoded_by:
            decoded_by[kind] = self._whole(message.payload)
        document = decoded_by[kind]
        try:
            return None if document is None else Document(1, 0, document, document).get(ref)
        except MalformedRecord:
            return None

    def _whole(self, payload: bytes) -> Any:
        """The document in a payload; None where there is none."""
        if self._documents is None or not payload or len(payload) > self._max_bytes:
            return None
        try:
            return self._documents.document(payload)
        except MalformedRecord:
            return None

    def subjects(self, message: Incoming) -> Sequence[Subject]:
        """See `PayloadDecoder`: by its key, if that is a symbol."""
        return [Subject(_text(message.key) or "", 0)] if message.key else []


def _ignore(*_: object) -> None:
    """Of a message, nothing is worth saying beside its errors."""


def _settled(found: ParsedRecord, message: Incoming) -> Recorded:
    """The record; a local time that occurs twice is the one that is nearer to when it was received."""
    record, later = found.record, found.record.ts_event + found.fold_ns
    if found.fold_ns and abs(_received(message) - later) < abs(_received(message) - record.ts_event):
        return msgspec.structs.replace(record, ts_event=later)
    return record


def _joined(errors: Sequence[MalformedRecord]) -> MalformedRecord:
    if len(errors) == 1:
        return errors[0]
    shown_errors = "; ".join(each.message for each in errors[:_MOST_SHOWN])
    return MalformedRecord(errors[0].reason, f"{len(errors)} records are unusable: {shown_errors}")


@dataclass(frozen=True)
class Rule:
    """The messages that a decoder is for: of one of the ``topics``, with a ``header`` and a ``field`` like
    these.

    ``topics``: patterns; none for any. ``header``, ``field``: name, and pattern of its value; None for any.
    """

    decoder: FormatDecoder
    topics: Sequence[str] = ()
    header: tuple[str, str] | None = None
    field: tuple[str, str] | None = None

    def covers(self, message: Incoming, decoded_by: dict[str, Any]) -> bool:
        """Whether it is for a message. ``decoded_by``: see `FormatDecoder.value`."""
        if self.topics and not any(fnmatchcase(message.topic, each) for each in self.topics):
            return False
        if self.header is not None and not _is_like(
            _text(message.headers.get(self.header[0])), self.header[1]
        ):
            return False
        if self.field is None:
            return True
        name, pattern = self.field
        return _is_like(self.decoder.value(message, name, decoded_by), pattern)


def _is_like(value: str | None, pattern: str) -> bool:
    return value is not None and fnmatchcase(value, pattern)


class ByRule:
    """See `PayloadDecoder`: each message by the first rule that covers it, or else by ``other``."""

    def __init__(self, rules: Sequence[Rule], other: PayloadDecoder) -> None:
        self._rules, self._other = rules, other
        self._all: list[PayloadDecoder] = [*(each.decoder for each in rules), other]
        self._needs_schemas = any(isinstance(each, FormatDecoder) and each.has_registry for each in self._all)

    def _of(self, message: Incoming) -> int:
        """The number of the decoder of a message."""
        found: dict[str, Any] = {}
        return next(
            (n for n, rule in enumerate(self._rules) if rule.covers(message, found)), len(self._rules)
        )

    def _groups(self, messages: Sequence[Incoming]) -> Iterator[tuple[PayloadDecoder, list[int]]]:
        places: dict[int, list[int]] = {}
        for at, message in enumerate(messages):
            places.setdefault(self._of(message), []).append(at)
        for number, own in places.items():
            yield self._all[number], own

    @property
    def failed(self) -> int:
        """See `PayloadDecoder`; they have one registry."""
        return max(each.failed for each in self._all)

    def read_symbols(self, symbols: Sequence[str]) -> None:
        """See `PayloadDecoder`."""
        for each in self._all:
            each.read_symbols(symbols)

    async def prepare(self, messages: Sequence[Incoming]) -> None:
        """See `PayloadDecoder`."""
        for decoder, places in self._groups(messages) if self._needs_schemas else ():
            await decoder.prepare([messages[at] for at in places])

    def columns(self, messages: Sequence[Incoming]) -> Columns:
        """See `PayloadDecoder`."""
        columns = np.zeros(len(messages), COLUMNS)
        for decoder, places in self._groups(messages):
            columns[places] = decoder.columns([messages[at] for at in places])
        return columns

    def parts(self, message: Incoming) -> Decoded:
        """See `PayloadDecoder`."""
        return self._all[self._of(message)].parts(message)

    def subjects(self, message: Incoming) -> Sequence[Subject]:
        """See `PayloadDecoder`."""
        return self._all[self._of(message)].subjects(message)
