"""A sample of a file or of messages: its container, and the columns or paths of its rows."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from feeds.codec import MalformedRecord
from feeds.containers import CorruptFile, texts
from feeds.decoding import Undecodable, decoded
from feeds.documents import at_names, text_of
from feeds.file_format import FormatError, Ref
from feeds.file_rows import decode_json
from feeds.source import Incoming

ROWS = 2000
"""Of a sample, at most."""
_BYTES = 1 << 21
_DELIMITERS = (",", ";", "\t", "|")
_HEAD = 50
"""Lines that say how a csv file is separated."""
_DEPTH = 6
_TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"DBN": "dbn"}

Row = Mapping[Ref, Any]
"""Values by column or path: text, numbers, None. JSON's numbers are text with their digits."""


@dataclass(frozen=True)
class Sample:
    """``rows`` of a ``container``. ``each``: the array in every document whose elements they are.

    ``around``: of each row what stands around that array, by path from the document. ``is_typed``: numbers
    are numbers, and floats are binary.
    """

    container: str
    rows: Sequence[Row]
    each: str = ""
    around: Sequence[Row] = ()
    delimiter: str = ","
    header: bool = True
    skip_lines: int = 0
    is_typed: bool = False
    keys: Sequence[str] = field(default_factory=tuple)
    """Of the messages, one for each row; empty where there are none."""
    is_live: bool = False
    """They are messages."""


def of_file(path: Path) -> Sample:
    """The first rows of a file. Raises OSError, FormatError."""
    head = path.read_bytes()[:8] if path.is_file() else b""
    for magic, container in _TABLES.items():
        if head.startswith(magic):
            return _of_table(path, container)
    try:
        files = texts(path)  # it closes them where it ends
        _, file = next(files)
        data = file.read(_BYTES)
    except CorruptFile as error:
        raise FormatError(str(error)) from error
    except StopIteration:
        raise FormatError(f"{path}: an empty archive") from None
    text = data.decode("utf-8-sig", errors="replace")
    if len(data) == _BYTES:
        text = text[: text.rfind("\n") + 1]  # whole lines
    return of_text(text)


def of_text(text: str) -> Sample:
    """The rows of a text. Raises FormatError."""
    if text.lstrip()[:1] in ("{", "["):
        return _of_json(text)
    return _of_csv(text)


def of_messages(messages: Sequence[Incoming]) -> Sample:
    """The rows of messages. Raises FormatError."""
    payloads = [each for each in messages if each.payload and each.fault is None][:ROWS]
    if not payloads:
        raise FormatError("no message has a payload")
    if any(each.payload[:1] == b"\0" for each in payloads):
        raise FormatError(
            "schema ids of a registry are in front of the payloads: write the format by hand, with "
            "container avro or protobuf (docs/formats.md)"
        )
    documents, keys = list[Any](), list[str]()
    containers = set[str]()
    for each in payloads:
        for container, decode in (("json", decode_json), ("msgpack", msgspec.msgpack.decode)):
            try:
                document = decode(each.payload)
            except Exception:  # it is of another container
                continue
            if isinstance(document, dict | list):
                found = document if isinstance(document, list) else [document]
                documents += found
                keys += [(each.key or b"").decode(errors="replace")] * len(found)
                containers.add(container)
                break
    if not documents:
        text = "\n".join(each.payload.decode(errors="replace") for each in payloads)
        return replace(_of_csv(text), is_live=True)
    if len(containers) > 1:
        raise FormatError("some messages are JSON and some msgpack")
    return replace(_of_documents(documents, containers.pop(), keys), is_live=True)


def _of_json(text: str) -> Sample:
    try:
        whole = decoded(decode_json, text)
    except Undecodable:
        pass
    else:
        documents = whole if isinstance(whole, list) else [whole]
        return _of_documents(documents[:ROWS], "json")
    documents = []
    for line in text.splitlines()[:ROWS]:
        if line.strip():
            try:
                documents.append(decoded(decode_json, line))
            except Undecodable as error:
                if not documents:
                    raise FormatError(f"neither JSON nor a JSON document a line: {error}") from None
                break
    return _of_documents(documents, "jsonl")


def _of_documents(documents: Sequence[Any], container: str, keys: Sequence[str] = ()) -> Sample:
    each = _array_in(documents)
    rows, around, of_rows = list[Row](), list[Row](), list[str]()
    for at, document in enumerate(documents):
        whole: dict[Ref, Any] = {}
        whole.update(_flat(document))
        elements = at_names(document, each.split(".")) if each else [document]
        for element in elements if isinstance(elements, list) else ():
            found: dict[Ref, Any] = {}
            found.update(_flat(element))
            rows.append(found)
            around.append(whole)
            of_rows.append(keys[at] if keys else "")
    if not rows:
        raise FormatError("there is no record in it")
    typed = container == "msgpack"
    return Sample(container, rows, each, around if each else (), is_typed=typed, keys=of_rows if keys else ())


def _array_in(documents: Sequence[Any]) -> str:
    """The path of the one array of objects that most documents have; empty where there is none."""
    counts: dict[str, int] = {}
    for document in documents:
        for path in _arrays(document):
            counts[path] = counts.get(path, 0) + 1
    likely = [path for path, count in counts.items() if 2 * count >= len(documents)]
    return likely[0] if len(likely) == 1 else ""


def _arrays(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _arrays(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and path and value and all(isinstance(each, dict) for each in value):
        yield path


def _flat(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Values by path."""
    if isinstance(value, dict) and depth < _DEPTH:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else str(name), depth + 1)
    elif isinstance(value, list) and depth < _DEPTH and len(value) <= _DEPTH:
        for at, inner in enumerate(value):
            yield from _flat(inner, f"{path}.{at}" if path else str(at), depth + 1)
    elif isinstance(value, float):
        yield path, value
    else:
        try:
            yield path, text_of(path, value)
        except MalformedRecord:
            return


def _of_csv(text: str) -> Sample:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise FormatError("there is nothing in it")
    delimiter = max(_DELIMITERS, key=lambda each: _width(lines, each))
    if not _width(lines, delimiter):
        raise FormatError("neither JSON nor columns that a comma, semicolon, tab or bar separates")
    # line by line: a quotation mark that stays open spoils its own
    try:
        rows = [next(csv.reader([line], delimiter=delimiter)) for line in lines[: ROWS + _HEAD]]
    except csv.Error as error:
        raise FormatError(f"a line cannot be read: {error}") from None
    width = max(map(len, rows[-_HEAD:]))
    begin = next(at for at, row in enumerate(rows) if len(row) == width)
    header = not any(_is_number(cell) for cell in rows[begin])
    names: Sequence[Ref] = rows[begin] if header else list(range(width))
    data = rows[begin + header :][:ROWS]
    if not data:
        raise FormatError("there is a header, and no row")
    found = [{name: cell.strip() for name, cell in zip(names, row, strict=False)} for row in data]
    return Sample("csv", found, delimiter=delimiter, header=header, skip_lines=begin if header else 0)


def _width(lines: Sequence[str], delimiter: str) -> int:
    """How many times nearly every line has it; 0 where they differ."""
    counts = sorted(line.count(delimiter) for line in lines[-_HEAD:])
    return counts[len(counts) // 10] if counts[len(counts) // 10] == counts[len(counts) // 2] else 0


def _is_number(cell: str) -> bool:
    return bool(cell.strip()) and not any(each.isalpha() for each in cell)


def _of_table(path: Path, container: str) -> Sample:
    if container == "dbn":
        raise FormatError("a file of Databento: take the built-in format databento")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise FormatError(f"{container} needs pyarrow: pip install 'foretick[parquet]'") from error
    try:
        if container == "parquet":
            batch = next(pq.ParquetFile(path).iter_batches(ROWS))
        else:
            batch = pa.ipc.open_file(path).get_batch(0).slice(0, ROWS)
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    columns: dict[Ref, list[Any]] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if pa.types.is_timestamp(column.type):
            suffix = "Z" if column.type.tz else ""
            texts_ = pa.compute.cast(column.cast(pa.timestamp("ns")), pa.string()).to_pylist()
            columns[name] = [None if each is None else each.replace(" ", "T") + suffix for each in texts_]
        else:
            columns[name] = [_value(name, each) for each in column.to_pylist()]
    rows = [{name: values[at] for name, values in columns.items()} for at in range(batch.num_rows)]
    return Sample(container, rows, is_typed=True)


def _value(name: str, value: Any) -> Any:
    if isinstance(value, float):
        return value
    try:
        return text_of(name, value)
    except MalformedRecord:
        return json.dumps(str(value))
