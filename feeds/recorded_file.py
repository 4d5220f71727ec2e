"""Market data files as records: parsed exactly as the format declares, in the order of their times."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from feeds.candles import Candles, OnSkipped
from feeds.codec import MalformedRecord
from feeds.columns.record_columns import RecordColumns
from feeds.containers import CorruptFile, Opened, texts
from feeds.csv_rows import Notice
from feeds.file_format import OTHER, FileFormat, FormatError
from feeds.file_rows import Row, ends_early, rows, tables
from feeds.market_data import Recorded
from feeds.merged_files import Item, Start, files_of, merged
from feeds.record_order import HEAD_RECORDS, in_time_order, look_at_head
from feeds.repeated_hour import RepeatedHours
from feeds.row_records import Group, ParsedRecord, RowReader, matches
from feeds.source import YEAR_2100
from feeds.tables.convert import TableReader
from feeds.tables.table import Table, TableRow

OnMalformed = Callable[[int, MalformedRecord], None]
"""Called for every unusable line: line number (from 1; 0: the file itself), what is wrong."""

MAX_MESSAGE = 400
"""Characters of a message about a line, which shows at most 200 of it."""
_MAX_NAMED = 3
"""Skipped files of an archive that a notice names."""


def read_records(
    path: str | Path,
    form: FileFormat,
    *,
    from_ns: int | None = None,
    until_ns: int | None = None,
    day: date | None = None,
    on_malformed: OnMalformed | None = None,
    on_passed_over: OnSkipped | None = None,
    on_notice: Notice | None = None,
    opened: Opened | None = None,
) -> Iterator[Recorded]:
    """Records in file order, or reversed if newest first; those with ``from_ns`` <= time < ``until_ns``.

    ``path``: a file, a folder or a pattern such as ``trades/*.parquet``; several files are played by time.
    ``seq`` numbers all records of the file from 1, including those left out, so it names the same record
    however much of the file is read. Without receive times in the file, ``ts_recv`` is ``ts_event``.
    Malformed lines yield nothing. ``day``: of times since midnight, instead of the date in the file's name.
    ``on_notice``: called with what is worth saying of the whole file.

    Raises:
        OSError: the file cannot be opened. FormatError: before the first record, where a header or an
        encoding is not as declared, or times count from midnight of an unknown day.
    """
    says = Says(on_malformed or _ignore, on_passed_over or _ignore, on_notice or _ignore, opened)
    for item in read_items(Path(path), form, says, from_ns=from_ns, until_ns=until_ns, day=day):
        assert not isinstance(item, RecordColumns)
        yield item


@dataclass(frozen=True)
class Says:
    """Whom reading a file tells what: see `read_records`."""

    refuse: OnMalformed
    skip: OnSkipped
    notice: Notice
    opened: Opened | None = None


def read_items(
    path: Path,
    form: FileFormat,
    says: Says,
    *,
    from_ns: int | None = None,
    until_ns: int | None = None,
    day: date | None = None,
    as_columns: bool = False,
) -> Iterator[Item]:
    """The same; ``as_columns``: records of a table that nothing is unusual about come as columns."""
    files = files_of(path, form.members)
    if len(files) == 1:
        items = _of_file(files[0], form, says, day, as_columns)
    else:
        starts: list[Start] = []
        for each in files:
            quiet = Says(_ignore, _ignore, _ignore)
            first = next(_of_file(each, form, quiet, day, False), None)
            own = replace(says, refuse=_naming(each.name, says.refuse))
            open_ = partial(_of_file, each, form, own, day, as_columns)
            starts.append((0 if first is None else _first_time(first), open_))
        items = merged(starts)
    seq = 1
    first_ns, end_ns = from_ns or 0, YEAR_2100 if until_ns is None else until_ns
    for item in items:
        if isinstance(item, RecordColumns):
            item.number(seq)
            seq += len(item)
            inside = (item.times >= first_ns) & (item.times < end_ns)
            if inside.any():
                yield item if inside.all() else item.part(inside)
        else:
            if first_ns <= item.ts_event < end_ns:
                yield msgspec.structs.replace(item, seq=seq)
            seq += 1


def _first_time(item: Item) -> int:
    return int(item.times[0]) if isinstance(item, RecordColumns) else item.ts_event


def _naming(name: str, refuse: OnMalformed) -> OnMalformed:
    """Refuses lines of one file among several."""

    def named(line: int, error: MalformedRecord) -> None:
        message = f"{name}: {error.message}"
        refuse(line, MalformedRecord(error.reason, message, key=error.key, ts_event=error.ts_event))

    return named


def _of_file(path: Path, form: FileFormat, says: Says, day: date | None, as_columns: bool) -> Iterator[Item]:
    """What one file holds, without numbers."""
    try:
        look(path, form, says.notice)
        for name, text in texts(path, says.opened, members=form.members, table=not form.is_text):
            yield from _of_text(text, form, day or form.date_of(path.name, name), says, as_columns)
    except CorruptFile as error:
        says.refuse(0, MalformedRecord("type", str(error)))


def look(path: Path, form: FileFormat, notice: Notice, *, to_end: bool = False) -> None:
    """Hold the beginning of each text of a file against its format, and say what is worth saying of it.

    ``to_end``: look at the end of a table, too.

    Raises:
        OSError, Corrupt: as `texts`. FormatError: a header, a column or an encoding is not as declared, or a
        table ends early.
    """
    said: dict[str, None] = {}
    skipped: list[str] = []
    found_texts = texts(path, members=form.members, table=not form.is_text, skipped=skipped.append)
    for name, text in found_texts:
        try:
            with closing(rows(text, form, _ignore, said.setdefault)) as found:
                if next(found, None) is None and not form.is_text:
                    said["the file holds no rows"] = None
            if to_end and (early := ends_early(text, form)):
                raise FormatError(early)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
    for what in said:
        notice(what)
    if skipped:
        more = ", ..." if len(skipped) > _MAX_NAMED else ""
        notice(
            f"{len(skipped)} files of the archive are skipped: {', '.join(skipped[:_MAX_NAMED])[:200]}{more}"
        )


class _Refusals:
    """Refuses lines in messages of limited length, and adds what is known of their symbol and time.

    ``only_key``: the symbol of all lines. A line whose time cannot be read is as old as the record before it.
    """

    def __init__(self, refuse: OnMalformed, only_key: str) -> None:
        self._refuse, self._only_key = refuse, only_key
        self._newest = 0

    def __call__(self, line: int, error: MalformedRecord) -> None:
        message = error.message
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        key, moment = error.key or self._only_key, error.ts_event or self._newest
        self._refuse(line, MalformedRecord(error.reason, message, key=key, ts_event=moment if key else 0))

    def read_to(self, event_ns: int) -> None:
        """A record of this time was read."""
        self._newest = event_ns


def read_text(
    text: IO[bytes],
    form: FileFormat,
    day: date | None,
    refuse: OnMalformed,
    skip: OnSkipped,
    *,
    numbered: bool = True,
    on_notice: Notice | None = None,
) -> Iterator[Recorded]:
    """Records of one text in the order in which they happened.

    ``seq`` counts from 1, or is 0 unless ``numbered``. Raises FormatError as `read_records`.
    """
    for seq, item in enumerate(_of_text(text, form, day, Says(refuse, skip, on_notice or _ignore)), 1):
        assert not isinstance(item, RecordColumns)
        yield msgspec.structs.replace(item, seq=seq) if numbered else item


def _of_text(
    text: IO[bytes], form: FileFormat, day: date | None, says: Says, as_columns: bool = False
) -> Iterator[Item]:
    refused = _Refusals(says.refuse, _only_key(form))
    readers = RowReader.compile(form, day)
    plain = TableReader.compile(form, readers) if as_columns and not form.is_text else None
    parsed: Iterator[ParsedRecord | RecordColumns]
    if plain is not None:
        parsed = _of_tables(text, plain, refused, says)
    else:
        parsed = _settled(rows(text, form, refused, _ignore), form, readers, refused, says)
    for each in Candles(form.records, says.skip, says.notice).finished(parsed):
        yield each if isinstance(each, RecordColumns) else each.record


def _settled(
    found: Iterable[Row], form: FileFormat, readers: Sequence[RowReader], refused: _Refusals, says: Says
) -> Iterator[ParsedRecord]:
    ordered = in_time_order(_groups(found, form, readers, refused, says.skip), form.order, says.notice)
    return RepeatedHours(form.records, refused).settle(ordered)


def _of_tables(
    text: IO[bytes], plain: TableReader, refused: _Refusals, says: Says
) -> Iterator[ParsedRecord | RecordColumns]:
    """Runs of plain rows as columns, and all others one by one; a file newest first has no such runs."""
    form, readers = plain.form, plain.readers
    head: list[Table] = []
    damage: list[tuple[int, MalformedRecord]] = []  # which ends the file
    found: Iterator[Table] = tables(text, form, lambda line, error: damage.append((line, error)))
    while sum(table.length for table in head) < HEAD_RECORDS and (table := next(found, None)) is not None:
        head.append(table)
    found = chain(head, found)
    groups = _groups(_rows_of(head), form, readers, _Refusals(_ignore, ""), _ignore)
    if form.order == "newest_first" or (form.order == "auto" and look_at_head(groups)[1]):
        yield from _settled(_rows_of(found), form, readers, refused, says)
        found = iter(())
    for table in found:
        columns, keys = plain.read(table)
        borders = (np.flatnonzero(np.diff(columns["taken"])) + 1).tolist()
        for start, end in pairwise([0, *borders, table.length]):
            if columns["taken"][start]:
                whole = partial(_record_of, table, readers)
                yield RecordColumns(columns[start:end], keys, np.arange(start, end), whole)
                refused.read_to(int(columns["ts_event"][end - 1]))
            else:
                for group in _groups(map(table.row, range(start, end)), form, readers, refused, says.skip):
                    yield from group
    for line, error in damage:
        refused(line, error)


def _rows_of(found: Iterable[Table]) -> Iterator[TableRow]:
    return chain.from_iterable(table.rows() for table in found)


def _record_of(table: Table, readers: Sequence[RowReader], at: int) -> Recorded:
    """The record of a row that was read as columns."""
    row = table.row(at)
    reader = next(each for each in readers if matches(each.form.match, row))
    return reader.group(row, _ignore)[0].record


def _groups(
    found: Iterable[Row], form: FileFormat, readers: Sequence[RowReader], refuse: _Refusals, skip: OnSkipped
) -> Iterator[Group]:
    """What each line holds, line by line."""
    for row in found:
        reader = next((each for each in readers if matches(each.form.match, row)), None)
        if reader is None:
            skip(row.line, _name_of(form, row))
        elif group := reader.group(row, refuse):
            refuse.read_to(group[-1].record.ts_event)
            yield group


def _name_of(form: FileFormat, row: Row) -> str:
    """The name under which a row without a record is counted."""
    return next((name for name, match in form.passed_over.items() if matches(match, row)), OTHER)


def _only_key(form: FileFormat) -> str:
    """The symbol of all records of a format that names only one; else empty."""
    keys = {f"{each.venue}:{each.symbol}" for each in form.records}
    is_constant = all("venue" not in each.fields and "symbol" not in each.fields for each in form.records)
    return keys.pop() if len(keys) == 1 and is_constant else ""


def _ignore(*_: object) -> None:
    """Ignore malformed and skipped lines, and notices."""
