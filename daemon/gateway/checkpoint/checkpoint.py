"""A checkpoint: answers, where their sessions stand, and the offsets that they cover become durable together.

A reader that starts behind committed offsets finds the answers of all that is below, and progress that is no
older. At least once, each is acknowledged before the next is written. Exactly once, one transaction after
another takes all three: as soon as versions are complete, so that answers do not wait for the second.

Where a partition has gone to another member, what is not committed of its sessions is dropped, for the new
owner makes it again. A transaction that the group or the broker refuses has no effect, so the rest goes into
the next one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from daemon import protocol
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox, Staged
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from feeds.kafka_transactions import (
    OUTCOMES,
    Fenced,
    KafkaTransactions,
    MessagesRefused,
    PartitionsMoved,
)
from feeds.source import (
    CommitFailed,
    CommitPoint,
    LogSource,
    Membership,
    MemberSource,
    OutgoingMessage,
    Partition,
    SinkStopped,
    Source,
    StandbySource,
)
from metrics.store import MetricStore

log = logging.getLogger(__name__)

TASK = "publish transactions"
SETTLE_S = 5.0
"""A member that leaves its partitions waits no longer for a transaction: the group waits for it."""
RETRY_S = 0.1


class Checkpoint:
    """Of one source. ``sink`` takes messages and offsets in one transaction, where there is one.

    ``on_revoked`` is called where streams are another member's; before anything is committed. ``is_held()``:
    whether the source is not read until less waits to be committed. ``send``: to the engine.
    """

    def __init__(
        self,
        source: Source,
        tracker: OffsetTracker,
        progress: ProgressStore,
        outbox: Outbox,
        standby: Standby,
        store: MetricStore,
        send: Callable[[protocol.Command], None],
        *,
        sink: KafkaTransactions | None = None,
        on_revoked: Callable[[Collection[Partition]], None],
        is_held: Callable[[], bool],
    ) -> None:
        self._source, self._tracker, self._progress = source, tracker, progress
        self._outbox, self._standby, self._store, self._send = outbox, standby, store, send
        self._sink, self._on_revoked, self._is_held = sink, on_revoked, is_held
        self.stored: dict[Partition, CommitPoint] = {}
        """What was committed last."""
        self._told: dict[Partition, CommitPoint] = {}
        self._one = asyncio.Lock()
        """Held during a checkpoint."""
        self._under_way: asyncio.Task[bool] | None = None
        self._next: asyncio.Task[bool] | None = None
        """Waits for the one under way, and has not taken anything yet."""
        self._ended: Exception | None = None
        """Why no transaction begins any more."""
        self._rewound: set[Partition] = set()
        """Streams that are read again since the points under way were taken, which are outdated."""
        self._gives_up = False
        self._member: MemberSource | None = None
        if sink is not None:
            assert isinstance(source, MemberSource)
            self._member = source
            self._outcomes = {
                outcome: store.growth("foretick_transactions_total", sink.outcomes[outcome], outcome=outcome)
                for outcome in OUTCOMES
            }
            source.read_committed_by(sink.committed)

    @property
    def exactly_once(self) -> bool:
        """Whether it is one transaction."""
        return self._sink is not None

    def stand_by(self, source: StandbySource) -> None:
        """Leave the transactional id, too, to the daemon that answers, until ``source`` has partitions."""
        if self._sink is None:
            source.stand_by()
        else:
            self._sink.stand_by()
            source.stand_by(self._sink.begin)

    def rewind(self, stream: Partition) -> None:
        """The stream is read again from where others have left it."""
        self._tracker.rewind(stream)
        self._rewound.add(stream)

    # What it is called for.

    async def commit(self, within_s: float | None = None) -> bool:
        """Commit all that is complete now; False where that failed, and the next call includes it.

        A transaction that takes longer (`SETTLE_S`) goes on, and this is False. A standby commits nothing.
        """
        if not self._standby.answers:
            return True
        if isinstance(self._source, LogSource):
            for partition, (read, position) in self._source.reached.items():
                self._tracker.reached(partition, read, position)
        done = await self._turn(SETTLE_S if self.exactly_once and within_s is None else within_s)
        self.notify_stored()
        return done

    async def commit_within(self, seconds: float) -> None:
        """Commit, retrying on failure: what is not committed is read and answered a second time."""
        deadline = time.monotonic() + seconds
        while not await self.commit():
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(RETRY_S)

    async def commit_before_leaving(self, seconds: float) -> None:
        """The same, while the source is not read."""
        if not self.exactly_once:
            await self.commit_within(seconds)
        elif not await self.commit():
            # a rebalance does not end now; what is in doubt is waited for
            with self.giving_up():
                await self.commit_within(float("inf"))

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """The source is not read meanwhile, so partitions that are not known to be ours are not."""
        self._gives_up = True
        try:
            yield
        finally:
            self._gives_up = False

    def notify_stored(self, *, engine_is_new: bool = False) -> None:
        """The engine keeps snapshots that go with what is committed."""
        news = [point for stream, point in self.stored.items() if self._told.get(stream) is not point]
        self._told |= self.stored
        self._progress.stored(news)
        if progress := self._progress.news_of_stored(engine_is_new=engine_is_new):
            self._send(protocol.NoteProgress(progress))

    async def run(self) -> None:
        """Exactly once: commit as soon as something is complete. Raises Fenced."""
        while self._ended is None:
            await self._outbox.ready.wait()
            self._outbox.ready.clear()
            await self._turn()
        raise self._ended

    async def stop(self, within_s: float) -> None:
        """Commit what is complete, for at most so long; nothing is committed afterwards. `run` has ended.

        Later offsets cover the messages of the transaction under way, so they wait until it is in effect.
        """
        if not await self._turn(within_s) and self._ended is None:
            log.error("a transaction was not committed within %g s", within_s)
        self._ended = self._ended or SinkStopped("the daemon stops")
        for turn in (self._under_way, self._next):
            if turn is not None:
                turn.cancel()

    async def _turn(self, within_s: float | None = None) -> bool:
        """Commit what is complete by now, behind the checkpoint under way; goes on where this ends first."""
        if self._ended is not None:
            return True
        self._next = turn = self._next or asyncio.create_task(self._after_this())
        await asyncio.wait([turn], timeout=within_s)
        return turn.done() and not turn.cancelled() and turn.result()

    async def _after_this(self) -> bool:
        async with self._one:
            self._under_way, self._next = self._next, None
            try:
                return self._ended is not None or await self._commit()
            except Exception as error:
                if not self.exactly_once:
                    raise
                log.exception("a transaction failed")
                self._ended = error
                self._outbox.ready.set()  # `run` raises it
                return False

    # The steps.

    async def _commit(self) -> bool:
        """All steps, again for the rest where a part is refused; False where they failed. Raises Fenced."""
        while True:
            # 1. Take what is complete: messages of whole versions, and positions below all that is open.
            taken, points = self._outbox.take(), self._tracker.to_commit()
            self._rewound.clear()
            try:
                # 2. Deliver the messages: in the transaction. Without one none is staged, and every sink has
                #    acknowledged what the positions cover.
                messages = [each.message for each in taken]
                # 3. Write progress: in the transaction; or ahead of the offsets, as records or in a file.
                messages += [] if self._member is None else self._member.records_of(points)
                written = self._source.kind != "dropping" or await self._progress.save()
                # 4. Commit the offsets, and the transaction with them.
                if taken or points:
                    await self._commit_offsets(messages, points, taken)
            except PartitionsMoved as error:
                log.warning("%s", error)
                self._put_back(taken, points)
                self._on_revoked(moved := error.partitions - self._rewound)
                self._outbox.leave(moved)
            except MessagesRefused as error:
                self._put_back(taken, points, error)
            except (CommitFailed, SinkStopped) as error:
                log.warning("cannot commit: %s", error)
                self._tracker.not_committed(points)
                self._outbox.done(taken, delivered=False)
                self._count("failed")
                return False
            else:
                # 5. Note what is stored; `commit` tells the engine, which keeps snapshots that go with it.
                self.stored |= points if written else {}
                self._outbox.done(taken, delivered=True)
                self._count("done" if written else "failed")
                return True

    def _count(self, outcome: str) -> None:
        self._store.inc("foretick_checkpoints_total", source=self._source.name, outcome=outcome)

    async def _commit_offsets(
        self,
        messages: Sequence[OutgoingMessage],
        points: Mapping[Partition, CommitPoint],
        taken: Sequence[Staged],
    ) -> None:
        if self._sink is None or self._member is None:
            await self._source.commit(points)
            return
        began = time.monotonic_ns()
        sources = {each.stream for each in taken if each.stream is not None}
        try:
            await self._sink.commit(messages, points, self._membership, sources)
        finally:
            for outcome, total in self._outcomes.items():
                total.update(self._sink.outcomes[outcome])
        self._store.observe("foretick_transaction_seconds", time.monotonic_ns() - began)
        self._member.note_stored(points)

    def _membership(self) -> Membership | None:
        found = None if self._member is None else self._member.membership
        if self._gives_up:
            found = found or Membership("")
        if found and (self._gives_up or self._is_held()):
            found = found._replace(placing=frozenset())
        return found and found._replace(partitions=found.partitions - self._rewound)

    def _put_back(
        self,
        taken: Sequence[Staged],
        points: Collection[Partition],
        refused: MessagesRefused | None = None,
    ) -> None:
        """The transaction has no effect. Of each message that is refused for good there is a DLQ record.

        Raises Fenced where that is one of the records of progress.
        """
        reasons = {} if refused is None else refused.reasons
        name = "" if self._sink is None else self._sink.name
        if reasons and max(reasons) >= len(taken):
            raise Fenced(f"{name}: where sessions stand cannot be stored: {refused}") from refused
        self._tracker.not_committed(points)
        self._outbox.put_back(taken, reasons, f"{name} refuses a message for good: {refused}")
