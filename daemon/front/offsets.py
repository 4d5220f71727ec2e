"""Which input offsets may be committed: those below every record not yet covered by an acknowledged answer.

The front numbers each record it passes on. Each answer carries its session's low watermark: records numbered
below it are in closed bars or dropped. Once the answer is acknowledged, those records are done. Records of
one stream (a topic's partition) may belong to several sessions, so a stream's position is the least offset
any session still waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

Stream = tuple[str, int]
"""(topic, partition)."""


class OffsetRange(NamedTuple):
    """Offsets ``first`` to ``last`` (both included) of one stream."""

    topic: str
    partition: int
    first: int
    last: int


class OffsetTracker:
    """Outstanding records by session, next offsets by stream. One thread."""

    def __init__(self) -> None:
        self._outstanding: dict[str, deque[tuple[int, Stream, int]]] = {}
        self._next: dict[Stream, int] = {}
        self._committed: dict[Stream, int] = {}

    def passed_on(self, session: str, number: int, stream: Stream, offset: int) -> None:
        """A record went to the engine as running number ``number``."""
        self._outstanding.setdefault(session, deque()).append((number, stream, offset))
        self._next[stream] = offset + 1

    def repeats(self, stream: Stream, offset: int) -> bool:
        """Whether this offset was seen before: the source went back, as after a reconnect or a rebalance."""
        return offset < self._next.get(stream, 0)

    def skipped(self, stream: Stream, offset: int) -> None:
        """Note a record that ended here (malformed, unknown symbol): no answer will cover it."""
        self._next[stream] = offset + 1

    def ranges(self, session: str, first: int, last: int) -> list[OffsetRange]:
        """Offsets, by stream, of the session's outstanding records ``first`` to ``last``."""
        found: dict[Stream, OffsetRange] = {}
        for number, stream, offset in self._outstanding.get(session, ()):
            if number > last:
                break
            if number >= first:
                low = found[stream].first if stream in found else offset
                found[stream] = OffsetRange(*stream, min(low, offset), offset)
        return list(found.values())

    def acknowledge(self, session: str, low_watermark: int) -> None:
        """Mark ``session``'s records numbered below ``low_watermark`` as covered by acknowledged answers."""
        outstanding = self._outstanding.get(session)
        while outstanding and outstanding[0][0] < low_watermark:
            outstanding.popleft()

    def forget(self, session: str) -> None:
        """``session`` is gone: no answer will cover its records."""
        self._outstanding.pop(session, None)

    def to_commit(self) -> dict[Stream, int]:
        """Next offset to read by stream, where it moved since the last call."""
        positions = dict(self._next)
        for outstanding in self._outstanding.values():
            seen: set[Stream] = set()
            for _, stream, offset in outstanding:
                if stream not in seen:
                    positions[stream] = min(positions[stream], offset)
                    seen.add(stream)
                    if len(seen) == len(positions):
                        break
        moved = {s: offset for s, offset in positions.items() if self._committed.get(s) != offset}
        self._committed.update(moved)
        return moved

    def not_committed(self, offsets: Mapping[Stream, int]) -> None:
        """Note that committing ``offsets`` failed: the next `to_commit` returns them again."""
        for stream in offsets:
            self._committed.pop(stream, None)

    def outstanding(self) -> int:
        """Number of records that no acknowledged answer covers yet."""
        return sum(len(records) for records in self._outstanding.values())

    def clear(self) -> None:
        """Forget everything: the source will be read again from the committed offsets."""
        self._outstanding.clear()
        self._next.clear()
        self._committed.clear()
