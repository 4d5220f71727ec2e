"""Databento's DBN as tables: trades, bars, and the trades in books. Metadata is read by `databento_dbn`."""

import io
from collections.abc import Generator, Iterator, Mapping
from datetime import date
from typing import IO, Any, cast

import databento_dbn as dbn
import numpy as np
import numpy.typing as npt

from feeds.codec import MalformedRecord
from feeds.file_format import FileFormat, FormatError
from feeds.tables.table import Column, Integers, Table
from feeds.text_lines import Refuse

CHUNK = 1 << 20
"""Bytes that are read at once."""
_PREFIX = 8
"""Bytes before the metadata: DBN, the version, and the metadata's length."""
_SCALE = 9
_DAY_NS = 86_400 * 10**9
_UNDEFINED = {"i8": 2**63 - 1, "u4": 2**32 - 1, "u8": 2**64 - 1}
_BARS = {0x20: "ohlcv-1s", 0x21: "ohlcv-1m", 0x22: "ohlcv-1h", 0x23: "ohlcv-1d", 0x24: "ohlcv-eod"}
_TRADES = {0x00: "trades", 0x01: "mbp-1", 0x0A: "mbp-10"}
"""Records that begin as a trade does, by their type; those of books tell of trades by their action."""
_HEADER = ("length", "rtype", "publisher_id", "instrument_id", "ts_event")
_NUMBERS = {"trade": ("size", "sequence", "ts_recv", "flags"), "bar": ("volume",)}
_PRICES = {"trade": ("price",), "bar": ("open", "high", "low", "close")}

Span = tuple[int, int, int]
"""First and last moment, ns, of a name, and its place among the names."""


def dbn_tables(file: IO[bytes], form: FileFormat, refuse: Refuse) -> Generator[Table]:
    """The records of a file, as tables of one type each. Where it is damaged, reading ends with a refusal.

    Raises:
        FormatError: the file does not begin as DBN does, or the format declares a column that it lacks.
    """
    metadata = _metadata(file)
    names, spans = _names(metadata)
    _check(form, names)
    rest, first = b"", 1
    for data in _chunks(file):
        data = rest + data
        at = 0
        for records in _runs(data):
            if records is None:
                refuse(first, MalformedRecord("type", f"damaged from record {first} on: no record there"))
                return
            yield _table(records, first, metadata.dataset, names, spans)
            first += len(records)
            at += records.nbytes
        rest = data[at:]
    if rest:
        refuse(first, MalformedRecord("type", f"truncated: {len(rest)} bytes of record {first} are left"))


def ends_early(file: IO[bytes]) -> str:
    """What is missing at the end of a file of one schema, whose records have one length."""
    file.seek(0)
    schema = _metadata(file).schema
    first, begin = file.read(2), file.tell() - 2
    rest = file.seek(0, io.SEEK_END) - begin
    if schema is None or len(first) < 2 or not (left := rest % max(4 * first[0], 1)):
        return ""
    return f"the file ends early: {left} bytes of its last record are left"


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """What a file holds, in pieces of about `CHUNK`; all that stands before a damage."""
    parts: list[bytes] = []
    size = 0
    try:
        while piece := cast(io.BufferedReader, file).read1(CHUNK):
            parts.append(piece)
            size += len(piece)
            if size >= CHUNK:
                yield b"".join(parts)
                parts, size = [], 0
    except Exception:
        yield b"".join(parts)
        raise
    yield b"".join(parts)


def _metadata(file: IO[bytes]) -> Any:
    start = file.read(_PREFIX)
    if start[:3] != b"DBN":
        raise FormatError("the file cannot be read as dbn: it does not begin with DBN")
    try:
        return dbn.Metadata.decode(start + file.read(int.from_bytes(start[4:], "little")))
    except (dbn.DBNError, ValueError, OverflowError) as error:
        raise FormatError(f"the file's metadata cannot be read as dbn: {error}") from error


COLUMNS = frozenset(
    (*_HEADER[2:], "schema", "dataset", "symbol", "action", "side", *_NUMBERS["trade"], *_NUMBERS["bar"],
     *_PRICES["trade"], *_PRICES["bar"])
)  # fmt: skip
"""What a format may name."""


def _check(form: FileFormat, names: list[str]) -> None:
    unknown = sorted(str(ref) for ref in form.columns() if ref not in COLUMNS)
    if unknown:
        raise FormatError(
            f"the file has no column {unknown[0]!r}, which the format declares; dbn has "
            f"{', '.join(sorted(COLUMNS))}"
        )
    if not names and "symbol" in form.columns():
        raise FormatError(
            "the file's metadata has no symbols of its instruments: declare symbol, or take instrument_id"
        )


def _runs(data: bytes) -> Iterator[npt.NDArray[np.void] | None]:
    """Whole records, those of one type and length at a time; None where there is no record."""
    at, raw = 0, np.frombuffer(data, np.uint8)
    while at + 2 <= len(data):
        size, kind = 4 * data[at], data[at + 1]
        columns = _columns_of(kind)
        if size < columns.itemsize:
            yield None
            return
        count = (len(data) - at) // size
        if not count:
            return
        found = raw[at : at + count * size].reshape(count, size)
        same = (found[:, 0] == data[at]) & (found[:, 1] == kind)
        count = count if same.all() else int(np.argmin(same))
        fields: Any = columns.fields
        layout = np.dtype({
            "names": list(fields), "formats": [fields[name][0] for name in fields],
            "offsets": [fields[name][1] for name in fields], "itemsize": size,
        })  # fmt: skip
        yield np.frombuffer(data, layout, count, at)
        at += count * size


def _columns_of(kind: int) -> np.dtype[np.void]:
    found = dbn.TradeMsg._dtypes if kind in _TRADES else dbn.OHLCVMsg._dtypes
    return np.dtype([each for each in found if kind in _TRADES or kind in _BARS or each[0] in _HEADER])


def _table(
    records: npt.NDArray[np.void], first: int, dataset: str, names: list[str], spans: Mapping[int, list[Span]]
) -> Table:
    code = int(records["rtype"][0])
    schema = _TRADES.get(code) or _BARS.get(code) or f"rtype {code}"
    columns = {
        "schema": _constant(schema, len(records)), "dataset": _constant(dataset, len(records)),
        "publisher_id": _number(records["publisher_id"]), "instrument_id": _number(records["instrument_id"]),
        "ts_event": _number(records["ts_event"]),
    }  # fmt: skip
    kind = "trade" if code in _TRADES else "bar" if code in _BARS else ""
    for name in _PRICES.get(kind, ()):
        columns[name] = _number(records[name], _SCALE)
    for name in _NUMBERS.get(kind, ()):
        columns[name] = _number(records[name])
    received = None
    index = columns["ts_event"]
    if kind == "trade":
        for name in ("action", "side"):
            columns[name] = _letters(records[name])
        index = columns["ts_recv"]
        received = index.values if index.valid is None else np.where(index.valid, index.values, 0)
    columns["symbol"] = _symbols(records["instrument_id"], index.values, names, spans)
    return Table(first, len(records), columns, received)


def _constant(text: str, length: int) -> Column:
    return Column("text", np.zeros(length, np.int64), words=[text])


def _number(values: Any, scale: int = 0) -> Column:
    """Integers; those that stand for nothing, or that 64 bits with a sign do not hold, are no values."""
    none = _UNDEFINED.get(values.dtype.str[1:])
    valid = np.ones(len(values), np.bool_) if none is None else values != none
    if values.dtype == np.uint64:
        valid &= values < 2**63
    made = np.where(valid, values, 0).astype(np.int64)
    return Column("decimal", made, scale, valid=None if valid.all() else valid)


def _letters(values: Any) -> Column:
    codes = values.view(np.uint8) if values.flags.c_contiguous else values.copy().view(np.uint8)
    return Column("text", codes.astype(np.int64), words=[chr(code) for code in range(256)])


def _names(metadata: Any) -> tuple[list[str], dict[int, list[Span]]]:
    """The names in the metadata, and of each instrument's number, when it has which."""
    names: dict[str, int] = {}
    spans: dict[int, list[Span]] = {}
    by_number = str(metadata.stype_in) == "instrument_id"
    for key, intervals in metadata.mappings.items():
        for each in intervals:
            number, name = (key, each["symbol"]) if by_number else (each["symbol"], key)
            if not number.isdecimal() or not name:
                continue
            place = names.setdefault(name, len(names))
            first, last = _midnight(each["start_date"]), _midnight(each["end_date"])
            spans.setdefault(int(number), []).append((first, last, place))
    return list(names), spans


def _midnight(day: date) -> int:
    return (day - date(1970, 1, 1)).days * _DAY_NS


def _symbols(numbers: Any, moments: Integers, names: list[str], spans: Mapping[int, list[Span]]) -> Column:
    """The name that each instrument has at its moment."""
    found = np.full(len(numbers), -1, np.int64)
    unique, which = np.unique(numbers, return_inverse=True)
    first, last = int(moments.min()), int(moments.max())
    for at, number in enumerate(unique.tolist()):
        for begin, end, place in spans.get(number, ()):
            if begin <= first and last < end:
                found[which == at] = place
            elif begin <= last and first < end:
                found[(which == at) & (moments >= begin) & (moments < end)] = place
    return Column("text", found, words=names, valid=None if (found >= 0).all() else found >= 0)
