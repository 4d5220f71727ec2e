"""Parquet, Arrow IPC and Feather as tables, by pyarrow."""

import io
from collections.abc import Generator, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feeds.codec import MalformedRecord
from feeds.file_format import FileFormat, FormatError
from feeds.tables.table import Column, Table, words_column
from feeds.text_lines import Refuse

ROWS = 1 << 15
"""Of a table that is read at once."""
_FILE = b"ARROW1\0\0"
_FILE_END = b"ARROW1"
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""What pyarrow raises for bytes that make no sense; lengths among them may be of any size."""


def arrow_tables(file: IO[bytes], form: FileFormat, refuse: Refuse) -> Generator[Table]:
    """The tables of a file. Where it is damaged, what stands before is read, and then refused.

    Raises:
        FormatError: it is no such file, lacks a column, or has one in a type that cannot be read exactly.
    """
    try:
        batches = (_parquet if form.container == "parquet" else _ipc)(file, form)
    except _DAMAGE as error:
        raise _unusable(form, error) from error
    first = 1
    try:
        for batch in batches:
            if batch.num_rows:
                yield _table(batch, first)
                first += batch.num_rows
    except FormatError:
        raise
    except _DAMAGE as error:
        refuse(first, MalformedRecord("type", f"damaged from row {first} on: {_said(error)}"))


def ends_early(file: IO[bytes]) -> str:
    """What is missing at the end of a file that begins as one of Arrow."""
    file.seek(0)
    if file.read(len(_FILE)) != _FILE:
        return ""
    file.seek(-len(_FILE_END), io.SEEK_END)
    return "" if file.read() == _FILE_END else "the file ends early: it is truncated"


def _parquet(file: IO[bytes], form: FileFormat) -> Iterator[Any]:
    """Its end says where everything is, so that it is not read in one go: if packed, it is held in memory."""
    source = file if isinstance(file, io.BufferedReader) else io.BytesIO(file.read())
    found = pq.ParquetFile(source, page_checksum_verification=True)
    return _of_groups(found, check_columns(found.schema_arrow, form))


def _of_groups(file: Any, names: list[str]) -> Iterator[Any]:
    """Group by group. A damage costs all of a batch, so what stands before it is looked for."""
    for group in range(file.num_row_groups):
        rows = 0
        try:
            for batch in file.iter_batches(ROWS, [group], names):
                yield batch
                rows += batch.num_rows
        except _DAMAGE:
            yield from _before_damage(file, group, names, rows)
            raise


def _before_damage(file: Any, group: int, names: list[str], after: int) -> Iterator[Any]:
    """The rows of a damaged group that can be read, behind those that were."""
    found, good, bad = None, after, after + ROWS
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            batch = next(file.iter_batches(middle, [group], names), None)
        except _DAMAGE:
            batch = None
        if batch is None:
            bad = middle
        else:
            found, good = batch, middle
    if found is not None:
        yield found.slice(after)


def _ipc(file: IO[bytes], form: FileFormat) -> Iterator[Any]:
    """A file is read as the stream that it holds, so that one without its end is read as far as it goes."""
    is_file = file.read(len(_FILE)) == _FILE
    if not is_file:
        file.seek(0)
    reader = pa.ipc.open_stream(file)
    return _of_stream(reader, check_columns(reader.schema, form), file if is_file else None)


def _of_stream(reader: Any, names: list[str], file: IO[bytes] | None) -> Iterator[Any]:
    for batch in reader:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, ROWS):
            yield batch.select(names).slice(start, ROWS)
    if file is not None and not file.read().endswith(_FILE_END):
        raise ValueError("the file ends early")


def _unusable(form: FileFormat, error: Exception) -> FormatError:
    if isinstance(error, FormatError):
        return error
    return FormatError(f"the file cannot be read as {form.container}: {_said(error)}")


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def check_columns(schema: Any, form: FileFormat) -> list[str]:
    """The columns that the format uses. Raises FormatError: one is missing, twice, or of an unusable type."""
    used = sorted({str(ref) for ref in form.columns()})
    for name in used:
        found = schema.get_all_field_indices(name)
        if not found:
            raise FormatError(
                f"the file has no column {name!r}, which the format declares; it has "
                f"{', '.join(map(repr, schema.names))[:200]}"
            )
        if len(found) > 1:
            raise FormatError(f"the file has two columns {name!r}")
        made = schema.field(name).type
        if pa.types.is_nested(made) or _is_binary(made):
            raise FormatError(f"column {name!r} is {made}: expected numbers, text or times")
    for record in form.records:
        numbers = {ref: name for name, ref in record.fields.items()}
        for key, ref in record.refs():
            made = schema.field(str(ref)).type
            number = "time" if key == "time.field" else numbers.get(ref)
            if pa.types.is_floating(made) and number not in record.float_decimals:
                what = f"declare float_decimals.{number}" if number else "expected another type"
                raise FormatError(f"column {ref!r} ({key}) is {made}, which is binary: {what}")
            if key == "time.field" and pa.types.is_timestamp(made) and record.time.format != "iso":
                raise FormatError(f"column {ref!r} is {made}: declare time.format = 'iso'")
            if key == "time.field" and pa.types.is_integer(made) and record.time.format == "iso":
                raise FormatError(f"column {ref!r} is {made}: declare a time.format such as epoch-ns")
    return used


def _is_binary(made: Any) -> bool:
    return bool(
        pa.types.is_binary(made) or pa.types.is_large_binary(made) or pa.types.is_fixed_size_binary(made)
    )


def _table(batch: Any, first: int) -> Table:
    names = batch.schema.names
    return Table(first, batch.num_rows, {name: _column(batch.column(name)) for name in names})


def _column(array: Any) -> Column:
    """A column of Arrow. What 64 bits do not hold becomes text."""
    made = array.type
    valid = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_dictionary(made):
        words = _texts(array.dictionary)
        places = array.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return Column("text", places, words=["" if each is None else each for each in words], valid=valid)
    if pa.types.is_floating(made):
        values = array.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
        return Column("float", values, valid=valid)
    if pa.types.is_integer(made) and made != pa.uint64():
        return Column("decimal", _integers(array), valid=valid)
    if pa.types.is_timestamp(made):
        nanos = array.cast(pa.timestamp("ns", made.tz))
        return Column(
            "wall" if made.tz is None else "instant", _integers(nanos.view(pa.int64())), valid=valid
        )
    if pa.types.is_decimal128(made) and (units := _units(array)) is not None:
        return Column("decimal", units, max(made.scale, 0), valid=valid)
    if pa.types.is_string(made) or pa.types.is_large_string(made):
        return _column(array.dictionary_encode())
    return words_column(_texts(array))


def _integers(array: Any) -> Any:
    return array.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=False)


def _units(array: Any) -> Any:
    """The low words of decimals of 128 bits, where they are all of them."""
    if array.type.scale < 0:
        return None
    words = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset :][: 2 * len(array)]
    low, high = words[::2], words[1::2]
    if array.null_count:
        is_valid = array.is_valid().to_numpy(zero_copy_only=False)
        low, high = np.where(is_valid, low, 0), np.where(is_valid, high, 0)
    return low if (high == low >> 63).all() else None


def _texts(array: Any) -> list[str | None]:
    """Values as text: decimals in full, everything else as Arrow writes it."""
    if pa.types.is_decimal(array.type) or pa.types.is_uint64(array.type):
        return [None if each is None else f"{each:f}" if not isinstance(each, int) else str(each)
                for each in array.to_pylist()]  # fmt: skip
    texts: list[str | None] = pc.cast(array, pa.string()).to_pylist()
    return texts
