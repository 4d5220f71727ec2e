"""The daemon's source: read into the engine's ring; offsets are committed to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial

from daemon import protocol
from daemon.ages import VenueClock
from daemon.commit_metadata import StoredProgress
from daemon.config.fingerprint import window_settings
from daemon.config.schema import Config, SessionConfig
from daemon.config.symbols import numbered, routes
from daemon.gateway.checkpoint.commits import Transactions
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.record_decoder import Decoder, SequenceAllocator
from daemon.gateway.standby import Standby
from daemon.gateway.stream_names import Streams
from daemon.progress import Position, Progress
from daemon.supervision import Tasks
from feeds.market_data import DeadLetter
from feeds.source import (
    CatchesUp,
    CommitFailed,
    CommitPoint,
    ConnectionState,
    Lag,
    LogSource,
    Partition,
    PartitionedSource,
    Source,
    StandbySource,
    StartPosition,
)
from ingest.ring import Ring
from metrics.store import MetricStore

log = logging.getLogger(__name__)

COMMIT_EVERY_S = 1.0
CLOSE_COMMIT_S, REOPEN_COMMIT_S = 1.0, 10.0
"""How long a failing commit is retried before the source is closed."""
RETRY_S = 0.1
TELL_S = 0.5
"""How often the engine learns up to when the source was read."""
_NOTHING = Progress()
INGEST, COMMIT = "ingest", "commit loop"
Resume = Callable[[Collection[str]], Awaitable[Mapping[str, Mapping[str, Position]]]]
"""Resets sessions to their progress; returns where they read on, by session and symbol."""
BeginAnew = Callable[[Collection[str], Collection[str]], None]
"""Takes the sessions, and those that another daemon has answered."""


class SourceRunner:
    """At most one source. Without one there is nothing to connect, read or commit."""

    def __init__(
        self,
        config: Config,
        source: Source | None,
        tracker: OffsetTracker,
        store: MetricStore,
        dead_letter: Callable[[DeadLetter], None],
        tasks: Tasks,
        commit_every_s: float = COMMIT_EVERY_S,
        clocks: Mapping[str, VenueClock] | None = None,
        order: SequenceAllocator | None = None,
        progress: ProgressStore | None = None,
        send: Callable[[protocol.Command], None] = lambda command: None,
        standby: Standby | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._streams = streams or Streams()
        self.source, self.tracker = source, tracker
        self._standby = standby or Standby(store)
        self._positions: Mapping[str, Mapping[str, Position]] = {}
        self._progress = progress or ProgressStore(store)
        self._log = _log_of(source)
        if self._log is not None:
            self._log.set_rebalance_listener(self)
        self._stored: dict[Partition, CommitPoint] = {}
        self._mine: set[Partition] = set()
        self._elsewhere_answered: set[str] = set()
        """Sessions that another daemon has answered further than this engine knows, or may have."""
        self._unrestored: set[str] = set()
        """Sessions that came back from no snapshot, and were not read yet by a standby engine."""
        self.resume: Resume = _nothing
        self.reset_session: BeginAnew = lambda sessions, answered: None
        """Events still under way for these sessions are dropped until they are reset."""
        self.partitions_assigned: Callable[[Collection[str]], None] = lambda sessions: None
        """Tells the engine whose records are read from now on."""
        self.partitions_revoked: Callable[[Collection[str]], None] = lambda sessions: None
        """Tells the engine whose records another daemon reads from now on."""
        self._left: dict[Partition, set[str]] = {}
        """Sessions that partitions took with them, as this engine knows."""
        self.promote: Callable[[], Awaitable[None]] = _no_engine
        """Has the engine ask about bars behind the sessions' progress, which until then are history."""
        self._waiting = _standing_by(source) if config.recovery.standby else None
        self._looks = self._waiting is not None and config.recovery.interval > 0
        if self._waiting is not None:
            self._waiting.stand_by()
        self._elsewhere: Mapping[str, str] = {}
        """By session, the addresses of daemons that have committed other partitions."""
        self.connected = source is None
        self.order = order or SequenceAllocator()
        self.exhausted = asyncio.Event()
        """The source has ended (a replayed file)."""
        self._settings, self._bars = config.source, config.bars
        self._most_reread = config.recovery.reread_records
        self._sessions = config.sessions
        self._settings_of = partial(window_settings, config)
        self._windows = {each.name: self._settings_of(each) for each in config.sessions}
        """Checksum of each session's settings, as in `daemon.progress.Window`."""
        self._keep_originals()
        self.symbols = numbered(config.sessions)
        """Numbers of the symbols in the ring."""
        self._store, self._dead_letter, self._tasks = store, dead_letter, tasks
        self._commit_every_s, self._clocks = commit_every_s, clocks
        self._send = send
        self._ingest: Decoder | None = None
        self._ring: Ring | None = None
        self.transactions: Transactions | None = None
        """They commit, where there are any."""
        self._committing = asyncio.Lock()
        """Held during a commit, so that the source is not closed meanwhile."""
        self._handshakes = None
        if source is not None:
            self._handshakes = store.growth("foretick_source_handshakes_failed_total", source=source.name)

    async def recover(self) -> None:
        """Read where sessions stand, before an engine goes on from there."""
        if self._log is not None:
            stored = await self._log.stored()
            self._progress.read(point.metadata for point in stored.values())

    def engine_ready(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """An engine is up: tell it what is committed, for what was sent while it loaded is lost.

        ``positions``: where sessions that came back from a snapshot read on, by session and symbol.
        """
        self._positions = positions
        self._left.clear()
        self._unrestored = {each.name for each in self._sessions} - positions.keys() if self._looks else set()
        self._tell_stored((), engine_is_new=True)

    @property
    def again(self) -> bool:
        """Whether the source begins, or goes on, in a past that was asked for, and that is answered again."""
        return self._log is not None and (self._log.again or bool(self.tracker.asked_for()))

    async def assigned(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Where to begin: at what is missing from windows, where that is known.

        Sessions that another daemon has answered meanwhile go on from where that stands.
        """
        if not self._standby.answers:
            return await self._take_over(stored)
        found, changed = self._progress.promote(point.metadata for point in stored.values())
        self._elsewhere_answered |= changed  # until they are reset: this may be cancelled before
        known = {session.name for session in self._sessions}
        resets = {
            partition: known & (_readers(found, point) | self.tracker.read_from(partition))
            for partition, point in stored.items()
        }
        ours = set[str]().union(*resets.values())
        self._elsewhere = {name: each for name, each in self._elsewhere.items() if name not in ours}
        resets = {partition: names for partition, names in resets.items() if names & self._elsewhere_answered}
        for partition, names in resets.items():  # all of them before the engine's next event
            self.reset_session(names, self._elsewhere_answered)
            self.tracker.rewind(partition)
            if self.transactions is not None:
                self.transactions.rewind(partition)
        for names in resets.values():
            others = {name: each for name, each in self._positions.items() if name not in names}
            self._positions = others | dict(await self.resume(names))
        self._elsewhere_answered.difference_update(*resets.values())
        self._stored.update(stored)
        return self._begin(found, stored)

    def answered_elsewhere(self, stored: Mapping[Partition, CommitPoint]) -> Set[Partition]:
        """See `Reader.answered_elsewhere`."""
        return {partition for partition, point in stored.items() if self._progress.is_behind(point.metadata)}

    async def follows(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Read what another daemon has answered, up to there: to be warm, and no further."""
        texts = [point.metadata for point in stored.values()]
        found = self._progress.read(texts)
        self._elsewhere = {**self._elsewhere, **self._progress.owners(texts)}
        await self._look_for_snapshots(found)
        for partition, point in stored.items():
            self.tracker.follow(partition, point.offset, _readers(found, point))
        return self._begin(found, stored)

    async def _take_over(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """No other daemon answers: go on behind what was committed last, where the tapes are already."""
        since_ns = time.monotonic_ns()
        found = self._progress.read(point.metadata for point in stored.values())
        await self._look_for_snapshots(found)
        self._progress.begin_epoch()
        await self.promote()
        self._standby.promoted(since_ns)
        self._stored.update(stored)
        return self._begin(found, stored)

    async def _look_for_snapshots(self, found: Mapping[str, StoredProgress]) -> None:
        """Reset sessions that came back from no snapshot, before anything of them is read.

        While the engine loaded, the daemon that answers wrote on: all its files may have been newer than what
        the engine knew as acknowledged.
        """
        answered = set[str]().union(*(each.sessions for each in found.values()))
        unread = {name for name in self._unrestored if self.tracker.source_of(name) is None}
        if names := unread & answered:
            self._positions = {**self._positions, **await self.resume(names)}
            self._unrestored -= names

    def _begin(
        self, found: Mapping[str, StoredProgress], stored: Mapping[Partition, CommitPoint]
    ) -> Mapping[Partition, StartPosition]:
        begin: dict[Partition, StartPosition] = {}
        asked = self.tracker.asked_for()
        new = {name for name in self._windows if self._progress.of(name) == _NOTHING}
        for partition, point in stored.items():
            live = asked.get(partition, point.offset)
            readers = _readers(found, point) & self._windows.keys()
            answered_ns = max((max(self._progress.of(name).closed, default=0) for name in readers), default=0)
            if read := self.tracker.next_offset(partition):
                begin[partition] = StartPosition(read, None, answered_ns)
                continue
            firsts = [self._first_missing(name, partition, live) for name in readers]
            known = [first for first in firsts if first is not None]
            is_enough = known and len(known) == len(readers) and not new
            begin[partition] = StartPosition(min([live, *known]), None if is_enough else live, answered_ns)
        return begin

    def _first_missing(self, session: str, partition: Partition, live: int) -> int | None:
        """The first record that the session's window lacks, ``live`` if none; None if it is not known.

        It is where its snapshot ends, or else where its window began, if that is near enough to ``live``.
        """
        restored, window = self._positions.get(session), self._progress.of(session).window
        places: Iterable[Position] = ()
        if restored:
            places = restored.values()
        elif window.settings == self._windows[session]:
            places = window.firsts
        names = ("", self.source.name) if self.source is not None else ()
        offsets = [
            each.offset
            for each in places
            if each.source in names and (each.topic, each.partition) == partition
        ]
        if restored:
            return min(offsets, default=live)
        first = min(offsets, default=None)
        if first is not None and live - first > self._most_reread:
            log.warning(
                "the window of session %s begins %d records before offset %d of %s/%d, more than "
                "recovery.reread_records: it may come back shorter",
                session, live - first, live, *partition,
            )  # fmt: skip
            return None
        return first

    def begins(self, partition: Partition, start: int) -> None:
        """Reading begins at ``start``; what is committed is history, unless it was asked for."""
        point = self._stored.get(partition, CommitPoint(0))
        known = {session.name for session in self._sessions}
        readers = known & self._progress.readers(point.metadata)
        self._mine.add(partition)
        again = (self._log is not None and self._log.again) or partition in self.tracker.asked_for()
        self.tracker.begin(partition, start, point.offset, readers, again=again)
        self.partitions_assigned(readers | self._left.pop(partition, set()))
        self._tell_stored(())

    def left(self, partitions: Collection[Partition]) -> None:
        """These partitions are somebody else's.

        With transactions, what is not committed of their sessions is dropped. If they come back, they begin
        again from what is committed.
        """
        self._mine.difference_update(partitions)
        gone = set[str]()
        for partition in partitions:
            if self.transactions is not None:
                known = {session.name for session in self._sessions}
                names = known & self.tracker.read_from(partition)
                self._progress.stored(point.metadata for point in self.transactions.stored.values())
                self._progress.take_back(names)
                self._elsewhere_answered |= names
                self.reset_session(names, names)
            self.tracker.leave(partition)
            names = {each.name for each in self._sessions if self.tracker.reads(each.name, (partition,))}
            self._left[partition] = {name for name in names if not self.reads(name)}
            gone |= self._left[partition]
        self.partitions_revoked(gone)

    async def look_around(self) -> None:
        """Learn which sessions other daemons of the group serve."""
        if self._log is None or not self.connected:
            return
        try:
            others = await self._log.others()
        except ConnectionError as error:
            log.warning("%s", error)
        else:
            self._elsewhere = self._progress.owners(point.metadata for point in others.values())

    def owner(self, session: str) -> str | None:
        """The address of the daemon that serves a session; None if it is this one, as far as is known."""
        if not self._standby.answers:
            return self._elsewhere.get(session, "")
        return None if self.reads(session) else self._elsewhere.get(session)

    def serves(self, session: str) -> bool:
        """Whether this daemon, and no other, may have answered the session since its engine started."""
        return self._standby.answers and (self._log is None or self.reads(session))

    def reads(self, session: str) -> bool:
        """Whether the session's records come from a partition that is ours."""
        return self.tracker.reads(session, self._mine)

    async def start(self, ring: Ring) -> None:
        """Connect, and read into ``ring``."""
        if self.source is None:
            return
        self._standby.wait()
        self.begin(ring)
        await self.connect(ring)
        self._tasks.start(INGEST, self.read, returns=True)

    def begin(self, ring: Ring) -> None:
        """From now on no session is idle before the source was read: see `SequenceAllocator.has_read`."""
        if self.source is not None:
            self.order.has_read(self.source.name, time.monotonic_ns(), ring)

    async def connect(self, ring: Ring) -> None:
        """Connect; `read` then reads into ``ring``."""
        assert self.source is not None
        self._ring = ring
        await self.source.start()
        self._ingest = Decoder(
            self.source,
            ring,
            routes(self._sessions, self.symbols),
            self.tracker,
            self._store,
            self._dead_letter,
            max_bytes=self._settings.max_message_bytes,
            max_ahead_ns=self._settings.max_ahead,
            clocks=self._clocks,
            order=self.order,
            sequence=self._settings.sequence,
            name_stream=self._name_stream,
        )
        self.connected = True
        if self._log is None:
            # those with positions are read from a log
            self.partitions_assigned(
                [each.name for each in self._sessions if not self._positions.get(each.name)]
            )

    def _name_stream(self, stream: protocol.NameStream) -> None:
        self._streams.name(stream)
        self._send(stream)

    def number_anew(self) -> dict[str, int]:
        """Number the symbols for a new engine, whose ring is empty, and which begins with what is known."""
        self._elsewhere_answered.clear()
        self.symbols = numbered(self._sessions)
        return self.symbols

    def number(self, sessions: Sequence[SessionConfig]) -> dict[str, int]:
        """Give numbers to the symbols of ``sessions`` that have none."""
        self.symbols = numbered(sessions, self.symbols)
        return self.symbols

    def change(self, sessions: Sequence[SessionConfig]) -> None:
        """Let these sessions read the records from now on."""
        self._sessions = tuple(sessions)
        self._windows = {each.name: self._settings_of(each) for each in sessions}
        self._keep_originals()
        self.number(sessions)
        if self._ingest is not None:
            self._ingest.reroute(routes(self._sessions, self.symbols))

    def _keep_originals(self) -> None:
        """Keep messages as they came where a session may refuse their records."""
        bars = [session.bars(self._bars) for session in self._sessions]
        self.order.originals.wanted = any("refuse" in (each.late, each.on_price_jump) for each in bars)

    @property
    def reading(self) -> bool:
        """Whether the source is connected and read, or has ended."""
        ended = self.source is None or self.exhausted.is_set()
        return self.connected and (ended or INGEST in self._tasks.names())

    def missing(self) -> list[str]:
        """What is not connected, or cannot be read."""
        return self._standby.reasons() + self.unread() if self.reading else ["the source is not connected"]

    def unread(self) -> list[str]:
        """What of the source cannot be read now, or was not yet."""
        source: object = self.source
        return source.unread() if isinstance(source, PartitionedSource) and self.connected else []

    def note(self) -> None:
        """Bring metrics of the connection up to date."""
        if self.source is None or self._handshakes is None:
            return
        self._handshakes.update(getattr(self.source, "handshakes_failed", 0))
        connection = getattr(self.source, "connection", None)
        up = self.connected and (connection is None or connection.state is ConnectionState.UP)
        self._store.set("foretick_source_up", float(up), source=self.source.name)

    def _behind(self) -> Mapping[Partition, int]:
        """Records that another daemon has answered, and that a standby has not read."""
        return {} if self._waiting is None else self._waiting.behind or {}

    def lags(self) -> dict[str, dict[str, float]]:
        """Gauges of a Kafka source's partitions."""
        lags: Mapping[Partition, Lag] = getattr(self.source, "lags", {})
        named = {f"{topic}/{number}": lag for (topic, number), lag in lags.items()}
        behind = {} if self._standby.answers else self._behind()
        return {
            "foretick_standby_lag_records": {f"{p}/{n}": float(each) for (p, n), each in behind.items()},
            "foretick_consumer_lag_records": {name: float(lag.records) for name, lag in named.items()},
            "foretick_consumer_lag_seconds": {name: lag.age_ns / 1e9 for name, lag in named.items()},
        }

    def is_held(self) -> bool:
        """Whether the source is not read because the gate is closed."""
        return self._ingest is not None and self._ingest.held

    def gate(self, is_open: bool) -> None:
        """Open or close the gate; a source that can wait is paused while it is closed."""
        if self._ingest is not None:
            self._ingest.gate(is_open)

    async def stop_reading(self) -> None:
        """Stop reading; nothing more goes into the ring."""
        await self._tasks.stop(INGEST)

    async def commit(self) -> bool:
        """Commit the offsets that acknowledged answers cover, and where their sessions stand.

        Returns False on failure; the next call includes these offsets.
        """
        if self.source is None or not self.connected or not self._standby.answers:
            return True
        if self._log is not None:
            for partition, (read, position) in self._log.reached.items():
                self.tracker.reached(partition, read, position)
        if self.transactions is not None:
            settled = await self.transactions.settle()
            self._tell_stored(self.transactions.stored.values())
            return settled
        async with self._committing:
            points = self.tracker.to_commit()
            saved = self.source.kind != "dropping" or await self._progress.save()
            try:
                if points:
                    await self.source.commit(points)
            except CommitFailed as error:
                self.tracker.not_committed(points)
                log.warning("cannot commit offsets, retrying: %s", error)
                return False
            self._tell_stored(points.values() if saved else ())
            return True

    def _tell_stored(self, points: Iterable[CommitPoint], *, engine_is_new: bool = False) -> None:
        """These points are committed: the engine keeps a snapshot that goes with them."""
        self._progress.stored(point.metadata for point in points)
        if news := self._progress.news_of_stored(engine_is_new=engine_is_new):
            self._send(protocol.NoteProgress(news))

    async def close(self) -> None:
        """Commit once more and disconnect."""
        await self._commit_before_closing(CLOSE_COMMIT_S)
        await self._tasks.stop(COMMIT)
        if self.source is not None and self.connected:
            await self.source.stop()

    async def reopen(self, ring: Ring, forget: Callable[[], None]) -> None:
        """Read again from the committed offsets; calls ``forget`` once nothing more can be acknowledged."""
        await self._leave_for_good(forget)
        self.tracker.clear()
        self._mine.clear()
        self.order.restart()
        await self.start(ring)

    async def hand_over(self, forget: Callable[[], None]) -> None:
        """Leave the partitions to a standby, if there may be one: it answers while an engine is started here.

        ``forget``: see `reopen`, which follows.
        """
        if self._waiting is not None:
            await self._leave_for_good(forget)
            self._standby.wait()

    async def _leave_for_good(self, forget: Callable[[], None]) -> None:
        """Transactions first end all that is complete: the source still owns its partitions."""
        if self.transactions is not None:
            forget()
            await self.leave()
        else:
            await self.leave()
            forget()

    async def leave(self) -> None:
        """Commit, and disconnect unless the source can read again as it is."""
        if self.transactions is None:
            await self._commit_before_closing(REOPEN_COMMIT_S)
        elif not await self.commit():
            # the source is not read, so a rebalance does not end; what is in doubt is waited for
            self.transactions.gives_up = True
            try:
                await self._commit_before_closing(float("inf"))
            finally:
                self.transactions.gives_up = False
        if self.source is not None and not (self._log is not None and self._log.stays):
            await self.source.stop()

    async def _commit_before_closing(self, within_s: float) -> None:
        """Commit, retrying on failure: what is not committed is read and answered a second time."""
        deadline = time.monotonic() + within_s
        while not await self.commit():
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(RETRY_S)

    async def read(self) -> None:
        """Read until the source ends."""
        assert self.source is not None
        assert self._ingest is not None
        assert self._ring is not None
        telling = asyncio.create_task(self._tell_read(self.source, self._ingest, self._ring))
        try:
            await self._ingest.run()
        finally:
            telling.cancel()
        self.order.has_read(self.source.name, None, self._ring)
        self.exhausted.set()

    async def _tell_read(self, source: Source, ingest: Decoder, ring: Ring) -> None:
        while True:
            if isinstance(source, CatchesUp):
                self.order.has_read(source.name, source.read_until_ns, ring)
            elif not ingest.paused:  # all that was sent meanwhile has come
                self.order.has_read(source.name, time.monotonic_ns(), ring)
            await asyncio.sleep(TELL_S)

    async def commit_for_ever(self) -> None:
        """Commit every second, and look at what others have committed."""
        while True:
            await asyncio.sleep(self._commit_every_s)
            await self.commit()
            await self.look_around()
            behind = self._behind()
            self._standby.caught_up |= bool(behind) and not any(behind.values())


def _readers(found: Mapping[str, StoredProgress], point: CommitPoint) -> Set[str]:
    """The sessions that a commit tells of."""
    return found[point.metadata].sessions.keys() if point.metadata in found else set()


async def _nothing(names: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
    return {}


async def _no_engine() -> None:
    pass


def _standing_by(source: object) -> StandbySource | None:
    return source if isinstance(source, StandbySource) else None


def _log_of(source: object) -> LogSource | None:
    return source if isinstance(source, LogSource) else None
