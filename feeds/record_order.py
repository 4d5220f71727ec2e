"""The order of a file: one that stands newest first is read in time order, in bounded memory."""

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import cast

import msgspec
import numpy as np

from feeds.codec import decode_message, encode
from feeds.csv_rows import Notice
from feeds.file_format import Order
from feeds.market_data import Recorded
from feeds.row_records import Group, ParsedRecord

HEAD_CHANGES = 32
"""Changes of time, up or down, after which the head of a file says how it is ordered."""
HEAD_RECORDS = 4096
"""Records in which they are looked for; as many are held at once."""
_MOSTLY = 4
"""A file stands newest first if this many times as many of its changes go back as go on."""
_FEW = 3
"""Changes below which only the whole file says how it is ordered."""
IN_MEMORY = 32 << 20
"""Bytes of a file newest first that are held in memory; the rest goes to a temporary file."""


class _Changes:
    """How often the times of each symbol go on and back, from one line to the next."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], int] = {}
        self.on = self.back = 0

    def add(self, group: Group) -> None:
        first: dict[tuple[int, str], int] = {}
        for each in group:
            first.setdefault(each.series, each.record.ts_event)
        for series, time in first.items():
            before = self._last.get(series, time)
            self.on += time > before
            self.back += time < before
            self._last[series] = time

    @property
    def newest_first(self) -> bool:
        return self.back > _MOSTLY * self.on


def in_time_order(groups: Iterable[Group], order: Order, notice: Notice) -> Iterator[ParsedRecord]:
    """Records of lines in the order in which they happened, if the file is newest first; else as they stand.

    ``auto``: newest first is a file whose first lines are. Such a file is read to its end, then by time;
    equal times from its end. Where local times occur twice, time does not say what comes first, and the file
    is read from its end.
    """
    lines = iter(groups)
    if order == "oldest_first":
        yield from chain.from_iterable(lines)
        return
    head: list[Group] = []
    if order == "auto":
        head, newest_first = look_at_head(lines)
        if not newest_first:
            yield from chain.from_iterable(chain(head, lines))
            return
    notice("newest first: read in time order")
    with _Spool() as spool:
        for group in chain(head, lines):
            spool.add(group)
        yield from chain.from_iterable(spool.by_time())


def look_at_head(lines: Iterator[Group]) -> tuple[list[Group], bool]:
    """The first lines, and whether they say that the file stands newest first."""
    head: list[Group] = []
    changes, records = _Changes(), 0
    for group in lines:
        head.append(group)
        changes.add(group)
        records += len(group)
        if records >= HEAD_RECORDS or changes.on + changes.back >= HEAD_CHANGES:
            return head, changes.newest_first and changes.back >= _FEW
    return head, changes.newest_first


class _Spool:
    """Lines that are written once, and read by time; 16 bytes of each are held besides."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - `__exit__` closes it
        self._places, self._times = array("q"), array("q")
        self._repeated = False

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, group: Group) -> None:
        packed = _encoder.encode([(*each[:3], encode(each.record, "msgpack")) for each in group])
        self._places.append(self._file.tell())
        self._times.append(group[0].record.ts_event)
        self._repeated = self._repeated or any(each.fold_ns for each in group)
        self._file.write(packed)

    def by_time(self) -> Iterator[Group]:
        count = len(self._times)
        from_end = np.arange(count)[::-1]
        if not self._repeated:
            times = np.frombuffer(self._times, np.int64)[::-1] if count else from_end
            from_end = from_end[np.argsort(times, kind="stable")]
        self._places.append(self._file.tell())
        for at in from_end:
            self._file.seek(self._places[at])
            found = _decoder.decode(self._file.read(self._places[at + 1] - self._places[at]))
            yield [ParsedRecord(line, declared, fold, _record(data)) for line, declared, fold, data in found]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[int, int, int, bytes]])


def _record(data: bytes) -> Recorded:
    return cast(Recorded, decode_message(data, "msgpack"))
