"""The lines of a file as rows: csv columns or JSON members, looked up by reference, as exact text."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from feeds.codec import MalformedRecord
from feeds.file_format import FileFormat, Ref

Get = Callable[[Ref], str | None]
"""A row's value at a reference as text, exactly as in the file; None if absent."""

Row = tuple[int, int, Get]
"""Line number (from 1), receive time (ns; 0 if the container has none), values."""

Refuse = Callable[[int, MalformedRecord], None]
"""Called for every line that is not a row: its number and what is wrong."""

# JSON numbers keep their text: float_hook sees the literal, so no price passes through a float.
_json = msgspec.json.Decoder(float_hook=str)


def rows(path: Path, form: FileFormat, refuse: Refuse) -> Iterator[Row]:
    """Every readable row in file order. Unreadable lines are reported and skipped.

    Raises:
        OSError: the file cannot be opened.
    """
    with _open_text(path) as file:
        try:
            yield from (
                _csv_rows(file, form, refuse) if form.container == "csv" else _json_rows(file, form, refuse)
            )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            refuse(0, MalformedRecord("type", f"the gzip stream is truncated or corrupt: {error}"))


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as start:
        packed = start.read(2) == b"\x1f\x8b"

    binary = gzip.open(path) if packed else path.open("rb")  # noqa: SIM115
    # Replace undecodable bytes: one bad line must not end the file.
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="")


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
            yield reader.line_num, 0, _cell(cells, columns)


def _cell(cells: list[str], columns: dict[str, int]) -> Get:
    def get(ref: Ref) -> str | None:
        index = columns.get(ref) if isinstance(ref, str) else ref
        return cells[index].strip() if index is not None and index < len(cells) else None

    return get


def _json_rows(file: TextIO, form: FileFormat, refuse: Refuse) -> Iterator[Row]:
    captured = form.container == "jsonl-capture"
    for number, line in enumerate(file, 1):
        text = line.strip()
        if not text:
            continue
        try:
            received = 0
            if captured:
                stamp, _, text = text.partition(" ")
                received = _receive_time(stamp)
            document = _json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            refuse(number, MalformedRecord("json", str(error)))
        except MalformedRecord as error:
            refuse(number, error)
        else:
            yield number, received, _member(document)


def _receive_time(stamp: str) -> int:
    if not (stamp.isdecimal() and stamp.isascii()):
        raise MalformedRecord(
            "timestamp_unit", f"line begins with {stamp[:32]!r}, not with a receive time in ns"
        )
    return int(stamp)


def _member(document: Any) -> Get:
    def get(ref: Ref) -> str | None:
        value = document
        for name in str(ref).split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None or isinstance(value, dict | list):
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)

    return get
