"""Messages and the offsets they came from, in one transaction: in effect once, or not at all.

A transaction is open only while it is written. It has the next number, and commits that number beside the
offsets, as an offset of a group of its own. When an attempt fails, and it may be unknown whether it took
effect, its producer is given up and another one initialised under the same transactional id: the broker
first ends what was open, and refuses the old producer from then on. The committed number then says whether
the transaction took effect, and it is sent again only if it did not. A producer that tried again by itself
could not know this: a request that the network delayed may reach the broker after the client gave it up.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal, NamedTuple, Protocol, get_args

from feeds.backoff import ConnectionLog, until
from feeds.source import (
    CommitPoint,
    Membership,
    OffsetsUnknown,
    OutgoingMessage,
    Partition,
    PublishRefused,
    ReadCommitted,
    Refusal,
    SinkStopped,
)

log = logging.getLogger(__name__)

TransactionOutcome = Literal["committed", "aborted", "unknown"]
OUTCOMES: tuple[TransactionOutcome, ...] = get_args(TransactionOutcome)


class GroupOffsets(NamedTuple):
    """What a transaction commits for one group. ``member`` without a generation: a group without members."""

    member: Membership
    points: Mapping[Partition, CommitPoint]


class Fenced(RuntimeError):
    """Another producer has this transactional id, or the broker has forgotten it: nothing can be written.

    A new process goes on from what is committed.
    """


class PartitionsMoved(Exception):
    """``partitions`` are another member's, which reads on from what is committed; there is no effect."""

    def __init__(self, partitions: frozenset[Partition], why: str) -> None:
        super().__init__(why)
        self.partitions = partitions


class TransactionFailed(Exception):
    """The attempt failed; with ``unknown`` it may have taken effect all the same."""

    def __init__(self, why: str, *, unknown: bool = True) -> None:
        super().__init__(why)
        self.unknown = unknown


class MessagesRefused(Exception):
    """The broker never takes the messages with these indices, and why; there is no effect."""

    def __init__(self, reasons: Mapping[int, Refusal], why: str) -> None:
        super().__init__(why)
        self.reasons = reasons


class TransactionalProducer(Protocol):
    """One producer, from its initialisation to the first failure."""

    async def open(self) -> None:
        """Initialise: end what an earlier producer left open, and fence it. Raises TransactionFailed."""

    async def transact(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        """Write and commit. Raises Fenced, MessagesRefused, TransactionFailed."""

    async def close(self) -> None:
        """Give it up, without an effect on what is open at the broker. Bounded in time, never raises."""


class CommittedOffsets(ReadCommitted, Protocol):
    """`ReadCommitted`, of any group."""

    async def close(self) -> None:
        """Disconnect."""


class KafkaTransactions:
    """A sink that commits offsets together with messages. One transaction at a time.

    ``marker``: the partition whose offset, in a group named after the transactional id, is the number of the
    newest transaction. It must exist; nothing is written to it. ``outcomes``: attempts that were committed
    and aborted so far, and those without a reply (unknown), which turn out to be one or the other.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        transactional_id: str,
        marker: Partition,
        new_producer: Callable[[], TransactionalProducer],
        committed: CommittedOffsets,
    ) -> None:
        self.name = name
        self.connection = ConnectionLog(name, bootstrap, log)
        self.committed = committed
        self._marker = marker
        self._numbers = Membership(transactional_id)
        self._new_producer = new_producer
        self._producer: TransactionalProducer | None = None
        self._number = 0
        self.outcomes: Counter[TransactionOutcome] = Counter()
        self._one = asyncio.Lock()
        self._stop = asyncio.Event()
        self._stands_by = False

    @property
    def retries(self) -> int:
        """Attempts that failed."""
        return self.connection.retries

    async def start(self) -> None:
        """Initialise a producer, unless it is a standby; waits for the broker."""
        self._stop.clear()
        self.connection.connecting()
        if not self._stands_by:
            await self.begin()

    def stand_by(self) -> None:
        """Leave the transactional id to another process until `begin`."""
        self._stands_by = True

    async def begin(self) -> None:
        """Initialise a producer: what an earlier process left open ends, and it can write nothing more."""
        async with self._one:
            newest = await self._renew()
            self._number = 0 if newest is None else newest

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Deliver one message, in a transaction of its own. Raises Fenced, PublishRefused, SinkStopped."""
        try:
            await self.commit([OutgoingMessage(topic, key, payload, headers)], {}, lambda: None)
        except MessagesRefused as error:
            raise PublishRefused(str(error), error.reasons[0]) from error

    async def commit(
        self,
        messages: Sequence[OutgoingMessage],
        points: Mapping[Partition, CommitPoint],
        member: Callable[[], Membership | None],
        sources: Set[Partition] = frozenset(),
    ) -> None:
        """Write the messages and the points; returns when both are in effect, however long that takes.

        ``member``: our membership of the group whose offsets these are, None while the group rebalances.
        ``sources``: partitions that the messages answer, with or without points.

        Raises:
            MessagesRefused, PartitionsMoved: no effect; the rest can be committed. Fenced: no effect, and
            this process cannot go on. SinkStopped: effect unknown.
        """
        async with self._one:
            await self._commit(messages, points, member, sources | points.keys())

    async def stop(self) -> None:
        """Give up what is under way, and close."""
        self._stop.set()
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()
        await self.committed.close()
        self.connection.stopped()

    async def _commit(
        self,
        messages: Sequence[OutgoingMessage],
        points: Mapping[Partition, CommitPoint],
        member: Callable[[], Membership | None],
        partitions: Set[Partition],
    ) -> None:
        number = self._number + 1
        while True:
            if self._producer is None:
                raise SinkStopped(f"{self.name}: stopped before a transaction of {len(messages)} messages")
            offsets = [GroupOffsets(self._numbers, {self._marker: CommitPoint(number)})]
            if partitions:
                owner = await self._membership(partitions, member)
                if own := points or await self._unchanged(owner, partitions):
                    offsets.append(GroupOffsets(owner, own))
            refused: MessagesRefused | None = None
            may_be_ours = True
            try:
                await self._producer.transact(messages, offsets)
            except MessagesRefused as error:
                refused = error
            except TransactionFailed as error:
                may_be_ours = error.unknown
                self.outcomes["unknown"] += error.unknown
                await self.connection.wait_before_retry(error)
            else:
                break
            newest = await self._renew()
            if newest == number and may_be_ours:
                break
            if newest not in (None, number - 1):
                raise Fenced(f"{self.name}: another process has committed transaction {newest} under this id")
            self.outcomes["aborted"] += 1
            if refused is not None:
                raise refused
        self._number = number
        self.outcomes["committed"] += 1
        self.connection.up()

    async def _unchanged(
        self, owner: Membership, partitions: Set[Partition]
    ) -> Mapping[Partition, CommitPoint]:
        """The offsets of these partitions as they are committed, to be committed again.

        A broker refuses a former member by the generation that comes with the offsets of its group. Without
        any, what a process answers that was stopped while its partitions moved would be written twice.
        """
        while True:
            try:
                found = await self.committed(owner.group, sorted(partitions))
            except OffsetsUnknown as error:
                if not await until(self._stop, self.connection.wait_before_retry(error)):
                    raise SinkStopped(f"{self.name}: stopped before a transaction") from error
            else:
                return {
                    partition: CommitPoint(found[partition].offset) for partition in partitions & found.keys()
                }

    async def _membership(
        self, partitions: Set[Partition], member: Callable[[], Membership | None]
    ) -> Membership:
        """Ours, once it is known of all ``partitions`` whether we own them. No attempt is in doubt here."""
        while True:
            if (found := member()) is not None:
                if moved := partitions - found.partitions - found.placing:
                    names = ", ".join(f"{topic}/{number}" for topic, number in sorted(moved))
                    raise PartitionsMoved(
                        frozenset(moved),
                        f"{self.name}: answers to {names}, which another member of the group owns now",
                    )
                if not partitions & found.placing:
                    return found
            if self._stop.is_set():
                raise SinkStopped(f"{self.name}: stopped while the group was rebalancing")
            await asyncio.sleep(0.05)

    async def _renew(self) -> int | None:
        """Put a new producer into the place of the old one; the number of the newest transaction, if any."""
        while not self._stop.is_set():
            producer, self._producer = self._producer, None
            if producer is not None:
                await producer.close()
            self._producer = new = self._new_producer()
            try:
                if await until(self._stop, new.open()):
                    found = await self.committed(self._numbers.group, [self._marker])
                    self.connection.up()
                    return found[self._marker].offset if self._marker in found else None
            except (OffsetsUnknown, TransactionFailed) as error:
                await until(self._stop, self.connection.wait_before_retry(error))
        raise SinkStopped(f"{self.name}: stopped before a producer was initialised")
