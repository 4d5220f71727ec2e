"""Where sessions stand, for whoever goes on from there: numbers answers, and keeps what is acknowledged.

An epoch is the life of one engine. Answers of a session are numbered in the order of publishing; the numbers
go on behind the newest acknowledged answer when an engine starts, so that a reader finds no gap. What is
acknowledged is stored by the source, as a record of each session with the offsets, and in a file where a
source keeps no offsets.

A daemon's records have names of its own, so that one that wakes up late overwrites nothing; of several
records of a session the furthest counts. The record without a session tells of the engine, which may have
published answers that are not acknowledged.
"""

import asyncio
import logging
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from daemon.api.events import positions_of
from daemon.progress import (
    Opened,
    Progress,
    StoredProgress,
    WindowStart,
    covers,
    decode_stored,
    encode_stored,
    furthest,
    order,
    session_of,
    stored_name,
)
from feeds.decoding import Undecodable, decoded
from feeds.source import CommitPoint, Partition
from ingest.record import LowWatermarks
from metrics.store import MetricStore
from support.durable_file import remove_abandoned, replacing

log = logging.getLogger(__name__)

FILE = "progress"
_MAX_FILE_BYTES = 1 << 22
_CRC_BYTES = 4
_FORMER = b"foretick1:"
"""How the file of release 0.1.0 begins."""
_UNKNOWN = WindowStart()
_decode_file = msgspec.msgpack.Decoder(dict[str, bytes]).decode


@dataclass
class _Session:
    """``progress``: acknowledged. ``newest``: number of the newest published answer.

    ``stored``: what a restart of the daemon would go on from.
    ``beyond``: numbers above ``progress.sequence`` that are acknowledged, behind one that is not.
    ``history``: the progress before this engine. ``again``: not known, because the past was asked for.
    """

    progress: Progress = field(default_factory=Progress)
    stored: Progress = field(default_factory=Progress)
    newest: int = 0
    beyond: set[int] = field(default_factory=set)
    history: Progress = field(default_factory=Progress)
    again: bool = False

    def go_on(self, progress: Progress | None = None) -> None:
        """The next engine goes on from here, or from this ``progress``."""
        self.progress = self.progress if progress is None else progress
        self.newest, self.history = self.progress.sequence, Progress() if self.again else self.progress
        self.beyond.clear()

    def take_over(self, progress: Progress) -> None:
        """This is stored, of answers that are not known here."""
        self.again = False
        self.go_on(progress)

    def note_stored(self, progress: Progress) -> None:
        """A restart would go on from this, unless from more."""
        self.stored = max(self.stored, progress, key=order)

    def start(self, *, again: bool) -> None:
        """Another engine starts."""
        self.again = again
        if again:
            self.history = Progress()
            self.progress = msgspec.structs.replace(self.progress, signals=b"")

    def number(self) -> int:
        """The number of the answer that is published next."""
        self.newest += 1
        return self.newest

    def acknowledge(self, progress: Progress, sequences: Sequence[int]) -> None:
        """``progress``, and answers with these numbers, are acknowledged."""
        self.beyond.update(sequences)
        newest = progress.sequence
        while newest + 1 in self.beyond:
            newest += 1
            self.beyond.discard(newest)
        self.progress = msgspec.structs.replace(progress, sequence=newest)


class ProgressStore:
    """The progress of all sessions. ``directory``: of the file, None without one. One thread.

    ``address``: where other daemons of the group send requests about the sessions of this one.
    ``newest_event()``: id of the newest event that this daemon has published. ``opened``: sessions that
    patterns have opened, by name.
    """

    def __init__(
        self,
        store: MetricStore,
        directory: Path | None = None,
        address: str = "",
        newest_event: Callable[[], str] = lambda: "",
        opened: Mapping[str, Opened] = MappingProxyType({}),
    ) -> None:
        self._opened = opened
        self._seen_opened: dict[str, tuple[Opened, Progress]] = {}
        self._store, self._directory, self.address = store, directory, address
        self._newest_event = newest_event
        self._events: dict[str, int] = {}
        """Numbers of the newest events that were stored, by the start of their daemon."""
        self.epoch = 0
        """Of what is answered here. No owner before had it in any of our partitions: see `promote`."""
        self._claimed = 0
        """The next one, once it is stored everywhere."""
        self._seen = 0
        """The newest that anybody stored, as of the start."""
        self._sessions: dict[str, _Session] = {}
        self._writer = secrets.token_hex(4)
        self._records: dict[str, tuple[tuple[object, ...] | None, bytes]] = {}
        """By session, what its record was made of, and the record."""
        self._noted: dict[str, bytes] = {}
        """Records that were stored last, by name."""
        self._saved = b""
        self._told: dict[str, Progress] = {}
        """What the engine knows to be stored."""
        self.load()

    def serve_at(self, endpoint: str) -> None:
        """The query socket is bound here; an address that was given, and one of all interfaces, say more."""
        if not (self.address or "//0.0.0.0:" in endpoint or "//[::]:" in endpoint):
            self.address = endpoint

    def newest_event(self, start: str) -> int | None:
        """Number of the newest event of a start of a daemon, as it was stored last."""
        return self._events.get(start)

    # What was stored.

    @property
    def opened(self) -> Mapping[str, tuple[Opened, Progress]]:
        """Sessions that a pattern has opened, here or in another daemon, and where they stood last."""
        return self._seen_opened

    def read(self, points: Mapping[Partition, CommitPoint]) -> None:
        """Go on from what was stored with offsets; of a session's records the furthest counts.

        A record that is not ours is counted and skipped.
        """
        for point in points.values():
            self._read(point.state)

    def _read(self, state: Mapping[str, bytes]) -> None:
        for name, stored in self._decoded(state, counted=True):
            self._seen = max(self._seen, stored.epoch)
            if not name:
                continue
            known = self._session(name)
            if order(stored.progress) > order(known.progress):
                known.take_over(stored.progress)
            known.note_stored(stored.progress)

    def _decoded(
        self, state: Mapping[str, bytes], *, counted: bool = False
    ) -> list[tuple[str, StoredProgress]]:
        """By session, "" of the engine; several of one where several daemons have written."""
        found = []
        for name, record in state.items():
            try:
                stored, session = decode_stored(record), session_of(name)
                found.append((session, stored))
                if stored.opened is not None:
                    _, known = self._seen_opened.get(session, (None, stored.progress))
                    self._seen_opened[session] = stored.opened, max(known, stored.progress, key=order)
                for start, number in (positions_of(stored.event) or {}).items():
                    self._events[start] = max(number, self._events.get(start, 0))
            except Undecodable as error:
                if counted:
                    self._store.inc("foretick_recovery_progress_refused_total")
                    log.warning("progress stored as %s is not used: %s", name, error)
        return found

    def stored(self, points: Iterable[CommitPoint]) -> None:
        """These points, with what `describe` gave, are stored."""
        for point in points:
            news = {name: each for name, each in point.state.items() if self._noted.get(name) is not each}
            self._noted |= news
            for name, stored in self._decoded(news):
                if name:
                    self._session(name).note_stored(stored.progress)

    def news_of_stored(self, *, engine_is_new: bool = False) -> dict[str, Progress]:
        """By session, what is stored and was not returned since the engine was new."""
        if engine_is_new:
            self._told.clear()
        unknown = Progress()
        news = {
            name: each.stored
            for name, each in self._sessions.items()
            if each.stored != self._told.get(name, unknown)
        }
        self._told.update(news)
        return news

    def promote(self, points: Mapping[Partition, CommitPoint]) -> set[str]:
        """Like `read`, while an engine runs; returns the sessions that others have answered meanwhile.

        Another epoch begins if there are any, and unless ours is newer than theirs: they may have published
        more than they stored.
        Records have it at once, and answers from `begin_epoch` on, for which all our partitions must have it.
        """
        before = {name: each.progress for name, each in self._sessions.items()}
        others = [each for point in points.values() for each in self._decoded(self._others(point))]
        theirs = max((stored.epoch for _, stored in others), default=-1)
        self.read(points)
        changed = {name for name, each in self._sessions.items() if each.progress != before.get(name)}
        self._claimed = max(self._claimed, theirs + 1, self.epoch + bool(changed))
        return changed

    def _others(self, point: CommitPoint) -> dict[str, bytes]:
        """The records that are not ours."""
        ours = f"{self._writer}/"
        return {name: value for name, value in point.state.items() if not name.startswith(ours)}

    def claim(self, point: CommitPoint) -> CommitPoint:
        """The point, which somebody has stored, with our next epoch."""
        return point._replace(state={**point.state, **self.describe(())})

    def begin_epoch(self) -> None:
        """The next epoch is stored in all our partitions."""
        self.epoch = self._claimed

    def take_back(self, names: Iterable[str]) -> None:
        """What is not stored of these sessions' progress is void: it is made again, in the next epoch."""
        self._claimed = max(self._claimed, self.epoch + 1)
        for name in names:
            known = self._session(name)
            known.go_on(known.stored)

    def is_behind(self, point: CommitPoint) -> bool:
        """Whether another daemon has claimed this since we did: its epoch is newer then."""
        return any(stored.epoch >= self.epoch for _, stored in self._decoded(self._others(point)))

    def owners(self, points: Iterable[CommitPoint]) -> dict[str, str]:
        """By session, the address of another daemon that wrote its record; empty if that told none.

        Our own records stay until the new owner of their partition has written its first ones.
        """
        found: dict[str, StoredProgress] = {}
        for point in points:
            for name, stored in self._decoded(point.state):
                known = found.get(name)
                if stored.owner and stored.owner == self.address:
                    continue
                if name and (known is None or order(stored.progress) > order(known.progress)):
                    found[name] = stored
        return {name: stored.owner for name, stored in found.items()}

    def readers(self, point: CommitPoint) -> frozenset[str]:
        """Sessions whose records were read with a point."""
        return frozenset(filter(None, map(session_of, point.state)))

    def load(self) -> None:
        """Go on from the file, if there is one."""
        if self._directory is None:
            return
        remove_abandoned(self._directory, FILE)
        try:
            with (self._directory / FILE).open("rb") as file:
                data = file.read(_MAX_FILE_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            self._store.inc("foretick_recovery_progress_refused_total")
            log.warning("the progress of earlier sessions cannot be read: %s", error)
            return
        try:
            if data.startswith(_FORMER):
                raise Undecodable("release 0.1.0 wrote it; numbers of answers begin again", readable=False)
            if zlib.crc32(data[_CRC_BYTES:]).to_bytes(_CRC_BYTES) != data[:_CRC_BYTES]:
                raise Undecodable("the checksum does not match", readable=False)
            self._read(decoded(_decode_file, data[_CRC_BYTES:]))
        except Undecodable as error:
            self._store.inc("foretick_recovery_progress_refused_total")
            log.warning("the progress of earlier sessions is not used: %s", error)

    async def save(self) -> bool:
        """Write the file, if something changed: whole, or not at all; False where that failed."""
        if self._directory is None:
            return True
        packed = msgspec.msgpack.encode(self.describe(self._sessions))
        data = zlib.crc32(packed).to_bytes(_CRC_BYTES) + packed
        if data != self._saved:
            await asyncio.to_thread(self._write, self._directory, data)
        return data == self._saved

    def _write(self, directory: Path, data: bytes) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with replacing(directory / FILE) as file:
                file.write(data)
        except OSError as error:
            self._store.inc("foretick_recovery_progress_failed_total")
            log.warning("the progress of sessions cannot be written, trying again: %s", error)
        else:
            self._saved = data

    def describe(self, sessions: Iterable[str]) -> dict[str, bytes]:
        """The records of these sessions and of the engine, by name."""
        known = {"": Progress()} | {name: self._session(name).progress for name in sorted(sessions)}
        return {stored_name(self._writer, name): self._record(name, each) for name, each in known.items()}

    def _record(self, name: str, progress: Progress) -> bytes:
        """Encoded again only where something of it is new: a checkpoint looks through all sessions."""
        event, opened = "" if name else self._newest_event(), self._opened.get(name)
        stored = progress, self._claimed, self.address, event, opened
        before, record = self._records.get(name, (None, b""))
        if before != stored:
            record = encode_stored(StoredProgress(*stored))
            self._records[name] = stored, record
        return record

    # An engine's life.

    def start(self, names: Iterable[str], *, again: bool = False) -> dict[str, Progress]:
        """Another engine starts: its epoch, and what each session goes on from.

        ``again``: the past was asked for, so that its bars are answered again.
        """
        self.epoch = self._claimed = max(self._claimed, self._seen) + 1
        found = {}
        for name in names:
            session = self._session(name)
            session.start(again=again)
            closed = () if again else session.progress.closed
            written = () if again else session.progress.written
            found[name] = msgspec.structs.replace(
                session.progress, epoch=self.epoch, closed=closed, written=written
            )
        return found

    def go_on(self) -> None:
        """Nothing of an earlier engine can be acknowledged any more."""
        for session in self._sessions.values():
            session.go_on()

    def added(self, name: str) -> Progress:
        """A session begins, perhaps again: its window is empty, and its numbers go on."""
        return msgspec.structs.replace(self._session(name).progress, epoch=self.epoch, closed=(), written=())

    def resumed(self, name: str) -> Progress:
        """A session goes on from what another daemon has acknowledged."""
        session = self._session(name)
        session.go_on()
        return msgspec.structs.replace(session.progress, epoch=self.epoch)

    def removed(self, name: str, version: int) -> None:
        """A session has ended with ``version``; what it published is still delivered."""
        session = self._session(name)
        newest = max(session.newest, session.progress.sequence)
        session.go_on(Progress(self.epoch, version, newest))

    # Its answers.

    def number(self, session: str) -> int:
        """The number of the answer that is published next."""
        return self._session(session).number()

    def acknowledge(
        self,
        session: str,
        version: int,
        sequences: Sequence[int],
        closed: tuple[int, ...],
        window: WindowStart = _UNKNOWN,
        written: LowWatermarks = (),
        signals: bytes | None = None,
    ) -> None:
        """Answers of ``version``, with these numbers, and all versions before it are acknowledged.

        ``window``: of that version. Where it is not known, it begins nowhere before the last one that was.
        ``signals``: as in `Progress`; None where that version says nothing about them.
        """
        known = self._session(session)
        before = known.progress
        window = before.window if window == _UNKNOWN else window
        closed, written = _furthest(before.closed, closed), furthest(before.written, written)
        signals = before.signals if signals is None else signals
        progress = Progress(self.epoch, version, before.sequence, closed, window, written, signals)
        known.acknowledge(progress, sequences)

    def is_history(self, session: str, closed: tuple[int, ...], written: LowWatermarks = ()) -> bool:
        """Whether an earlier engine's answers covered bars with these openings, by the session's symbols."""
        return covers(self._session(session).history, closed, written)

    def knows_history(self, session: str) -> bool:
        """Whether it is known up to which bars earlier engines answered."""
        return bool(self._session(session).history.closed)

    def of(self, session: str) -> Progress:
        """How far the session's answers are acknowledged."""
        return self._session(session).progress

    def _session(self, name: str) -> _Session:
        known = self._sessions.get(name)
        return known if known is not None else self._sessions.setdefault(name, _Session())


def _furthest(known: tuple[int, ...], closed: tuple[int, ...]) -> tuple[int, ...]:
    """The newest bars: a version that was made before a take-over tells of older ones."""
    return tuple(map(max, known, closed)) if len(known) == len(closed) else closed or known
