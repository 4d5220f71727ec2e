"""Which sessions this daemon reads and answers, as a member of a source's group: partitions come and go."""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from daemon.config.schema import RecoveryConfig
from daemon.gateway.checkpoint.checkpoint import Checkpoint
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from daemon.gateway.start_positions import StartPositions
from daemon.progress import Position
from feeds.source import CommitPoint, LogSource, Partition, Source, StandbySource, StartPosition

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionHooks:
    """What becomes of sessions when partitions come and go."""

    reset: Callable[[Collection[str], Collection[str]], None]
    """Events still under way for these sessions are dropped until `resume`.

    The second ones are those that another daemon has answered.
    """
    resume: Callable[[Collection[str]], Awaitable[Mapping[str, Mapping[str, Position]]]]
    """Resets sessions to their progress; returns where they read on, by session and symbol."""
    promote: Callable[[], Awaitable[None]]
    """Has the engine ask about bars behind the sessions' progress, which until then are history."""
    assigned: Callable[[Collection[str]], None]
    """Tells the engine whose records are read from now on."""
    revoked: Callable[[Collection[str]], None]
    """Tells the engine whose records another daemon reads from now on."""


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
        hooks: SessionHooks,
        recovery: RecoveryConfig,
    ) -> None:
        self.log = source if isinstance(source, LogSource) else None
        self._tracker, self._progress, self._starts = tracker, progress, starts
        self._checkpoint, self._standby, self._hooks = checkpoint, standby, hooks
        self._stored: dict[Partition, CommitPoint] = {}
        self._mine: set[Partition] = set()
        self._elsewhere_answered: set[str] = set()
        """Sessions that another daemon has answered further than this engine knows, or may have."""
        self._unrestored: set[str] = set()
        """Sessions that came back from no snapshot, and were not read yet by a standby engine."""
        self._left: dict[Partition, set[str]] = {}
        """Sessions that partitions took with them, as this engine knows."""
        self._owners: Mapping[str, str] = {}
        """By session, the addresses of daemons that have committed other partitions."""
        self._follower = source if recovery.standby and isinstance(source, StandbySource) else None
        self._has_snapshots = recovery.interval > 0
        if self.log is not None:
            self.log.set_rebalance_listener(self)
        if self._follower is not None:
            checkpoint.stand_by(self._follower)

    # An engine's life.

    async def recover(self) -> None:
        """Read where sessions stand, before an engine goes on from there."""
        if self.log is not None:
            self._progress.read(await self.log.stored())

    def engine_ready(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """An engine is up: tell it what is committed, for what was sent while it loaded is lost.

        ``positions``: where sessions that came back from a snapshot read on, by session and symbol.
        """
        self._starts.restore(positions)
        self._left.clear()
        looks = self.is_standby and self._has_snapshots
        self._unrestored = set(self._starts.sessions - positions.keys()) if looks else set()
        self._checkpoint.notify_stored(engine_is_new=True)

    def engine_starts(self) -> None:
        """A new engine begins with what is known."""
        self._elsewhere_answered.clear()

    def clear(self) -> None:
        """The source will be read again."""
        self._mine.clear()

    # Partitions come and go: see `RebalanceListener`.

    async def on_assigned(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Where to begin: at what is missing from windows, where that is known.

        Sessions that another daemon has answered meanwhile go on from where that stands.
        """
        if not self._standby.answers:
            return await self._promote(stored)
        changed = self._progress.promote(stored)
        self._elsewhere_answered |= changed  # until they are reset: this may be cancelled before
        resets = {
            partition: self._starts.sessions
            & (self._progress.readers(point) | self._tracker.read_from(partition))
            for partition, point in stored.items()
        }
        ours = set[str]().union(*resets.values())
        self._owners = {name: each for name, each in self._owners.items() if name not in ours}
        resets = {partition: names for partition, names in resets.items() if names & self._elsewhere_answered}
        for partition, names in resets.items():  # all of them before the engine's next event
            self._hooks.reset(names, self._elsewhere_answered)
            self._checkpoint.rewind(partition)
        for names in resets.values():
            self._starts.resume(names, await self._hooks.resume(names))
        self._elsewhere_answered.difference_update(*resets.values())
        self._stored.update(stored)
        return self._starts.after(stored)

    async def _promote(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """No other daemon answers: go on behind what was committed last, where the tapes are already."""
        since_ns = time.monotonic_ns()
        self._progress.read(stored)
        await self._look_for_snapshots(stored.values())
        self._progress.begin_epoch()
        await self._hooks.promote()
        self._standby.promoted(since_ns)
        self._stored.update(stored)
        return self._starts.after(stored)

    def answered_elsewhere(self, stored: Mapping[Partition, CommitPoint]) -> Set[Partition]:
        """Those of our partitions that others have had in between and committed."""
        return {partition for partition, point in stored.items() if self._progress.is_behind(point)}

    async def follows(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Read what another daemon has answered, up to there: to be warm, and no further."""
        self._progress.read(stored)
        self._owners = {**self._owners, **self._progress.owners(stored.values())}
        await self._look_for_snapshots(stored.values())
        for partition, point in stored.items():
            self._tracker.follow(partition, point.offset, self._progress.readers(point))
        return self._starts.after(stored)

    async def _look_for_snapshots(self, points: Iterable[CommitPoint]) -> None:
        """Reset sessions that came back from no snapshot, before anything of them is read.

        While the engine loaded, the daemon that answers wrote on: all its files may have been newer than what
        the engine knew as acknowledged.
        """
        answered = set[str]().union(*map(self._progress.readers, points))
        unread = {name for name in self._unrestored if self._tracker.source_of(name) is None}
        if names := unread & answered:
            self._starts.resume(names, await self._hooks.resume(names))
            self._unrestored -= names

    def begins(self, partition: Partition, start: int) -> None:
        """Reading begins at ``start``; what is committed is history, unless it was asked for."""
        point = self._stored.get(partition, CommitPoint(0))
        readers = self._starts.sessions & self._progress.readers(point)
        self._mine.add(partition)
        again = (self.log is not None and self.log.again) or partition in self._tracker.asked_for()
        self._tracker.begin(partition, start, point.offset, readers, again=again)
        self._hooks.assigned(readers | self._left.pop(partition, set()))
        self._checkpoint.notify_stored()

    async def commit(self) -> bool:
        """Commit now: partitions have come, or are about to go."""
        return await self._checkpoint.commit()

    def on_revoked(self, partitions: Collection[Partition]) -> None:
        """These partitions are somebody else's.

        With transactions, what is not committed of their sessions is dropped. If they come back, they begin
        again from what is committed.
        """
        self._mine.difference_update(partitions)
        gone = set[str]()
        known = self._starts.sessions
        for partition in partitions:
            if self._checkpoint.exactly_once:
                names = known & self._tracker.read_from(partition)
                self._progress.stored(self._checkpoint.stored.values())
                self._progress.take_back(names)
                self._elsewhere_answered |= names
                self._hooks.reset(names, names)
            self._tracker.leave(partition)
            names = {name for name in known if self._tracker.reads(name, (partition,))}
            self._left[partition] = {name for name in names if not self.reads(name)}
            gone |= self._left[partition]
        self._hooks.revoked(gone)

    # Who reads what.

    async def look_around(self) -> None:
        """Learn which sessions other daemons of the group serve, and how far a standby is behind them."""
        if self.log is not None:
            try:
                points = await self.log.peer_offsets()
            except ConnectionError as error:
                log.warning("%s", error)
            else:
                self._owners = self._progress.owners(points.values())
        if self.behind:
            self._standby.caught_up |= not any(self.behind.values())

    @property
    def is_standby(self) -> bool:
        """Whether it is one until it gets partitions."""
        return self._follower is not None

    @property
    def behind(self) -> Mapping[Partition, int]:
        """Records that another daemon has answered, and that a standby has not read."""
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

    @property
    def peers(self) -> frozenset[str]:
        """Addresses of the daemons that serve sessions which this one does not."""
        return frozenset(each for name, each in self._owners.items() if each and not self.reads(name))

    def serves(self, session: str) -> bool:
        """Whether this daemon, and no other, may have answered the session since its engine started."""
        return self._standby.answers and (self.log is None or self.reads(session))

    def reads(self, session: str) -> bool:
        """Whether the session's records come from a partition that is ours."""
        return self._tracker.reads(session, self._mine)
