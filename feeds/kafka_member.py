"""A consumer's part in its group: which partitions it has, and what becomes of those that come and go."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from feeds.kafka_client import committed_points, generation_of
from feeds.kafka_positions import KafkaPositions
from feeds.kafka_progress import ProgressTopic
from feeds.kafka_start import KafkaStart
from feeds.source import (
    CommitPoint,
    Membership,
    OffsetsUnknown,
    Partition,
    ReadCommitted,
    RebalanceListener,
    StartPosition,
)

log = logging.getLogger(__name__)

PLACE_S, PLACE_EACH_S = 30.0, 2.0
"""Longest wait for the offsets of new partitions, and more for each; then the client is opened again."""
_REJOIN_S = 4.0
"""The same while a member that joins again sends no heartbeats: less than any session timeout."""


class KafkaMember:
    """``group`` None: every partition is ours. ``moved``: partitions that went elsewhere."""

    def __init__(
        self,
        name: str,
        group: str | None,
        instance: str | None,
        start: KafkaStart,
        positions: KafkaPositions,
        progress: ProgressTopic | None,
    ) -> None:
        self._progress = progress
        self._name, self._group, self._instance = name, group, instance
        self._start, self._positions = start, positions
        self.listener: RebalanceListener | None = None
        self._read_committed: ReadCommitted | None = None
        self._before_serving: Callable[[], Awaitable[None]] | None = None
        self.moved = 0
        self.serves = False
        """It was given partitions."""
        self._assigned: set[TopicPartition] = set()
        """Partitions that are begun."""
        self._lost: set[TopicPartition] = set()
        """Partitions that somebody else may have read meanwhile, though they are assigned to us again."""
        self.rejoined = False
        """The group was formed again: until `place`, the client stands at the committed offsets."""
        self._joining = asyncio.Lock()
        """Held until it is known what is lost."""
        self._membership: Membership | None = None
        """Ours by the newest assignment, with the partitions that were begun."""

    def set_listener(self, listener: RebalanceListener) -> None:
        """Tell ``listener`` which partitions come and go, and begin where it says."""
        self.listener = listener

    def read_committed_by(self, read: ReadCommitted) -> None:
        """See `MemberSource.read_committed_by`."""
        self._read_committed = read

    def serve_after(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Call ``prepare`` before the first partitions that are given are begun."""
        self._before_serving = prepare

    def start(self) -> None:
        """Begin all partitions again."""
        self._assigned, self._lost = set(), set()
        self.serves = False

    def lose_all(self) -> None:
        """Begin those again that come with the next assignment."""
        self._lost |= self._assigned

    def subscribe(self, consumer: AIOKafkaConsumer, topics: Sequence[str]) -> None:
        """Let ``consumer`` join the group."""
        consumer.subscribe(topics, listener=_Rebalance(self, consumer))

    def of(self, consumer: AIOKafkaConsumer | None) -> Membership | None:
        """Ours, as the group's coordinator told it; None while there is none.

        A new generation has no partitions until they are assigned: those known before may be others' now.
        """
        known = self._membership
        if known is None or consumer is None:
            return None
        return known if generation_of(consumer) == (known.generation, known.member) else None

    @property
    def is_new(self) -> bool:
        """Whether there was no assignment yet."""
        return self._membership is None

    async def committed(
        self, consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]
    ) -> Mapping[Partition, CommitPoint]:
        """What the group has committed. aiokafka may tell what it was before a transaction that is ending."""
        if self._read_committed is None or self._group is None:
            return await self.offsets(consumer, partitions)
        return await self._with_records(await self._read_committed(self._group, partitions))

    async def offsets(
        self, consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]
    ) -> Mapping[Partition, CommitPoint]:
        """The same by aiokafka, for whoever reads behind it."""
        return await self._with_records(await committed_points(consumer, partitions))

    async def _with_records(self, points: Mapping[Partition, CommitPoint]) -> Mapping[Partition, CommitPoint]:
        return points if self._progress is None else await self._progress.join(points)

    async def place(self, consumer: AIOKafkaConsumer) -> None:
        """Seek in partitions that are new to us, and count those that went elsewhere. Raises TimeoutError."""
        async with asyncio.timeout(PLACE_S + PLACE_EACH_S * len(consumer.assignment())) as limit:
            await self._place(consumer, limit)

    async def _place(self, consumer: AIOKafkaConsumer, limit: asyncio.Timeout) -> None:
        async with self._joining:
            rejoined, self.rejoined = self.rejoined, False
            lost, self._lost = self._lost, set()
        assigned = set(consumer.assignment())
        gone = self._assigned - assigned
        self.moved += len(gone)
        if gone and self.listener is not None:
            self.listener.on_revoked([tuple(partition) for partition in gone])
        self._assigned -= gone | lost
        new = assigned - self._assigned
        starts = await self._begin(consumer, sorted(new), limit) if new else {}
        for partition in assigned - new if rejoined else ():
            # the client goes on from the committed offset, we from where we were
            consumer.seek(partition, self._positions.reached[partition][1])
        if self.rejoined:  # what was new may have been somebody else's again
            return
        # all at once: what is begun is also ours, by the membership
        for partition, start in starts.items():
            self._positions.begin(partition, start)
            if self.listener is not None:
                self.listener.begins(tuple(partition), start)
        if assigned:
            self._start.note_begun()
        self._assigned = assigned
        if self._membership is not None:
            self._membership = self._membership._replace(partitions=frozenset(assigned), placing=frozenset())
        if new and self.listener is not None:
            await self.listener.commit()

    async def _begin(
        self, consumer: AIOKafkaConsumer, new: list[TopicPartition], limit: asyncio.Timeout
    ) -> dict[TopicPartition, int]:
        """Seek to where these begin, and return that."""
        if self._before_serving is not None and not self.serves:
            await self._before_serving()
        stored = {} if self._group is None else await self.committed(consumer, new)
        points = {p: stored.get(p, CommitPoint(0)) for p in new}
        if self._progress is not None:
            self._progress.note(points)
        wanted: Mapping[Partition, StartPosition] = {}
        if self.listener is not None:
            with not_counted(limit):
                wanted = await self.listener.on_assigned(points)
        self.serves = True  # the listener answers from now on, whatever fails below
        return {
            partition: await self._start.begin(
                consumer,
                partition,
                stored[partition].offset if partition in stored else None,
                wanted.get(partition),
            )
            for partition in new
        }

    async def joined(self, consumer: AIOKafkaConsumer) -> None:
        """There is another assignment. Partitions that we had may have been somebody else's in between.

        aiokafka does not tell: a member that hung past its session still has them until it has joined again.
        """
        self.rejoined = True
        async with self._joining:
            assigned = set(consumer.assignment())
            kept = self._assigned & assigned
            self._lost |= self._assigned - kept  # the next assignment may bring them back
            if kept and self.listener is not None:
                self._lost |= await self._look_back(consumer, kept, self.listener)
            if self._group is not None:
                owned = kept - self._lost
                self._membership = Membership(
                    self._group,
                    *generation_of(consumer),
                    self._instance,
                    frozenset(owned),
                    frozenset(assigned - owned),
                )

    async def _look_back(
        self, consumer: AIOKafkaConsumer, kept: set[TopicPartition], listener: RebalanceListener
    ) -> set[TopicPartition]:
        """Those that others had in between; all where that is not known."""
        try:
            async with asyncio.timeout(_REJOIN_S):
                stored = await self.committed(consumer, sorted(kept))
        except (KafkaError, OffsetsUnknown, TimeoutError) as error:
            log.warning("%s: it is not known whether other members had its partitions: %r", self._name, error)
            return kept
        return {TopicPartition(*partition) for partition in listener.answered_elsewhere(stored)}


@contextlib.contextmanager
def not_counted(limit: asyncio.Timeout) -> Iterator[None]:
    """Within ``limit``, which is the broker's: the listener may take long to bring sessions back."""
    now, due = asyncio.get_running_loop().time, limit.when()
    began = now()
    limit.reschedule(None)
    yield
    limit.reschedule(None if due is None else due + now() - began)


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Commits before partitions are revoked; reports each assignment as soon as there is one."""

    def __init__(self, member: KafkaMember, consumer: AIOKafkaConsumer) -> None:
        self._member, self._consumer = member, consumer

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        if revoked and self._member.listener is not None:
            await self._member.listener.commit()

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        await self._member.joined(self._consumer)
