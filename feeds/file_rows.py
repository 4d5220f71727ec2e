"""The lines of a file as rows: csv columns or JSON members, looked up by reference, as exact text."""

import io
import json
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import IO, Protocol

import msgspec

from feeds.codec import MalformedRecord
from feeds.containers import CorruptFile, unpacking
from feeds.csv_rows import CsvRows, Notice
from feeds.documents import Document
from feeds.file_format import FileFormat, FormatError, Ref
from feeds.number_texts import JsonNumber, shown
from feeds.tables.table import Table
from feeds.text_lines import Line, Refuse, Unreadable, lines
from feeds.timestamps import ParseTime, time_parser

# JSON numbers keep their text: float_hook sees the literal, so no price passes through a float.
decode_json = msgspec.json.Decoder(float_hook=JsonNumber).decode
_document_at = json.JSONDecoder(parse_float=JsonNumber).raw_decode
_BLANK = re.compile(r"[ \t\r\n,]*")
"""What may stand between documents."""


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

    def elements(self, ref: str, of: str = "") -> Sequence["Row"]:
        """The elements of the array at a reference, each as a row. Raises MalformedRecord: no array.

        ``of``: the field that it is, which a row may lack; then it has no elements.
        """


def rows(file: IO[bytes], form: FileFormat, refuse: Refuse, notice: Notice) -> Generator[Row]:
    """Every readable row of a text in its order. Unreadable lines are reported and skipped.

    Raises:
        FormatError: before the first row, where header or encoding are not as the format declares.
    """
    try:
        if not form.is_text:
            for table in tables(file, form, refuse):
                yield from table.rows()
            return
        with unpacking(), closing(lines(file, form.encoding, form.skip_lines, refuse)) as text:
            if form.container == "csv":
                yield from CsvRows(text, form, refuse, notice)
            elif form.container == "json":
                yield from _documents(text, refuse)
            else:
                yield from _json_rows(text, form, refuse)
    except CorruptFile as error:
        refuse(0, MalformedRecord("type", str(error)))
    except Unreadable as error:
        raise FormatError(str(error)) from error


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
            document = decode_json(text)
        except (msgspec.DecodeError, RecursionError) as error:
            refuse(number, MalformedRecord("json", f"{error}: {shown(text)}"))
        except MalformedRecord as error:
            refuse(number, error)
        else:
            yield Document(number, received, document, document)


def tables(file: IO[bytes], form: FileFormat, refuse: Refuse) -> Generator[Table]:
    """The tables of a file that is no text. Raises FormatError: it is not as declared."""
    try:
        if form.container == "dbn":
            from feeds.tables.dbn import dbn_tables as read
        else:
            from feeds.tables.arrow import arrow_tables as read
    except ModuleNotFoundError as error:
        module, extra = ("databento-dbn", "dbn") if form.container == "dbn" else ("pyarrow", "parquet")
        what = f"container {form.container} needs {module}: pip install 'foretick[{extra}]'"
        raise FormatError(what) from error
    try:
        with unpacking():
            yield from read(file, form, refuse)
    except CorruptFile as error:
        refuse(0, MalformedRecord("type", str(error)))


def ends_early(file: IO[bytes], form: FileFormat) -> str:
    """What is missing at the end of a table, unless it is packed; "" if nothing is."""
    if not isinstance(file, io.BufferedReader):
        return ""
    if form.container == "dbn":
        from feeds.tables.dbn import ends_early as missing
    elif form.container == "arrow":
        from feeds.tables.arrow import ends_early as missing
    else:
        return ""
    return missing(file)


def _documents(found: Iterator[Line], refuse: Refuse) -> Iterator[Row]:
    """The elements of an array, and documents outside of one. What stands behind a damage is not read."""
    text = "".join(line for _, line in found)
    at, number, depth = 0, 1, 0
    while (begin := _BLANK.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        number += text.count("\n", at, begin)
        at = begin
        if text[at] == "[" and not depth:
            depth, at = 1, at + 1
        elif text[at] == "]" and depth:
            depth, at = 0, at + 1
        else:
            try:
                document, end = _document_at(text, at)
            except (ValueError, RecursionError) as error:
                refuse(number, MalformedRecord("json", f"{error}: {shown(text[at : at + 200])}"))
                return
            yield Document(number, 0, document, document)
            number += text.count("\n", at, end)
            at = end
    if depth:
        refuse(number, MalformedRecord("json", "truncated: the array is not closed"))


def _receive_time(stamp: str, parse: ParseTime, form: str) -> int:
    try:
        return parse(stamp).ns
    except ValueError as error:
        raise MalformedRecord(
            "timestamp_unit", f"line begins with {stamp[:32]!r}, not with a receive time in {form}: {error}"
        ) from None
