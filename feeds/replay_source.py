"""A recorded file as a source: records take the same path as live ones, paced by their event times."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from feeds.backoff import Sleep
from feeds.codec import REPLAY, MalformedRecord, encode, make_headers
from feeds.columns.record_columns import ColumnBatch, RecordColumns
from feeds.file_format import FileFormat
from feeds.market_data import Recorded
from feeds.merged_files import Item, files_of
from feeds.recorded_file import Says, read_items
from feeds.source import YEAR_2100, CommitPoint, ConnectionState, Fault, Incoming, Kind, Partition

NAP_S = 0.2
"""Longest single sleep: stop and pause take effect within it."""


@dataclass
class _Bytes:
    """How many bytes all files have, and how far those that were opened are read."""

    total: int = 0
    _opened: list[tuple[BinaryIO, int]] = field(default_factory=list)

    def open(self, file: BinaryIO) -> None:
        """A file is read from now on."""
        self._opened.append((file, os.fstat(file.fileno()).st_size))

    @property
    def share(self) -> float:
        """What was read, 0 to 1."""
        read = sum(size if file.closed else file.tell() for file, size in self._opened)
        return min(1.0, read / max(1, self.total))


class ReplaySource:
    """Plays a file, or all of a folder or a pattern, at ``speed`` times real time; 0 does not wait.

    *Pausing*: the file waits.

    Every record is encoded again, so that it passes the same decoding and checks as a live one. A line that
    could not be used is a message with a fault. The topic is the file's name, the partition 0, the offset the
    record's number in the file (from 0); of several files: the path's name, and its number in the order in
    which they are played. ``day``: of times since midnight.
    """

    kind: Kind = "pausing"
    lost = 0

    def __init__(
        self,
        name: str,
        path: str | Path,
        form: FileFormat,
        speed: float = 1.0,
        *,
        from_ns: int | None = None,
        until_ns: int | None = None,
        day: date | None = None,
        max_records: int = 500,
        monotonic_s: Callable[[], float] = time.monotonic,
        clock_ns: Callable[[], int] = time.time_ns,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if speed < 0:
            raise ValueError(f"speed must not be negative, got {speed}")
        self.name = name
        self.state = ConnectionState.STOPPED
        self.malformed_reasons: Counter[str] = Counter()
        """Lines that could not be used, by reason."""
        self._faults: list[tuple[int, int, Incoming]] = []
        """A heap of messages that stand for such lines, by time and number."""
        self.first_malformed = ""
        """The first line that could not be used, and why."""
        self.notices: list[str] = []
        """What is worth saying of the whole file, such as its unused columns."""
        self.passed_over: Counter[str] = Counter()
        """Lines without a record, by the name that the format gives them."""
        self._bytes = _Bytes()
        self._path, self._day = Path(path), day
        self._form = form
        self._speed = speed
        self._from_ns, self._until_ns = from_ns, until_ns
        self._max_records = max_records
        self._monotonic_s = monotonic_s
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._running = asyncio.Event()
        self._running.set()
        self._origin: tuple[float, int] | None = None  # (monotonic s, event ns) of the same moment

    async def start(self) -> None:
        """Check that the files can be read. Raises OSError."""
        files = files_of(self._path, self._form.members)
        for path in files:
            with path.open("rb"):
                continue
        self._bytes.total = sum(path.stat().st_size for path in files)
        self.state = ConnectionState.UP

    async def batches(self) -> AsyncGenerator[Sequence[Incoming], None]:
        """Records as they fall due, up to ``max_records`` at a time, until the file ends or ``stop``.

        Without pace, columns come as they are.
        """
        batch: list[Incoming] = []
        items = self._items()
        # in a thread: a file that stands newest first is read to its end before its first record
        first = await asyncio.to_thread(next, items, None)
        for record in items if first is None else chain([first], items):
            if isinstance(record, RecordColumns):
                batch += self._faults_until(int(record.times[0]))
                if batch:
                    yield batch
                    batch = []
                async for columns in self._due_columns(record):
                    yield columns
                if self.state is not ConnectionState.UP:
                    return
                continue
            due_in = self._due_in_s(record.ts_event)
            if batch and (due_in > 0 or len(batch) >= self._max_records):
                yield batch
                batch = []
                await self._sleep(0)  # reading is synchronous: yield to the event loop
            if not await self._reach(record.ts_event):
                return
            batch += [*self._faults_until(record.ts_event), self._incoming(record)]
        batch += self._faults_until(YEAR_2100)
        if batch and self.state is ConnectionState.UP:
            yield batch

    async def _due_columns(self, columns: RecordColumns) -> AsyncGenerator[ColumnBatch, None]:
        """Columns as they fall due."""
        newest = np.maximum.accumulate(columns.times)
        start = 0
        while start < len(columns) and await self._reach(int(columns.times[start])):
            end = len(columns)
            if self._speed and self._origin is not None:
                began, first_ns = self._origin
                due = first_ns + int((self._monotonic_s() - began) * self._speed * 1e9)
                end = max(
                    start + 1, min(int(np.searchsorted(newest, due, "right")), start + self._max_records)
                )
            part = columns.part(slice(start, end))
            yield ColumnBatch((self._path.name, 0), part, self._clock_ns(), self._incoming)
            start = end
            await self._sleep(0)

    def pause(self) -> None:
        """Pause. What falls due meanwhile is played at once on ``resume``, like live data."""
        self._running.clear()

    def resume(self) -> None:
        """Continue."""
        self._running.set()

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Nothing to store: a replay always begins at its configured start."""

    async def stop(self) -> None:
        """End ``batches`` within ``NAP_S``."""
        self.state = ConnectionState.STOPPED
        self._running.set()

    @property
    def progress(self) -> float:
        """Share of the files that was read, 0 to 1, by their bytes on the disk."""
        return self._bytes.share

    def _items(self) -> Iterator[Item]:
        return read_items(
            self._path,
            self._form,
            Says(self._count_malformed, self._pass_over, self.notices.append, self._bytes.open),
            from_ns=self._from_ns,
            until_ns=self._until_ns,
            day=self._day,
            as_columns=True,
        )

    def _count_malformed(self, line: int, error: MalformedRecord) -> None:
        self.malformed_reasons[error.reason] += 1
        self.first_malformed = self.first_malformed or f"line {line}: {error}"
        moment = error.ts_event
        if moment and not (self._from_ns or 0) <= moment < (self._until_ns or moment + 1):
            return
        fault = Fault(error.reason, error.message, is_line=True, ts_event=moment)
        key = error.key.encode() or None
        stand_in = Incoming(self._path.name, 0, -1, key, b"", {}, self._clock_ns(), fault=fault)
        heappush(self._faults, (moment, self.malformed_lines, stand_in))

    @property
    def malformed_lines(self) -> int:
        """Lines that could not be used."""
        return self.malformed_reasons.total()

    def _faults_until(self, event_ns: int) -> Iterator[Incoming]:
        """The messages for unusable lines up to a time, oldest first; without a time they come at once."""
        while self._faults and self._faults[0][0] <= event_ns:
            yield heappop(self._faults)[2]

    def _pass_over(self, line: int, name: str) -> None:
        self.passed_over[name] += 1

    def _due_in_s(self, event_ns: int) -> float:
        """Seconds until a record of that event time is due; 0 or less means now."""
        if not self._speed:
            return 0.0
        now = self._monotonic_s()
        if self._origin is None:
            self._origin = (now, event_ns)
        began, first_ns = self._origin
        return began + (event_ns - first_ns) / 1e9 / self._speed - now

    async def _reach(self, event_ns: int) -> bool:
        """Wait until that event time is due and nothing is paused; False when the source was stopped."""
        while self.state is ConnectionState.UP:
            await self._running.wait()
            due_in = self._due_in_s(event_ns)
            if due_in <= 0:
                return self.state is ConnectionState.UP
            await self._sleep(min(due_in, NAP_S))
        return False

    def _incoming(self, record: Recorded) -> Incoming:
        return Incoming(
            self._path.name,
            0,
            record.seq - 1,
            record.key.encode(),
            encode(record),
            make_headers(record, "json", self.name, record.seq) | {REPLAY: b"1"},
            self._clock_ns(),
        )
