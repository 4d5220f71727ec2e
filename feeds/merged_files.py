"""Several recorded files as one: which they are, and their records in the order of time."""

import glob
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path

import numpy as np

from feeds.columns.record_columns import Integers, RecordColumns, in_one
from feeds.market_data import Recorded

Item = Recorded | RecordColumns
Chunk = list[Recorded] | RecordColumns
_RECORDS = 512
"""Records of a file that are held."""


def files_of(path: Path, members: str = "") -> list[Path]:
    """The files that a path means, by name: itself, those in a folder, or those that match a pattern.

    Of a folder, hidden files are left out, and those that ``members`` does not match. Raises OSError: there
    is none.
    """
    if path.is_dir():
        found = [each for each in path.iterdir() if each.is_file() and not each.name.startswith(".")]
        found = [each for each in found if not members or fnmatchcase(each.name, members)]
    elif path.exists() or not glob.has_magic(str(path)):
        return [path]
    else:
        found = [each for each in map(Path, glob.glob(str(path), recursive=True)) if each.is_file()]
    if not found:
        raise FileNotFoundError(f"no files: {path}{f' ({members})' if members and path.is_dir() else ''}")
    return sorted(found)


class _Stream:
    """The records of one file, some of them at hand; ``times`` never go back."""

    def __init__(self, number: int, items: Iterator[Item]) -> None:
        self.number = number
        self.times: Integers = np.empty(0, np.int64)
        self._chunks, self._newest = _chunks(items), 0
        self._chunk: Chunk = []

    def fill(self) -> bool:
        """Have records at hand; False at the end of the file."""
        if len(self.times):
            return True
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        times = chunk.times if isinstance(chunk, RecordColumns) else np.array([r.ts_event for r in chunk])
        self._chunk, self.times = chunk, np.maximum(np.maximum.accumulate(times), self._newest)
        self._newest = self.last
        return True

    @property
    def last(self) -> int:
        """The newest time at hand."""
        return int(self.times[-1])

    def take(self, until: int, *, equal: bool) -> tuple[Chunk, Integers]:
        """Take what is before a time, or ``equal`` to it."""
        end = int(np.searchsorted(self.times, until, "right" if equal else "left"))
        taken, times = self._chunk, self.times[:end]
        self.times = self.times[end:]
        if isinstance(taken, RecordColumns):
            self._chunk = taken.part(slice(end, None))
            return taken.part(slice(end)), times
        self._chunk = taken[end:]
        return taken[:end], times


def _chunks(items: Iterator[Item]) -> Iterator[Chunk]:
    for is_columns, found in groupby(items, lambda item: isinstance(item, RecordColumns)):
        if is_columns:
            yield from found  # type: ignore[misc]
        else:
            while some := list(islice(found, _RECORDS)):
                yield some  # type: ignore[misc]


Start = tuple[int, Callable[[], Iterator[Item]]]
"""When a file begins, ns, and what opens it."""


def merged(files: Sequence[Start]) -> Iterator[Item]:
    """Records of all files by time; what stands behind a newer one of its own file stays right behind it.

    Equal times: in the order of the files. A file is opened when its time comes, and closed at its end.
    """
    waiting = deque(
        sorted(((first, n, open_) for n, (first, open_) in enumerate(files)), key=lambda e: e[:2])
    )
    active: list[_Stream] = []
    while waiting or active:
        active = [each for each in active if each.fill()]
        until = min((each.last for each in active), default=None)
        if waiting and (until is None or waiting[0][0] <= until):
            _, number, open_ = waiting.popleft()
            active = sorted([*active, _Stream(number, open_())], key=attrgetter("number"))
        elif until is not None:
            least = next(each.number for each in active if each.last == until)
            yield from _by_time([each.take(until, equal=each.number <= least) for each in active])


def _by_time(taken: Sequence[tuple[Chunk, Integers]]) -> Iterator[Item]:
    parts = [chunk for chunk, _ in taken if len(chunk)]
    order = np.argsort(np.concatenate([times for _, times in taken]), kind="stable")
    columns = [part for part in parts if isinstance(part, RecordColumns)]
    if len(columns) == len(parts):
        yield columns[0] if len(parts) == 1 else in_one(columns, order)
        return
    records: list[Recorded] = []
    for part in parts:
        records += part.records() if isinstance(part, RecordColumns) else part
    yield from map(records.__getitem__, order.tolist())
