"""Which input offsets may be committed: those below every record not yet covered by an acknowledged answer.

Each answer carries its session's low watermarks, one offset for each stream (a topic's partition): records
below it are in closed bars or dropped. Once the answer is acknowledged, those records are done. One that has
a DLQ record waits for that, too. Records of one stream may belong to several sessions, so a stream's position
is the least offset any session, or a record, still waits for. With each position go records, which tell where
its sessions stand.

A source goes on before the committed offset, to fill the windows. What was committed is history: it was
answered for, and is neither outstanding nor committed again. Where it was asked for, it is answered again,
and the committed offset stays until it is reached, also by the next engine.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial

from feeds.source import CommitPoint

Stream = tuple[str, int]
"""(topic, partition)."""


class OffsetTracker:
    """Outstanding records by session, next offsets by stream. One thread.

    ``describe``: the records that are stored with a position of a stream that these sessions read.
    ``source``: the name of theirs in ranges.
    """

    def __init__(
        self, describe: Callable[[Iterable[str]], Mapping[str, bytes]] = lambda sessions: {}, source: str = ""
    ) -> None:
        self._describe, self.source = describe, source
        self._outstanding: dict[Stream, dict[str, tuple[int, int]]] = {}
        """The first and the last offset that each session waits for; what is between is taken to be its."""
        self._next: dict[Stream, int] = {}
        self._committed: dict[Stream, CommitPoint] = {}
        self._stored: dict[Stream, int] = {}
        """Offsets that were committed before this engine, and are not answered again."""
        self._floor: dict[Stream, int] = {}
        """Offsets that were committed before this engine."""
        self._readers: dict[Stream, set[str]] = {}
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

    def is_ours(self, stream: Stream) -> bool:
        """Whether no other daemon commits this stream's offsets, as far as is known."""
        return stream not in self._followed

    def leave(self, stream: Stream) -> None:
        """Another commits this stream's offsets, until `begin`."""
        self._followed.add(stream)
        self._committed.pop(stream, None)
        self._asked.pop(stream, None)
        self._stored[stream] = max(self._stored.get(stream, 0), self._floor.get(stream, 0))

    def passed_on(self, session: str, stream: Stream, offsets: Sequence[int]) -> None:
        """Records went to the engine; their offsets ascend."""
        self._readers.setdefault(stream, set()).add(session)
        self._sources[session] = stream
        new = bisect_left(offsets, self._stored.get(stream, 0))
        if new < len(offsets):
            waiting = self._outstanding.setdefault(stream, {})
            first, _ = waiting.get(session, (offsets[new], 0))
            waiting[session] = min(first, offsets[new]), offsets[-1]
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

    def reads(self, session: str, streams: Collection[Stream]) -> bool:
        """Whether records of the session came from any of these streams."""
        return any(session in self._readers.get(stream, ()) for stream in streams)

    def source_of(self, session: str) -> Stream | None:
        """Where the session's newest record came from; None before the first one."""
        return self._sources.get(session)

    def read_from(self, stream: Stream) -> Set[str]:
        """The sessions whose newest record came from there."""
        return {session for session, source in self._sources.items() if source == stream}

    def acknowledge(self, session: str, stream: Stream, low_watermark: int) -> None:
        """Acknowledged answers cover ``session``'s records of the stream below this offset."""
        waiting = self._outstanding.get(stream, {})
        if session in waiting:
            first, last = waiting[session]
            if low_watermark > last:
                del waiting[session]
            else:
                waiting[session] = max(first, low_watermark), last

    def forget(self, session: str) -> None:
        """``session`` is gone: no answer will cover its records."""
        self._sources.pop(session, None)
        for waiting in self._outstanding.values():
            waiting.pop(session, None)
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
        for stream, waiting in self._outstanding.items():
            if waiting and stream in positions:  # otherwise it is read again
                positions[stream] = min(positions[stream], *(first for first, _ in waiting.values()))
        for stream, held in self._held.items():
            if held and stream in positions:
                positions[stream] = min(positions[stream], *held)
        return positions

    def not_committed(self, streams: Iterable[Stream]) -> None:
        """Note that committing these failed: the next `to_commit` returns them again."""
        for stream in streams:
            self._committed.pop(stream, None)

    def outstanding(self) -> int:
        """Number of offsets, of all sessions, that no acknowledged answer covers yet."""
        return sum(last - first + 1 for each in self._outstanding.values() for first, last in each.values())

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
        self._sources.clear()
        self._followed.clear()
