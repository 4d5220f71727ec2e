"""The lines of a file as rows: csv columns or JSON members, looked up by reference, as exact text."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any, Protocol

import msgspec

from feeds.codec import MalformedRecord
from feeds.containers import CorruptFile, unpacking
from feeds.csv_rows import CsvRows, Notice
from feeds.file_format import FileFormat, FormatError, Ref
from feeds.number_texts import JsonNumber, shown
from feeds.text_lines import Line, Refuse, Unreadable, lines
from feeds.timestamps import ParseTime, time_parser

# JSON numbers keep their text: float_hook sees the literal, so no price passes through a float.
_json = msgspec.json.Decoder(float_hook=JsonNumber)
_ABSENT = object()
_MAX_DIGITS = 1000
"""Of an integer of JSON; Python refuses to print much longer ones."""


class Row(Protocol):
    """A line. ``received``: receive time (ns; 0 if the file has none)."""

    @property
    def line(self) -> int:
        """Its number, from 1; of a row over several lines, the first."""

    @property
    def width(self) -> int:
        """Cells of a row whose columns have no names; else 0."""

    @property
    def received(self) -> int:
        """Receive time, ns; 0 if the file has none."""

    def get(self, ref: Ref) -> str | None:
        """The value at a reference as text, exactly as in the file; None if absent."""

    def is_null(self, ref: Ref) -> bool:
        """Whether JSON's null stands at a reference."""

    def elements(self, ref: str) -> Sequence["Row"]:
        """The elements of the array at a reference, each as a row. Raises MalformedRecord: no array."""


def rows(file: IO[bytes], form: FileFormat, refuse: Refuse, notice: Notice) -> Generator[Row]:
    """Every readable row of a text in its order. Unreadable lines are reported and skipped.

    Raises:
        FormatError: before the first row, where header or encoding are not as the format declares.
    """
    try:
        with unpacking(), closing(lines(file, form.encoding, form.skip_lines, refuse)) as text:
            if form.container == "csv":
                yield from CsvRows(text, form, refuse, notice)
            else:
                yield from _json_rows(text, form, refuse)
    except CorruptFile as error:
        refuse(0, MalformedRecord("type", str(error)))
    except Unreadable as error:
        raise FormatError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Document:
    """``value`` is the document itself, or an element of an array in it."""

    line: int
    received: int
    document: Any
    value: Any
    width = 0

    def get(self, ref: Ref) -> str | None:
        value = self._at(str(ref))
        if value is None or value is _ABSENT or isinstance(value, dict | list):
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            return _digits(ref, value)
        return str(value) if not isinstance(value, str) else value

    def is_null(self, ref: Ref) -> bool:
        return self._at(str(ref)) is None

    def elements(self, ref: str) -> Sequence[Row]:
        found = self._at(ref)
        if not isinstance(found, list):
            raise MalformedRecord("type", f"each: there is no array at {ref}")
        return [_Document(self.line, self.received, self.document, element) for element in found]

    def _at(self, ref: str) -> Any:
        """The value at a path; `_ABSENT` if there is none."""
        value, names = self.value, ref.split(".")
        if names[0] == "$":
            value, names = self.document, names[1:]
        for name in names:
            if isinstance(value, dict):
                value = value.get(name, _ABSENT)
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return _ABSENT
        return value


def _json_rows(found: Iterator[Line], form: FileFormat, refuse: Refuse) -> Iterator[Row]:
    receive = form.receive
    captured = form.container == "jsonl-capture"
    parse = time_parser(receive.format)
    for number, line in found:
        text = line.strip()
        if not text:
            continue
        try:
            received = 0
            if captured:
                stamp, _, text = text.partition(receive.separator)
                received = _receive_time(stamp, parse, receive.format)
            document = _json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            refuse(number, MalformedRecord("json", f"{error}: {shown(text)}"))
        except MalformedRecord as error:
            refuse(number, error)
        else:
            yield _Document(number, received, document, document)


def _digits(ref: Ref, value: int) -> JsonNumber:
    if value.bit_length() > 3 * _MAX_DIGITS:
        raise MalformedRecord("type", f"{ref}: an integer of more than {_MAX_DIGITS} digits")
    return JsonNumber(value)


def _receive_time(stamp: str, parse: ParseTime, form: str) -> int:
    try:
        return parse(stamp).ns
    except ValueError as error:
        raise MalformedRecord(
            "timestamp_unit", f"line begins with {stamp[:32]!r}, not with a receive time in {form}: {error}"
        ) from None
