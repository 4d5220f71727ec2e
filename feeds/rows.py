"""The lines of a file as rows: csv columns or JSON members, looked up by reference, as exact text."""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol, TextIO

import msgspec

from feeds.codec import MalformedRecord
from feeds.containers import Corrupt, unpacking
from feeds.file_format import FileFormat, Ref
from feeds.timestamps import ParseTime, time_parser

Refuse = Callable[[int, MalformedRecord], None]
"""Called for every line that is not a row: its number and what is wrong."""

# JSON numbers keep their text: float_hook sees the literal, so no price passes through a float.
_json = msgspec.json.Decoder(float_hook=str)


class Row(Protocol):
    """A line. ``received``: receive time (ns; 0 if the file has none)."""

    @property
    def line(self) -> int:
        """Its number, from 1."""

    @property
    def received(self) -> int:
        """Receive time, ns; 0 if the file has none."""

    def get(self, ref: Ref) -> str | None:
        """The value at a reference as text, exactly as in the file; None if absent."""

    def elements(self, ref: str) -> list["Row"]:
        """The elements of the array at a reference, each as a row. Raises MalformedRecord: no array."""


def rows(file: IO[bytes], form: FileFormat, refuse: Refuse) -> Iterator[Row]:
    """Every readable row of a text in its order. Unreadable lines are reported and skipped."""
    # Replace undecodable bytes: one bad line must not end the file.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
    try:
        with unpacking():
            yield from (
                _csv_rows(text, form, refuse) if form.container == "csv" else _json_rows(text, form, refuse)
            )
    except Corrupt as error:
        refuse(0, MalformedRecord("type", str(error)))
    finally:
        text.detach()  # whoever opened the file closes it


@dataclass(frozen=True, slots=True)
class _Cells:
    line: int
    cells: list[str]
    columns: dict[str, int]
    received: int = 0

    def get(self, ref: Ref) -> str | None:
        index = self.columns.get(ref) if isinstance(ref, str) else ref
        return self.cells[index].strip() if index is not None and index < len(self.cells) else None

    def elements(self, ref: str) -> list[Row]:
        raise MalformedRecord("type", f"a csv line has no array {ref}")


@dataclass(frozen=True, slots=True)
class _Document:
    """``value`` is the document itself, or an element of an array in it."""

    line: int
    received: int
    document: Any
    value: Any

    def get(self, ref: Ref) -> str | None:
        value = self._at(str(ref))
        if value is None or isinstance(value, dict | list):
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)

    def elements(self, ref: str) -> list[Row]:
        found = self._at(ref)
        if not isinstance(found, list):
            raise MalformedRecord("type", f"each: there is no array at {ref}")
        return [_Document(self.line, self.received, self.document, element) for element in found]

    def _at(self, ref: str) -> Any:
        value, names = self.value, ref.split(".")
        if names[0] == "$":
            value, names = self.document, names[1:]
        for name in names:
            if isinstance(value, dict):
                value = value.get(name)
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value


def _csv_rows(file: TextIO, form: FileFormat, refuse: Refuse) -> Iterator[Row]:
    reader = csv.reader(file, delimiter=form.delimiter)
    columns: dict[str, int] = {}
    if form.header:
        columns = {name.strip(): index for index, name in enumerate(next(reader, []))}
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            refuse(reader.line_num, MalformedRecord("type", f"no csv row: {error}"))
            continue
        if cells is None:
            return
        if cells:
            yield _Cells(reader.line_num, cells, columns)


def _json_rows(file: TextIO, form: FileFormat, refuse: Refuse) -> Iterator[Row]:
    receive = form.receive
    captured = form.container == "jsonl-capture"
    parse = time_parser(receive.format)
    for number, line in enumerate(file, 1):
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
            refuse(number, MalformedRecord("json", str(error)))
        except MalformedRecord as error:
            refuse(number, error)
        else:
            yield _Document(number, received, document, document)


def _receive_time(stamp: str, parse: ParseTime, form: str) -> int:
    try:
        return parse(stamp)
    except ValueError as error:
        raise MalformedRecord(
            "timestamp_unit", f"line begins with {stamp[:32]!r}, not with a receive time in {form}: {error}"
        ) from None
