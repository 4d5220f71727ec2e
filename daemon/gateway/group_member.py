"""Which sessions this daemon reads and answers, as a member of a source's group: partitions come and go."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from typing import NamedTuple, Protocol

from daemon.config.schema import RecoveryConfig
from daemon.gateway.checkpoint.checkpoint import Checkpoint
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.discovery import Discoverer
from daemon.gateway.record_decoder import Opener
from daemon.gateway.standby import Standby
from daemon.gateway.start_positions import StartPositions
from daemon.progress import Position
from daemon.session_life import REPLACED, STALE, VOID, Action, Event, Lives, State
from feeds.source import CommitPoint, LogSource, Partition, Source, StandbySource, StartPosition

log = logging.getLogger(__name__)


class SessionCommands(Opener, Discoverer, Protocol):
    """What becomes of sessions when partitions come and go: the actions of `daemon.session_life`."""

    def drop(self, sessions: Collection[str], *, complete: bool) -> None:
        """Drop what is under way of them, ``complete`` versions too; it will be made again."""

    async def resume(self, sessions: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        """Reset them to their progress; returns where they read on, by session and symbol."""

    async def promote(self, sessions: Collection[str]) -> None:
        """Have the engine ask about bars behind their progress, which until then are history."""

    def partitions_assigned(self, sessions: Collection[str]) -> None:
        """Tell the engine whose records are read from now on."""

    def partitions_revoked(self, sessions: Collection[str]) -> None:
        """Tell the engine whose records another daemon reads from now on."""

    def reads(self, session: str) -> bool:
        """Whether any source reads the session here."""

    def adopt(self) -> set[str]:
        """Have the sessions that patterns opened earlier or in other daemons; returns those that are new."""

    async def close_idle(self) -> None:
        """Close sessions of patterns whose records have not come for too long."""

    async def close_unused(self, is_elsewhere: Callable[[str], bool]) -> None:
        """Close what no source reads or follows here, where another daemon answers it."""


MEASURED_S = 30.0
"""What a partition costs is known that long after it has begun."""


class _Begun(NamedTuple):
    """When a partition of ours began, monotonic, s, and the number of each session's newest answer then."""

    since_s: float
    numbers: Mapping[str, int]

    def answers_a_second(self, numbers: Mapping[str, int], now_s: float) -> float:
        """To two digits, so that equal loads look equal; ``numbers``: now."""
        answers = sum(max(0, number - self.numbers.get(name, 0)) for name, number in numbers.items())
        return float(f"{answers / (now_s - self.since_s):.2g}")


class GroupMember:
    """The rebalance listener of a source that is a log; of any other one it knows nothing to tell."""

    def __init__(
        self,
        source: Source,
        tracker: OffsetTracker,
        progress: ProgressStore,
        starts: StartPositions,
        checkpoint: Checkpoint,
        standby: Standby,
        sessions: SessionCommands,
        recovery: RecoveryConfig,
        is_level: Callable[[], bool],
        are_warm: Callable[[Collection[str]], bool],
        *,
        opens_all: bool = True,
    ) -> None:
        """``is_level``: all that was read is with the engine, but for a little. ``are_warm``: what was read
        of these sessions is in their windows. ``opens_all``: all sessions are open from the engine's start
        on, whoever reads them.
        """
        self.is_level, self._are_warm = is_level, are_warm
        self.log = source if isinstance(source, LogSource) else None
        self._tracker, self._progress, self._starts = tracker, progress, starts
        self._checkpoint, self._standby, self._sessions = checkpoint, standby, sessions
        self._stored: dict[Partition, CommitPoint] = {}
        self._mine: dict[Partition, _Begun] = {}
        self._following: dict[Partition, set[str]] = {}
        """Sessions of the partitions that are read behind their owner."""
        self._coming: dict[Partition, Set[str]] = {}
        """Sessions of the partitions that are to begin here."""
        self._reset = set[str]()
        """Sessions that are to be opened again before their partition begins."""
        self._opens_all = opens_all
        self._owners: Mapping[str, str] = {}
        """By session, the addresses of daemons that have committed other partitions."""
        self._former: dict[str, str] = {}
        """The same of sessions that have come to us."""
        self._follower = source if isinstance(source, StandbySource) else None
        self.is_standby = recovery.standby and self._follower is not None
        """It is one until it gets partitions."""
        self._has_snapshots = recovery.interval > 0
        if self.log is not None:
            self.log.set_rebalance_listener(self)
        if self._follower is not None and recovery.standby:
            checkpoint.stand_by(self._follower)

    @property
    def _lives(self) -> Lives:
        return self._standby.lives

    # An engine's life.

    async def recover(self) -> None:
        """Read where sessions stand, before an engine goes on from there."""
        if self.log is not None:
            points = await self.log.stored()
            self._progress.read(points)
            self._sessions.adopt()
            self._owners = self._progress.owners(points.values())

    def engine_ready(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """An engine is up: tell it what is committed, for what was sent while it loaded is lost.

        ``positions``: where sessions that came back from a snapshot read on, by session and symbol.
        """
        self._starts.restore(positions)
        if self.is_standby and self._has_snapshots:
            self._lives.on(Event.NOT_RESTORED, self._starts.sessions - positions.keys())
        self._checkpoint.notify_stored(engine_is_new=True)

    def engine_starts(self) -> None:
        """A new engine begins with what is known, and follows no other daemon yet."""
        self._following.clear()
        self._coming.clear()
        self._reset.clear()

    def clear(self) -> None:
        """The source will be read again."""
        self._mine.clear()

    # Partitions come and go: see `RebalanceListener`.

    def claims(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, CommitPoint]:
        """Our epoch, newer than those of whoever has answered these; a transaction stores it with answers.

        From now on, nothing more is published of sessions that others have answered meanwhile.
        """
        changed = self._progress.promote(stored)
        self._sessions.adopt()
        cold = self._cold(stored)
        self._coming |= cold
        self._lives.on(Event.OVERTAKEN, changed & set[str]().union(*cold.values()))
        for partition, names in cold.items():
            if self._lives.among(names, STALE):
                if self._checkpoint.exactly_once:  # complete answers are dropped, too
                    self._progress.stored(self._checkpoint.stored.values())
                    self._progress.take_back(names)
                self._reset |= self._on(Event.RESET, names)[Action.REOPEN]
                self._checkpoint.rewind(partition)
        if self._checkpoint.exactly_once:
            return {}
        return {partition: self._progress.claim(point) for partition, point in stored.items()}

    def truncated(self, partitions: Collection[Partition]) -> None:
        """What comes at offsets that were read before is new."""
        for partition in partitions:
            self._checkpoint.rewind(partition)

    async def on_assigned(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Where to begin: at what is missing from windows, where that is known.

        Those that were read behind their owner go on behind what it has committed, where tapes are already.
        Sessions of others that another daemon has answered meanwhile go on from where that stands.
        """
        self._progress.begin_epoch()
        cold = self._cold(stored)
        if warm := {p: point for p, point in stored.items() if p not in cold}:
            await self._promote(warm)
        self._former |= self._progress.owners(stored.values())
        ours = set[str]().union(*cold.values())
        self._owners = {name: each for name, each in self._owners.items() if name not in ours}
        for partition, names in cold.items():
            self._following.pop(partition, None)
            if reopened := self._lives.among(names, REPLACED) | (self._reset & names):
                self._starts.resume(reopened, await self._sessions.resume(reopened))
                self._reset -= reopened
        self._stored.update(stored)
        return self._starts.after(stored)

    def _cold(self, stored: Mapping[Partition, CommitPoint]) -> dict[Partition, Set[str]]:
        """The sessions of those partitions that were not read behind their owner."""
        return {
            partition: self._starts.sessions
            & (self._progress.readers(point) | self._tracker.read_from(partition))
            for partition, point in stored.items()
            if not self._is_warm(partition)
        }

    def _is_warm(self, partition: Partition) -> bool:
        if not self._standby.answers:
            return True
        followed = self._following.get(partition)
        return followed is not None and not self._lives.among(followed, VOID)

    async def _promote(self, stored: Mapping[Partition, CommitPoint]) -> None:
        """No other daemon answers what is read in these."""
        since_ns, whole = time.monotonic_ns(), not self._standby.answers
        await self._follow(stored)
        ours = set[str]().union(*(self._following.get(each, ()) for each in stored))
        names = set(self._starts.sessions) if whole else ours & self._starts.sessions
        if not self._opens_all:  # what could not be opened behind its owner is opened by its next record
            unopened = self._lives.among(names, {State.COLD})
            self._on(Event.CLOSED, unopened)
            names -= unopened
        self._owners = {name: each for name, each in self._owners.items() if name not in ours}
        await self._sessions.promote(self._on(Event.TAKEN_OVER, names)[Action.TAKE_OVER])
        self._on(Event.PROMOTED, names)
        self._standby.promoted(names, since_ns)
        for partition in list(self._following) if whole else stored:
            self._following.pop(partition, None)

    def answered_elsewhere(self, stored: Mapping[Partition, CommitPoint]) -> Set[Partition]:
        """Those of our partitions that others have had in between and committed."""
        return {partition for partition, point in stored.items() if self._progress.is_behind(point)}

    async def follows(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Read what another daemon has answered, up to there: to be warm, and no further."""
        self._progress.read(stored)
        self._sessions.adopt()
        self._owners = {**self._owners, **self._progress.owners(stored.values())}
        await self._follow(stored)
        for partition, point in stored.items():
            self._tracker.follow(partition, point.offset, self._progress.readers(point))
        return self._starts.after(stored)

    def follows_no_longer(self, partitions: Collection[Partition]) -> None:
        """If they come to us, their sessions begin from what is committed."""
        for partition in partitions:
            followed = self._following.pop(partition, set())
            if self._standby.answers:  # otherwise they go on wherever they are read next
                self._lives.on(Event.OVERTAKEN, followed)

    async def _follow(self, stored: Mapping[Partition, CommitPoint]) -> None:
        """Reset sessions to their owner's snapshot, before anything of them is read here.

        The engine of a standby follows from its start, and has restored what it could. But while
        it loaded, the daemon that answers wrote on: all its files may have been newer than what the engine
        knew as acknowledged.
        """
        found = {p: set(self._progress.readers(point) & self._starts.sessions) for p, point in stored.items()}
        for partition in found.keys() - self._following.keys():
            self._tracker.rewind(partition)  # we may have had it before
        answered = set[str]().union(*found.values())
        known = set[str]().union(*self._following.values())
        names = {name for name in answered - known if not self.reads(name)}
        cold = self._lives.among(answered, {State.COLD})
        read = set[str]()
        if not self._standby.answers:
            read = {name for name in cold if self._tracker.source_of(name) is not None}
        self._lives.on(Event.READ, read)
        followed = dict(self._following)
        # at once: what is not held may be closed while they are opened one by one
        for partition, readers in found.items():
            self._following[partition] = self._following.get(partition, set()) | readers
        if reopened := self._on(Event.FOLLOWED, (names | cold) - read)[Action.REOPEN]:
            try:
                self._starts.resume(reopened, await self._sessions.resume(reopened))
            except BaseException:  # the source gives up, and does not follow them
                for partition in found.keys() - followed.keys():
                    self._following.pop(partition, None)
                raise

    def is_warm(self) -> bool:
        """Whether what was read behind owners is in the windows, but for a bar of each session."""
        return self._are_warm(self._starts.sessions & set[str]().union(*self._following.values()))

    def handed_over(self, partition: Partition, *, planned: bool, silent_ns: int) -> None:
        """Another daemon had the partition before."""
        how = "handed over" if planned else "taken over"
        log.info("%s/%d was %s %.0f ms after the group was to change", *partition, how, silent_ns / 1e6)
        self._standby.handed_over(planned=planned, silent_ns=silent_ns)

    def begins(self, partition: Partition, start: int) -> None:
        """Reading begins at ``start``; what is committed is history, unless it was asked for."""
        point = self._stored.get(partition, CommitPoint(0))
        readers = self._starts.sessions & self._progress.readers(point)
        numbers = {name: self._progress.of(name).sequence for name in readers}
        earlier = self._reads_from(partition)
        self._mine[partition] = _Begun(time.monotonic(), numbers)
        self._coming.pop(partition, None)
        again = (self.log is not None and self.log.again) or partition in self._tracker.asked_for()
        self._tracker.begin(partition, start, point.offset, readers, again=again)
        self._on(Event.ASSIGNED, readers | earlier)
        self._checkpoint.notify_stored()

    async def commit(self) -> bool:
        """Commit now: partitions have come, or are about to go."""
        return await self._checkpoint.commit()

    def on_revoked(self, partitions: Collection[Partition]) -> None:
        """These partitions are somebody else's.

        What is not committed of their sessions is dropped: the new owner makes it again. If they come back,
        they begin again from what is committed.
        """
        for partition in partitions:
            self._mine.pop(partition, None)
        self._progress.stored(self._checkpoint.stored.values())
        gone = set[str]()
        for partition in partitions:
            names = self._starts.sessions & self._tracker.read_from(partition)
            self._progress.take_back(names)
            self._on(Event.VOIDED, names)
            self._tracker.leave(partition)
            gone |= self._reads_from(partition)
        self._on(
            Event.REVOKED, {name for name in gone if not (self.reads(name) or self._sessions.reads(name))}
        )

    def _reads_from(self, partition: Partition) -> set[str]:
        """Sessions whose records came from a partition, as far as this daemon has read them."""
        newest = self._tracker.read_from(partition)
        return {n for n in self._starts.sessions if n in newest or self._tracker.reads(n, (partition,))}

    def _on(self, event: Event, sessions: Collection[str]) -> Mapping[Action, set[str]]:
        """This happens to sessions; does what can be done at once, and returns all actions."""
        found = self._lives.on(event, sessions)
        for action, names in found.items():
            match action:
                case Action.DROP | Action.DROP_ALL:
                    all_of_it = action is Action.DROP_ALL or self._checkpoint.exactly_once
                    self._sessions.drop(names, complete=all_of_it)
                case Action.NOTIFY_ASSIGNED:
                    self._sessions.partitions_assigned(names)
                case Action.NOTIFY_REVOKED:
                    self._sessions.partitions_revoked(names)
        return found

    def costs(self) -> Mapping[Partition, float]:
        """What our partitions cost, in answers a second; those that are too new to tell are left out."""
        now, found = time.monotonic(), {}
        for partition, begun in self._mine.items():
            if now - begun.since_s >= MEASURED_S:
                numbers = {name: self._progress.of(name).sequence for name in self._reads_from(partition)}
                found[partition] = begun.answers_a_second(numbers, now)
        return found

    # Who reads what.

    async def look_around(self) -> None:
        """Learn which sessions other daemons of the group serve, and how far a standby is behind them."""
        if self.log is not None:
            before = dict(self._coming)
            try:
                points = await self.log.peer_offsets()
            except ConnectionError as error:
                log.warning("%s", error)
            else:
                self._owners = self._progress.owners(points.values())
                if (new := self._sessions.adopt()) and not self._standby.answers:
                    await self._sessions.open(new)
                for partition in points.keys() & before.keys():  # they went before they began
                    if self._coming.get(partition) is before[partition]:
                        del self._coming[partition]
            if not self._opens_all:
                await self._sessions.close_unused(lambda session: session in self._owners)
        await self._sessions.close_idle()
        if self.behind:
            self._standby.caught_up |= not any(self.behind.values())

    @property
    def behind(self) -> Mapping[Partition, int]:
        """Records that another daemon has answered, and that this one, which follows it, has not read."""
        return {} if self._follower is None else self._follower.behind or {}

    @property
    def again(self) -> bool:
        """Whether the source begins, or goes on, in a past that was asked for, and that is answered again."""
        return self.log is not None and (self.log.again or bool(self._tracker.asked_for()))

    def owner(self, session: str) -> str | None:
        """The address of the daemon that serves a session; None if it is this one, as far as is known."""
        if not self._standby.answers:
            return self._owners.get(session, "")
        return None if self.reads(session) else self._owners.get(session)

    def former(self, session: str) -> str:
        """The address of the daemon that answered a session of ours before; empty if none is known."""
        return self._former.get(session, "")

    @property
    def peers(self) -> frozenset[str]:
        """Addresses of the daemons that serve sessions which this one does not."""
        return frozenset(each for name, each in self._owners.items() if each and not self.reads(name))

    def serves(self, session: str) -> bool:
        """Whether this daemon, and no other, may have answered the session since its engine started."""
        return self._standby.answers and (self.log is None or self.reads(session))

    def holds(self, session: str) -> bool:
        """Whether the session is read or followed here, or is about to be."""
        of_others = (*self._following.values(), *self._coming.values())
        return self.reads(session) or any(session in names for names in of_others)

    def reads(self, session: str) -> bool:
        """Whether the session's records come from a partition that is ours."""
        return self._tracker.reads(session, self._mine)
