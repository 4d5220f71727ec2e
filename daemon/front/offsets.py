"""Which input offsets may be committed: those below every record not yet covered by an acknowledged answer.

The front numbers each record it passes on. Each answer carries its session's low watermark: records numbered
below it are in closed bars or dropped. Once the answer is acknowledged, those records are done. Records of
one stream (a topic's partition) may belong to several sessions, so a stream's position is the least offset
any session still waits for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Stream = tuple[str, int]
"""(topic, partition)."""


class OffsetRange(NamedTuple):
    """Offsets ``first`` to ``last`` (both included) of one stream."""

    topic: str
    partition: int
    first: int
    last: int


@dataclass
class _Run:
    """Records of one session that came from one stream one after the other; the first ``done`` are covered.

    Both lists ascend.
    """

    stream: Stream
    numbers: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    done: int = 0


_LONGEST = 4096
"""Records of a run, so that covered ones leave memory."""


class OffsetTracker:
    """Outstanding records by session, next offsets by stream. One thread."""

    def __init__(self) -> None:
        self._outstanding: dict[str, deque[_Run]] = {}
        self._next: dict[Stream, int] = {}
        self._committed: dict[Stream, int] = {}

    def passed_on(self, session: str, number: int, stream: Stream, offset: int) -> None:
        """A record went to the engine as running number ``number``."""
        self.all_passed_on(session, (number,), stream, (offset,))

    def all_passed_on(
        self, session: str, numbers: Sequence[int], stream: Stream, offsets: Sequence[int]
    ) -> None:
        """Records went to the engine; their running numbers and offsets ascend."""
        runs = self._outstanding.setdefault(session, deque())
        if not runs or runs[-1].stream != stream or len(runs[-1].numbers) >= _LONGEST:
            runs.append(_Run(stream))
        runs[-1].numbers.extend(numbers)
        runs[-1].offsets.extend(offsets)
        self.skipped(stream, offsets[-1])

    def repeats(self, stream: Stream, offset: int) -> bool:
        """Whether this offset was seen before: the source went back, as after a reconnect or a rebalance."""
        return offset < self.next_offset(stream)

    def next_offset(self, stream: Stream) -> int:
        """One more than the newest offset seen; 0 without any."""
        return self._next.get(stream, 0)

    def skipped(self, stream: Stream, offset: int) -> None:
        """Note a record that ended here (malformed, unknown symbol): no answer will cover it."""
        self._next[stream] = offset + 1

    def ranges(self, session: str, first: int, last: int) -> list[OffsetRange]:
        """Offsets, by stream, of the session's outstanding records ``first`` to ``last``."""
        found: dict[Stream, OffsetRange] = {}
        for run in self._outstanding.get(session, ()):
            if run.numbers[run.done] > last:
                break
            begin = bisect_left(run.numbers, first, run.done)
            end = bisect_right(run.numbers, last, begin)
            if begin < end:
                stream, low = run.stream, run.offsets[begin]
                if stream in found:
                    low = min(low, found[stream].first)
                found[stream] = OffsetRange(*stream, low, run.offsets[end - 1])
        return list(found.values())

    def acknowledge(self, session: str, low_watermark: int) -> None:
        """Mark ``session``'s records numbered below ``low_watermark`` as covered by acknowledged answers."""
        runs = self._outstanding.get(session)
        while runs:
            runs[0].done = bisect_left(runs[0].numbers, low_watermark, runs[0].done)
            if runs[0].done < len(runs[0].numbers):
                return
            runs.popleft()

    def forget(self, session: str) -> None:
        """``session`` is gone: no answer will cover its records."""
        self._outstanding.pop(session, None)

    def to_commit(self) -> dict[Stream, int]:
        """Next offset to read by stream, where it moved since the last call."""
        positions = dict(self._next)
        for runs in self._outstanding.values():
            for run in runs:
                positions[run.stream] = min(positions[run.stream], run.offsets[run.done])
        moved = {s: offset for s, offset in positions.items() if self._committed.get(s) != offset}
        self._committed.update(moved)
        return moved

    def not_committed(self, offsets: Mapping[Stream, int]) -> None:
        """Note that committing ``offsets`` failed: the next `to_commit` returns them again."""
        for stream in offsets:
            self._committed.pop(stream, None)

    def outstanding(self) -> int:
        """Number of records that no acknowledged answer covers yet."""
        return sum(len(run.numbers) - run.done for runs in self._outstanding.values() for run in runs)

    def clear(self) -> None:
        """Forget everything: the source will be read again from the committed offsets."""
        self._outstanding.clear()
        self._next.clear()
        self._committed.clear()
