"""A body of many records, from a client: split into records, each of them read as far as it can be.

A body is in our own wire form (one record, an array, or a record a line) or in a declared format, of a file
or of a message.
"""

import io
import sys
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date

from feeds.array_frames import elements
from feeds.codec import MalformedRecord, check_prices, decode_record, encode
from feeds.file_format import FileFormat, FormatError, load_format
from feeds.payloads.format_decoder import FormatDecoder
from feeds.payloads.schema_registry import SchemaRegistry
from feeds.recorded_file import read_text
from feeds.source import Fault, Incoming


@dataclass
class Body:
    """``payloads``: the records, encoded, and those of our own form that are not usable.

    ``errors``: of each unusable record or line, by number from 1; 0 is the body.
    ``faults``: those of them that ``payloads`` lacks, with their symbols if those are known.
    ``passed_over``: lines known to hold no record. ``moments``: symbol, VENUE:SYMBOL, and event time of each
    usable record.
    """

    payloads: list[bytes] = field(default_factory=list)
    errors: list[tuple[int, MalformedRecord]] = field(default_factory=list)
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    passed_over: int = 0
    moments: list[tuple[str, int]] = field(default_factory=list)

    @property
    def usable(self) -> int:
        """The number of usable records."""
        return len(self.moments)

    def refuse(self, line: int, error: MalformedRecord) -> None:
        """A line, or a row, of a declared format is not usable."""
        self.errors.append((line, error))
        fault = Fault(error.reason, error.message, is_line=True, ts_event=error.ts_event)
        self.faults.append((error.key, fault))


class TooMany(ValueError):
    """A body holds more records than can ever be taken at once."""


def split(
    body: bytes, encoding: str, *, lines: bool, most: int, max_bytes: int, signed: Set[str] = frozenset()
) -> Body:
    """Records in our own wire form, JSON or msgpack: one, an array, or with ``lines`` one on each line.

    ``most`` records; each of at most ``max_bytes`` bytes. ``signed``: symbols whose prices may be zero and
    below. Raises TooMany.
    """
    found = Body()
    try:
        if lines:
            numbered = [(n, line) for n, line in enumerate(body.splitlines(), 1) if line.strip()]
        else:
            numbered = list(enumerate(elements(body, encoding, len(body)), 1))
    except MalformedRecord as error:
        return Body([body], errors=[(0, error)])
    _check(len(numbered), most)
    for number, payload in numbered:
        found.payloads.append(payload)
        try:
            record = decode_record(payload, encoding, max_bytes, any_price=True)
            if record.key not in signed:
                check_prices(record)
        except MalformedRecord as error:
            found.errors.append((number, error))
        else:
            found.moments.append((record.key, record.ts_event))
    return found


@dataclass(frozen=True)
class BodyFormat:
    """A declared format of bodies, each a file of its own or a message (``of_messages``).

    ``registry``: of messages with the id of a schema in front.
    """

    form: FileFormat
    of_messages: bool = False
    registry: SchemaRegistry | None = None

    @classmethod
    def load(cls, name_or_path: str, registry: SchemaRegistry | None = None) -> "BodyFormat":
        """That of a file, or else of messages, which come first where a body is one document.

        Raises FormatError.
        """
        try:
            form = load_format(name_or_path)
        except FormatError as error:
            try:
                return cls._of_messages(name_or_path, registry)
            except FormatError:
                raise error from None
        if form.container == "json":
            with suppress(FormatError):
                return cls._of_messages(name_or_path, registry)
        return cls(form)

    @classmethod
    def _of_messages(cls, name_or_path: str, registry: SchemaRegistry | None) -> "BodyFormat":
        made = cls(load_format(name_or_path, of_messages=True), True, registry)
        made.decoder()  # what it cannot read is said now
        return made

    def decoder(self) -> FormatDecoder:
        """Reads one message: what rows of others had counts for nothing. Bodies have a limit of their own."""
        return FormatDecoder(self.form, sys.maxsize, self.registry)

    async def prepare(self, body: bytes) -> None:
        """Get the schema that a body names, and wait while the registry does not answer."""
        if self.registry is not None and self.of_messages:
            await self.decoder().prepare([_message(body, 0)])


def convert(
    body: bytes, form: BodyFormat, day: date | None, *, most: int, now_ns: int, signed: Set[str] = frozenset()
) -> Body:
    """Records in a declared format; ``day``: of times since midnight, ``now_ns``: wall clock.

    ``signed``: as in `split`, of messages. Raises TooMany, FormatError.
    """
    if not form.of_messages:
        return _convert_file(body, form.form, day, most)
    found = Body()
    records, found.passed_over = form.decoder().read(_message(body, now_ns), found.refuse)
    _check(len(records), most)
    for record in records:
        try:
            if record.key not in signed:
                check_prices(record)
        except MalformedRecord as error:
            found.refuse(
                0, MalformedRecord(error.reason, error.message, key=record.key, ts_event=record.ts_event)
            )
        else:
            found.payloads.append(encode(record))
            found.moments.append((record.key, record.ts_event))
    return found


def _message(body: bytes, now_ns: int) -> Incoming:
    return Incoming("", 0, 0, None, body, {}, now_ns)


def _convert_file(body: bytes, form: FileFormat, day: date | None, most: int) -> Body:
    found = Body()

    def pass_over(_line: int, _name: str) -> None:
        found.passed_over += 1

    for record in read_text(
        io.BytesIO(body), form, day or form.date_of(), found.refuse, pass_over, numbered=False
    ):
        found.payloads.append(encode(record))
        found.moments.append((record.key, record.ts_event))
        _check(len(found.payloads), most)
    return found


def _check(records: int, most: int) -> None:
    if records > most:
        raise TooMany(f"at most {most} records are taken at once")
