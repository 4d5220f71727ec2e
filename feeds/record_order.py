"""The order of a file: one that stands newest first is read in time order, in bounded memory."""

import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import cast

import msgspec

from feeds.codec import decode_message, encode
from feeds.csv_rows import Notice
from feeds.file_format import Order
from feeds.messages import AnyRecord
from feeds.row_records import Group, Parsed

HEAD_CHANGES = 32
"""Changes of time, up or down, after which the head of a file says how it is ordered."""
HEAD_RECORDS = 4096
"""Records in which they are looked for; as many are held at once."""
_MOSTLY = 4
"""A file stands newest first if so many times as many of its changes go back as go on."""
_FEW = 3
"""Changes below which only the whole file says how it is ordered."""
IN_MEMORY = 32 << 20
"""Bytes of a file to be turned round that are held in memory; the rest goes to a temporary file."""
_CHUNK = 1024


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


def in_time_order(groups: Iterable[Group], order: Order, notice: Notice) -> Iterator[Parsed]:
    """Records of lines in the order in which they happened, if the file is newest first; else as they stand.

    ``auto``: newest first is a file whose first lines are. Such a file is read to its end first. If it turns
    out to be in no order, its records come as they stand.
    """
    lines = iter(groups)
    if order == "oldest_first":
        yield from chain.from_iterable(lines)
        return
    declared = order == "newest_first"
    head, changes, ended = ([], _Changes(), False) if declared else _head(lines)
    if not declared and not (changes.newest_first and (ended or changes.back >= _FEW)):
        yield from chain.from_iterable(chain(head, lines))
        return
    with _Spool() as spool:
        for group in chain(head, lines):
            spool.add(group)
        if declared or spool.changes.newest_first:
            notice("newest first: read from its end, in time order")
            yield from chain.from_iterable(spool.backwards())
        else:
            notice("newest first at its beginning, but not as a whole: read as it stands")
            yield from chain.from_iterable(spool.forwards())


def _head(lines: Iterator[Group]) -> tuple[list[Group], _Changes, bool]:
    """The first lines, how their times change, and whether they are all."""
    head: list[Group] = []
    changes, records = _Changes(), 0
    for group in lines:
        head.append(group)
        changes.add(group)
        records += len(group)
        if records >= HEAD_RECORDS or changes.on + changes.back >= HEAD_CHANGES:
            return head, changes, False
    return head, changes, True


class _Spool:
    """Lines that are written once and read in either direction."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - `__exit__` closes it
        self._places: list[tuple[int, int]] = []
        self._open: list[Group] = []
        self.changes = _Changes()

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, group: Group) -> None:
        self.changes.add(group)
        self._open.append(group)
        if len(self._open) == _CHUNK:
            packed = _pack(self._open)
            self._places.append((self._file.tell(), len(packed)))
            self._file.write(packed)
            self._open = []

    def backwards(self) -> Iterator[Group]:
        yield from reversed(self._open)
        for place in reversed(self._places):
            yield from reversed(self._read(place))

    def forwards(self) -> Iterator[Group]:
        for place in self._places:
            yield from self._read(place)
        yield from self._open

    def _read(self, place: tuple[int, int]) -> list[Group]:
        self._file.seek(place[0])
        return _unpack(self._file.read(place[1]))


def _pack(groups: list[Group]) -> bytes:
    return msgspec.msgpack.encode(
        [[(*each[:3], encode(each.record, "msgpack")) for each in g] for g in groups]
    )


def _unpack(packed: bytes) -> list[Group]:
    found = cast(list[list[tuple[int, int, int, bytes]]], msgspec.msgpack.decode(packed))
    return [
        [Parsed(line, declared, fold, _record(data)) for line, declared, fold, data in group]
        for group in found
    ]


def _record(data: bytes) -> AnyRecord:
    return cast(AnyRecord, decode_message(data, "msgpack"))
