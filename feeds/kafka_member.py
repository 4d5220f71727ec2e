"""A consumer's part in its group: which partitions it has, and what becomes of those that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from feeds.kafka_assignor import WarmUpAssignor
from feeds.kafka_client import committed_points, generation_of, request_rejoin
from feeds.kafka_positions import KafkaPositions
from feeds.kafka_progress import ProgressTopic
from feeds.kafka_start import KafkaStart
from feeds.source import (
    CommitFailed,
    CommitPoint,
    Membership,
    OffsetsUnknown,
    Partition,
    ReadCommitted,
    RebalanceListener,
    StartPosition,
)

if TYPE_CHECKING:
    from feeds.kafka_follower import KafkaFollower

log = logging.getLogger(__name__)

PLACE_S, PLACE_EACH_S = 30.0, 2.0
"""Longest wait for the offsets of new partitions, and more for each; then the client is opened again."""
_FORMED_S = 1.0
"""A group is formed again sooner, unless a member hangs."""
_REFUSED_S = 0.05
"""Until partitions are tried again that could not begin."""
_REJOIN_S = 4.0
"""The same while a member that joins again sends no heartbeats: less than any session timeout."""


class BegunPartition(NamedTuple):
    """Where reading begins, whether another member has committed it before, and as of which assignment."""

    start: int
    was_others: bool
    term: Term | None


class Term(NamedTuple):
    """Since which generation a partition is ours without a break, and whether its owner handed it over."""

    generation: int
    planned: bool


@dataclass
class _Rejoin:
    """The newest one. ``since_ns``: when it began, monotonic."""

    since_ns: int = 0
    under_way: bool = False


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
        assignor: WarmUpAssignor,
    ) -> None:
        self._progress, self._assignor = progress, assignor
        self._name = name
        self._identity = None if group is None else Membership(group, instance=instance)
        self._start, self._positions = start, positions
        self.listener: RebalanceListener | None = None
        self._read_committed: ReadCommitted | None = None
        self._before_serving: Callable[[], Awaitable[None]] | None = None
        self.moved = 0
        self.serves = False
        """It was given partitions."""
        self._begun: set[TopicPartition] = set()
        """Partitions that are read."""
        self._placed: dict[Partition, CommitPoint] = {}
        """What was committed of those that the listener was given and that have not begun."""
        self._lost: set[TopicPartition] = set()
        """Partitions that somebody else may have read meanwhile, though they are assigned to us again."""
        self.rejoined = False
        """There is another assignment, until `part`."""
        self._rejoin = _Rejoin()
        self._joining = asyncio.Lock()
        """Held until it is known what is lost."""
        self._terms: dict[TopicPartition, Term] = {}
        """Of the partitions that are assigned."""
        self.left = asyncio.Event()
        """All is handed over that others take, of a member that is about to leave."""
        self._membership: Membership | None = None
        """Ours by the newest assignment, with the partitions that were begun."""

    @property
    def joining(self) -> bool:
        """The group is formed again: the coordinator keeps a commit waiting, and then refuses it."""
        return self._rejoin.under_way

    @property
    def _group(self) -> str | None:
        return None if self._identity is None else self._identity.group

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
        self._begun, self._lost, self._placed = set(), set(), {}
        self.serves = False
        self._tell_ready(frozenset())

    def lose_all(self) -> None:
        """Begin those again that come with the next assignment."""
        self._lost |= self._begun
        self.rejoined, self._rejoin.under_way = True, False
        self._tell_ready(frozenset())

    # What others have, or are to have.

    @property
    def warm(self) -> Set[TopicPartition]:
        """Partitions of others that this one is to be ready for. What it lost counts from `part` on."""
        return {TopicPartition(*each) for each in self._assignor.plan.warm} - self._begun

    @property
    def leaves(self) -> Set[TopicPartition]:
        """Ours that go to others once those are ready."""
        return {TopicPartition(*each) for each in self._assignor.plan.leaves}

    def _note_left(self) -> None:
        plan = self._assignor.plan
        if plan.leaving and not (plan.others and (plan.partitions or self._begun)):
            self.left.set()

    @property
    def others(self) -> bool:
        """Whether another member could take over, as far as is known."""
        return self._assignor.plan.others

    def leave(self, consumer: AIOKafkaConsumer) -> None:
        """Give all partitions to others that are ready; `left` says when it has none."""
        self._assignor.leave(True)
        request_rejoin(consumer)

    def note_ready(self, consumer: AIOKafkaConsumer, partitions: Set[TopicPartition]) -> None:
        """It is ready for these. A standby waits until it is asked."""
        self._tell_ready(partitions)
        if partitions and not self._assignor.is_standby:
            log.info("%s: ready to take over %s", self._name, _names(partitions))
            request_rejoin(consumer)

    @property
    def ready(self) -> Set[TopicPartition]:
        """Partitions of others that it is ready for, as the group knows or is about to."""
        return {TopicPartition(*each) for each in self._assignor.ready}

    def _tell_ready(self, partitions: Set[TopicPartition]) -> None:
        self._assignor.note_ready([tuple(each) for each in partitions])

    def subscribe(
        self, consumer: AIOKafkaConsumer, topics: Sequence[str], before_rebalance: Callable[[], None]
    ) -> None:
        """Let ``consumer`` join the group; it reads nothing. ``before_rebalance``: called as one begins."""
        consumer.subscribe(topics, listener=_Rebalance(self, consumer, before_rebalance))

    def of(self, consumer: AIOKafkaConsumer | None) -> Membership | None:
        """Ours, as the group's coordinator told it; None while there is none.

        A new generation has no partitions until they are assigned: those known before may be others' now.
        While the group is formed again there is none for a moment, for a transaction under way would be
        refused as soon as it is. Where a member keeps the others waiting, the old one counts until then.
        """
        known = self._membership
        if known is None or consumer is None or self._is_about_to_join:
            return None
        return known if generation_of(consumer) == (known.generation, known.member) else None

    @property
    def _is_about_to_join(self) -> bool:
        return self.joining and time.monotonic_ns() - self._rejoin.since_ns < _FORMED_S * 1e9

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

    # Partitions come and go.

    def assigned(self, consumer: AIOKafkaConsumer) -> set[TopicPartition]:
        """Ours by the newest assignment."""
        return set(consumer.assignment())

    @property
    def has_rejoined(self) -> bool:
        """Whether there is another assignment, of which it is known what others may have had."""
        return self.rejoined and not self._joining.locked()

    def may_read(self, consumer: AIOKafkaConsumer) -> bool:
        """Whether what is begun is ours, for all that is known: not where it missed a generation."""
        if self._group is None:
            return True
        (generation, member), known = generation_of(consumer), self._membership
        if known is None or not self._joining.locked():
            return generation >= 0
        return generation in (known.generation, known.generation + 1) and member == known.member

    def part(self, consumer: AIOKafkaConsumer) -> set[TopicPartition]:
        """What to read no longer: partitions that are not ours any more, or may have been somebody else's."""
        self.rejoined = False
        lost, self._lost = self._lost, set()
        gone = self._begun - self.assigned(consumer)
        self.moved += len(gone)
        self._revoke(gone)
        stopped = self._begun & (gone | lost)
        self._begun -= stopped
        self._note_left()
        return stopped

    def give_up(self, consumer: AIOKafkaConsumer) -> None:
        """Partitions that went to another member before they began are not answered here, after all.

        Call it while none is placed.
        """
        if not self.joining:
            self._revoke(self._placed.keys() - self.assigned(consumer))

    def _revoke(self, partitions: Iterable[tuple[str, int]]) -> None:
        gone = [(topic, number) for topic, number in partitions]
        for partition in gone:
            self._placed.pop(partition, None)
        if gone and self.listener is not None:
            self.listener.on_revoked(gone)

    def new(self, consumer: AIOKafkaConsumer) -> set[TopicPartition]:
        """Ours that are not begun; none while it is not known which others may have had."""
        return set() if self._joining.locked() else self.assigned(consumer) - self._begun

    async def place(
        self, consumer: AIOKafkaConsumer, new: Collection[TopicPartition], follower: KafkaFollower
    ) -> dict[TopicPartition, BegunPartition]:
        """Where to begin these. Other partitions are read meanwhile. Raises TimeoutError.

        ``follower`` looks for the places.
        """
        async with asyncio.timeout(PLACE_S + PLACE_EACH_S * len(new)) as limit:
            return await self._place(consumer, sorted(new), follower, limit)

    async def _place(
        self,
        consumer: AIOKafkaConsumer,
        new: list[TopicPartition],
        follower: KafkaFollower,
        limit: asyncio.Timeout,
    ) -> dict[TopicPartition, BegunPartition]:
        if self._before_serving is not None and not self.serves:
            await self._before_serving()
        stored = {} if self._group is None else await self.committed(consumer, new)
        points = {p: stored.get(p, CommitPoint(0)) for p in new}
        ends = await follower.consumer.end_offsets([p for p in new if p in stored])
        for p in self._start.beyond({p: (points[p].offset, end) for p, end in ends.items()}):
            points[p] = CommitPoint(0, points[p].state)
        stored = {p: point for p, point in stored.items() if points[TopicPartition(*p)] is point}
        if self.listener is not None:
            self.listener.truncated([tuple(p) for p in self._start.truncated.intersection(new)])
        if self._progress is not None:
            self._progress.note(points)
        # of these, others have committed more since they were placed here in vain
        self._revoke([p for p, point in points.items() if self._placed.get(p, point) != point])
        claimed = {} if self.listener is None else self.listener.claims(points)
        if not await self._claim(consumer, claimed, stored.keys(), follower):
            await asyncio.sleep(_REFUSED_S)
            return {}
        wanted: Mapping[Partition, StartPosition] = {}
        others: Set[Partition] = frozenset()
        if self.listener is not None:
            others = self.listener.answered_elsewhere(points)
            self._placed |= {**points, **claimed}
            with not_counted(limit):
                wanted = await self.listener.on_assigned(points)
        self.serves = True  # the listener answers from now on, whatever fails below
        begun: dict[TopicPartition, BegunPartition] = {}
        terms = dict(self._terms)

        async def begin(reading: AIOKafkaConsumer, partition: TopicPartition) -> None:
            offset = stored[partition].offset if partition in stored else None
            start = await self._start.begin(reading, partition, offset, wanted.get(partition))
            begun[partition] = BegunPartition(start, tuple(partition) in others, terms.get(partition))

        await follower.add(new, begin)
        return begun

    async def _claim(
        self,
        consumer: AIOKafkaConsumer,
        claims: Mapping[Partition, CommitPoint],
        committed: Set[Partition],
        follower: KafkaFollower,
    ) -> bool:
        """Store that we answer these from now on; False where the broker refuses it.

        It does so where they are another member's by now: then that one has not seen it, and may be at the
        same number. Where nothing is committed, the log's begin is from now on.
        """
        if self._progress is None or not claims:
            return True
        if self.joining:
            return False
        unknown = [TopicPartition(*p) for p in claims if p not in committed]
        begins = await follower.consumer.beginning_offsets(unknown) if unknown else {}
        offsets = {TopicPartition(*p): begins.get(p, each.offset) for p, each in claims.items()}
        try:
            await self._progress.write(claims, PLACE_S)
            await consumer.commit(offsets)
        except (CommitFailed, KafkaError) as error:
            log.info("%s: partitions do not begin yet: %r", self._name, error)
            return False
        # what is answered of the others is of the same epoch
        return not self._begun or self.listener is None or await self.listener.commit()

    def still(self, starts: Mapping[TopicPartition, BegunPartition]) -> dict[TopicPartition, BegunPartition]:
        """Those of these that are ours without a break since, and not begun."""
        return {
            partition: found
            for partition, found in starts.items()
            if partition not in self._begun
            and (self._group is None or self._terms.get(partition) == found.term is not None)
        }

    def begin(self, starts: Mapping[TopicPartition, BegunPartition]) -> None:
        """These are read from now on: what is begun is also ours, by the membership."""
        for partition, found in starts.items():
            self._positions.begin(partition, found.start)
            self._placed.pop(tuple(partition), None)
            if self.listener is not None:
                self.listener.begins(tuple(partition), found.start)
                self._note_handed_over(partition, found)
        self._begun |= starts.keys()
        self._start.note_begun()
        if self._membership is not None:
            known, begun = self._membership, frozenset(starts)
            self._membership = known._replace(
                partitions=known.partitions | (begun & known.placing), placing=known.placing - begun
            )

    def _note_handed_over(self, partition: TopicPartition, found: BegunPartition) -> None:
        planned = found.term is not None and found.term.planned
        if self.listener is not None and (planned or found.was_others):
            silent_ns = time.monotonic_ns() - self._rejoin.since_ns
            self.listener.handed_over(tuple(partition), planned=planned, silent_ns=silent_ns)

    async def revoke(self) -> None:
        """The group is about to be formed again: commit while the coordinator takes it."""
        self._rejoin.since_ns = time.monotonic_ns()
        if self._begun and self.listener is not None:
            self._assignor.note_costs(self.listener.costs())
            await self.listener.commit()
        self._rejoin.under_way = True

    async def joined(self, consumer: AIOKafkaConsumer) -> None:
        """There is another assignment. Partitions that we had may have been somebody else's in between.

        aiokafka does not tell: a member that hung past its session still has them until it has joined again.
        """
        generation, member = generation_of(consumer)
        self._assignor.note_joined(generation)
        known = self._membership
        unbroken = known is not None and (generation, member) == (known.generation + 1, known.member)
        before, moved = self._terms if unbroken else {}, self._assignor.plan.moved
        self._terms = {
            each: before.get(each, Term(generation, tuple(each) in moved)) for each in self.assigned(consumer)
        }
        self._tell_ready(self.ready & self.warm)
        self.rejoined, self._rejoin.under_way = True, False
        async with self._joining:
            assigned = frozenset(self.assigned(consumer))
            kept = self._begun & assigned
            self._lost |= self._begun - kept  # the next assignment may bring them back
            if kept and self.listener is not None:
                self._lost |= await self._look_back(consumer, kept, self.listener)
            if self._identity is not None:
                owned = frozenset(kept - self._lost)
                generation, member = generation_of(consumer)
                self._membership = self._identity._replace(
                    generation=generation, member=member, partitions=owned, placing=assigned - owned
                )
        self._note_left()

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


def _names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(f"{topic}/{number}" for topic, number in sorted(partitions))


@contextlib.contextmanager
def not_counted(limit: asyncio.Timeout) -> Iterator[None]:
    """Within ``limit``, which is the broker's: the listener may take long to bring sessions back."""
    now, due = asyncio.get_running_loop().time, limit.when()
    began = now()
    limit.reschedule(None)
    yield
    limit.reschedule(None if due is None else due + now() - began)


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Tells when the group is about to be formed again, and reports each assignment as soon as there is one.

    ``before``: is called before the commit at the begin of a rebalance.
    """

    def __init__(self, member: KafkaMember, consumer: AIOKafkaConsumer, before: Callable[[], None]) -> None:
        self._member, self._consumer, self._before = member, consumer, before

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self._before()
        await self._member.revoke()

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self._consumer.pause(*assigned)  # others read
        await self._member.joined(self._consumer)
