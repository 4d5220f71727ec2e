"""Market data files as records: parsed exactly as the format declares, in the order of their times."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import IO

import msgspec

from feeds.candles import Candles, OnSkipped
from feeds.codec import MalformedRecord
from feeds.containers import CorruptFile, Opened, texts
from feeds.csv_rows import Notice
from feeds.file_format import OTHER, FileFormat, FormatError
from feeds.file_rows import Row, rows
from feeds.market_data import AnyRecord
from feeds.record_order import in_time_order
from feeds.repeated_hour import RepeatedHours
from feeds.row_records import Group, RowReader, matches

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
) -> Iterator[AnyRecord]:
    """Records in file order, or reversed if newest first; those with ``from_ns`` <= time < ``until_ns``.

    ``seq`` numbers all records of the file from 1, including those left out, so it names the same record
    however much of the file is read. Without receive times in the file, ``ts_recv`` is ``ts_event``.
    Malformed lines yield nothing. ``day``: of times since midnight, instead of the date in the file's name.
    ``on_notice``: called with what is worth saying of the whole file.

    Raises:
        OSError: the file cannot be opened. FormatError: before the first record, where a header or an
        encoding is not as declared, or times count from midnight of an unknown day.
    """
    refuse = on_malformed or _ignore
    path, seq = Path(path), 0
    try:
        look(path, form, on_notice or _ignore)
        for name, text in texts(path, opened, members=form.members):
            today = day or form.date_of(path.name, name)
            for record in read_text(
                text, form, today, refuse, on_passed_over or _ignore, after=seq, on_notice=on_notice
            ):
                seq = record.seq
                if (from_ns is None or record.ts_event >= from_ns) and (
                    until_ns is None or record.ts_event < until_ns
                ):
                    yield record
    except CorruptFile as error:
        refuse(0, MalformedRecord("type", str(error)))


def look(path: Path, form: FileFormat, notice: Notice) -> None:
    """Hold the beginning of each text of a file against its format, and say what is worth saying of it.

    Raises:
        OSError, Corrupt: as `texts`. FormatError: a header or an encoding is not as declared.
    """
    said: dict[str, None] = {}
    skipped: list[str] = []
    for name, text in texts(path, members=form.members, skipped=skipped.append):
        try:
            with closing(rows(text, form, _ignore, said.setdefault)) as found:
                next(found, None)
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
    after: int = 0,
    numbered: bool = True,
    on_notice: Notice | None = None,
) -> Iterator[AnyRecord]:
    """Records of one text in the order in which they happened.

    ``seq`` counts on from ``after``, or is 0 unless ``numbered``. Raises FormatError as `read_records`.
    """
    notice, refused = on_notice or _ignore, _Refusals(refuse, _only_key(form))
    readers = RowReader.compile(form, day)
    ordered = in_time_order(_groups(text, form, readers, refused, skip), form.order, notice)
    settled = RepeatedHours(form.records, refused).settle(ordered)
    seq = after
    for parsed in Candles(form.records, skip, notice).finished(settled):
        seq += 1
        yield msgspec.structs.replace(parsed.record, seq=seq) if numbered else parsed.record


def _groups(
    text: IO[bytes], form: FileFormat, readers: list[RowReader], refuse: _Refusals, skip: OnSkipped
) -> Iterator[Group]:
    """What each line holds, line by line."""
    for row in rows(text, form, refuse, _ignore):
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
