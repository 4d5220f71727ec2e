"""Which input offsets may be committed: those below every record not yet covered by an acknowledged answer.

The gateway numbers each record it passes on. Each answer carries its session's low watermark: records
numbered below it are in closed bars or dropped. Once the answer is acknowledged, those records are done. One
that has a DLQ record waits for that, too. Records of one stream (a topic's partition) may belong to several
sessions, so a stream's position is the least offset any session, or a record, still waits for. With each
position go records, which tell where its sessions stand.

A source goes on before the committed offset, to fill the windows. What was committed is history: it was
answered for, and is neither outstanding nor committed again. Where it was asked for, it is answered again,
and the committed offset stays until it is reached, also by the next engine.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from feeds.market_data import InputRange
from feeds.source import CommitPoint

Stream = tuple[str, int]
"""(topic, partition)."""


@dataclass
class _Run:
    """Records of one session that came from one stream one after the other; the first ``done`` are covered.

    Both lists ascend.
    """

    stream: Stream
    numbers: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    done: int = 0

    def cover(self, low_watermark: int) -> bool:
        """Records numbered below this are covered; returns whether all are."""
        self.done = bisect_left(self.numbers, low_watermark, self.done)
        return self.done == len(self.numbers)


_LONGEST = 4096
"""Records of a run, so that covered ones leave memory."""


class OffsetTracker:
    """Outstanding records by session, next offsets by stream. One thread.

    ``describe``: the records that are stored with a position of a stream that these sessions read.
    ``source``: which ranges name.
    """

    def __init__(
        self, describe: Callable[[Iterable[str]], Mapping[str, bytes]] = lambda sessions: {}, source: str = ""
    ) -> None:
        self._describe, self.source = describe, source
        self._outstanding: dict[str, deque[_Run]] = {}
        self._next: dict[Stream, int] = {}
        self._committed: dict[Stream, CommitPoint] = {}
        self._stored: dict[Stream, int] = {}
        """Offsets that were committed before this engine, and are not answered again."""
        self._floor: dict[Stream, int] = {}
        """Offsets that were committed before this engine."""
        self._readers: dict[Stream, set[str]] = {}
        self._history: dict[str, int] = {}
        """Running number of each session's newest record below a committed offset."""
        self._followed: set[Stream] = set()
        """Streams whose offsets are another's to commit."""
        self._sources: dict[str, Stream] = {}
        """Where a session's newest record came from."""
        self._held: dict[Stream, list[int]] = {}
        """Offsets of records whose DLQ records are not acknowledged."""
        self._asked: dict[Stream, int] = {}
        """Where streams stood in a past that was asked for, when `clear` was called."""

    def begin(
        self, stream: Stream, start: int, stored: int, sessions: Iterable[str] = (), *, again: bool = False
    ) -> None:
        """A stream is read from ``start``; ``stored``: its committed offset. ``sessions`` read it earlier.

        ``again``: what is below the committed offset was asked for, and is answered again.
        """
        self._next[stream] = max(self.next_offset(stream), start)
        self._floor[stream], self._stored[stream] = stored, self._asked.pop(stream, 0) if again else stored
        self._followed.discard(stream)
        self._readers.setdefault(stream, set()).update(sessions)

    def follow(self, stream: Stream, stored: int, sessions: Iterable[str]) -> None:
        """Another commits this stream's offsets, and we read what is below ``stored``, until `begin`."""
        self._stored[stream] = stored
        self._readers.setdefault(stream, set()).update(sessions)
        self._followed.add(stream)

    def rewind(self, stream: Stream) -> None:
        """The stream is read again from wherever `begin` says, for sessions that are reset."""
        for known in (self._next, self._stored, self._floor, self._readers, self._committed, self._asked):
            known.pop(stream, None)
        self._held.pop(stream, None)

    def leave(self, stream: Stream) -> None:
        """Another commits this stream's offsets, until `begin`."""
        self._followed.add(stream)
        self._committed.pop(stream, None)
        self._asked.pop(stream, None)
        self._stored[stream] = max(self._stored.get(stream, 0), self._floor.get(stream, 0))

    def passed_on(self, session: str, number: int, stream: Stream, offset: int) -> None:
        """A record went to the engine as running number ``number``."""
        self.all_passed_on(session, (number,), stream, (offset,))

    def all_passed_on(
        self, session: str, numbers: Sequence[int], stream: Stream, offsets: Sequence[int]
    ) -> None:
        """Records went to the engine; their running numbers and offsets ascend."""
        self._readers.setdefault(stream, set()).add(session)
        self._sources[session] = stream
        stored = self._stored.get(stream, 0)
        if offsets[0] < stored:
            old = bisect_left(offsets, stored)
            self._history[session] = numbers[old - 1]
            self.skipped(stream, offsets[old - 1])
            numbers, offsets = numbers[old:], offsets[old:]
            if not offsets:
                return
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

    def hold(self, stream: Stream, offset: int) -> Callable[[], None]:
        """A record has a DLQ record; it is outstanding until the returned function is called.

        After `rewind` or `clear` that does nothing: the record is read again, and has another record.
        """
        held = self._held.setdefault(stream, [])
        held.append(offset)
        return partial(held.remove, offset)

    def reached(self, stream: Stream, read: int, position: int) -> None:
        """Nothing else is to be read below ``position``, once what is below ``read`` was passed on."""
        if self._next.get(stream) == read:
            self._next[stream] = position

    def is_stored(self, stream: Stream, offset: int) -> bool:
        """Whether a record was answered for before this engine started."""
        return offset < self._stored.get(stream, 0)

    def is_history(self, session: str, number: int) -> bool:
        """Whether all of a session's records up to running number ``number`` were answered for before.

        Not known of number 0: an earlier engine took those, and may have ended before it answered.
        """
        return 0 < number <= self._history.get(session, 0) and not self.waits(session, number)

    def reads(self, session: str, streams: Collection[Stream]) -> bool:
        """Whether records of the session came from any of these streams."""
        return any(session in self._readers.get(stream, ()) for stream in streams)

    def source_of(self, session: str) -> Stream | None:
        """Where the session's newest record came from; None before the first one."""
        return self._sources.get(session)

    def read_from(self, stream: Stream) -> Set[str]:
        """The sessions whose newest record came from there."""
        return {session for session, source in self._sources.items() if source == stream}

    def waits(self, session: str, number: int) -> bool:
        """Whether a record of the session up to running number ``number`` is outstanding."""
        runs = self._outstanding.get(session)
        return runs is not None and len(runs) > 0 and runs[0].numbers[runs[0].done] <= number

    def ranges(self, session: str, first: int, last: int) -> list[InputRange]:
        """Offsets, by stream, of the session's outstanding records ``first`` to ``last``."""
        found: dict[Stream, InputRange] = {}
        for run in self._outstanding.get(session, ()):
            if run.numbers[run.done] > last:
                break
            begin = bisect_left(run.numbers, first, run.done)
            end = bisect_right(run.numbers, last, begin)
            if begin < end:
                stream, low = run.stream, run.offsets[begin]
                if stream in found:
                    low = min(low, found[stream].first_offset)
                found[stream] = InputRange(*stream, low, run.offsets[end - 1], self.source)
        return list(found.values())

    def acknowledge(self, session: str, low_watermark: int) -> None:
        """Mark ``session``'s records numbered below ``low_watermark`` as covered by acknowledged answers."""
        runs = self._outstanding.get(session)
        while runs:
            if not runs[0].cover(low_watermark):
                return
            runs.popleft()

    def forget(self, session: str) -> None:
        """``session`` is gone: no answer will cover its records."""
        self._outstanding.pop(session, None)
        self._history.pop(session, None)
        self._sources.pop(session, None)
        for readers in self._readers.values():
            readers.discard(session)

    def to_commit(self) -> dict[Stream, CommitPoint]:
        """Next offset to read and its records by stream, where one of them changed since the last call.

        No committed offset is taken back: until a stream has reached it again, it is left out.
        """
        points = {
            stream: CommitPoint(offset, self._describe(self._readers.get(stream, ())))
            for stream, offset in self._positions().items()
            if offset >= self._floor.get(stream, 0)
        }
        moved = {stream: point for stream, point in points.items() if self._committed.get(stream) != point}
        self._committed.update(moved)
        return moved

    def asked_for(self) -> dict[Stream, int]:
        """Where streams stand that are below their committed offset, in a past that was asked for."""
        found = {
            stream: offset
            for stream, offset in self._positions().items()
            if max(offset, self._stored.get(stream, 0)) < self._floor.get(stream, 0)
        }
        return self._asked | found

    def _positions(self) -> dict[Stream, int]:
        positions = {
            s: max(offset, self._stored.get(s, 0))
            for s, offset in self._next.items()
            if s not in self._followed
        }
        for runs in self._outstanding.values():
            for run in runs:
                if run.stream in positions:  # otherwise it is read again
                    positions[run.stream] = min(positions[run.stream], run.offsets[run.done])
        for stream, held in self._held.items():
            if held and stream in positions:
                positions[stream] = min(positions[stream], *held)
        return positions

    def not_committed(self, streams: Iterable[Stream]) -> None:
        """Note that committing these failed: the next `to_commit` returns them again."""
        for stream in streams:
            self._committed.pop(stream, None)

    def outstanding(self) -> int:
        """Number of records that no acknowledged answer covers yet."""
        return sum(len(run.numbers) - run.done for runs in self._outstanding.values() for run in runs)

    def clear(self) -> None:
        """Forget all but what is `asked_for`: the source will be read again."""
        self._asked = self.asked_for()
        self._outstanding.clear()
        self._held.clear()
        self._next.clear()
        self._committed.clear()
        self._stored.clear()
        self._floor.clear()
        self._readers.clear()
        self._history.clear()
        self._sources.clear()
        self._followed.clear()
