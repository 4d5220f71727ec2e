"""Copies numbered records in transactions, through faults, and counts what a read_committed reader gets."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from aiokafka import AIOKafkaConsumer, TopicPartition

from feeds.kafka_transactions import (
    Fenced,
    KafkaTransactions,
    PartitionsMoved,
    TransactionalProducer,
)
from feeds.librdkafka import LibrdkafkaProducer, StableOffsets
from feeds.source import (
    CommitPoint,
    Membership,
    OffsetsUnknown,
    OutgoingMessage,
    Partition,
    SinkStopped,
)
from tests.kit.kafka import KafkaCluster, KafkaServer, create_topics

NewProducer = Callable[[str, str], TransactionalProducer]
"""From the brokers and the transactional id."""

TIMEOUT_S = 3.0
"""Of a transaction, before its producer is given up."""


def librdkafka(bootstrap: str, transactional_id: str, timeout_s: float = TIMEOUT_S) -> TransactionalProducer:
    return LibrdkafkaProducer(bootstrap, transactional_id, {}, timeout_s=timeout_s)


@dataclass
class Copy:
    """One job: records 0 to ``records`` - 1 of a partition, ``batch`` in a transaction, copied in order.

    ``start`` and `run` again are a process that was killed and started again. ``outcomes``: what happened.
    """

    server: KafkaServer
    name: str
    new_producer: NewProducer = librdkafka
    records: int = 300
    batch: int = 20
    bootstrap: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)

    async def prepare(self) -> None:
        await create_topics(self.server.bootstrap, {self.input[0]: 1, self.output: 1})

    @property
    def input(self) -> Partition:
        return f"in.{self.name}", 0

    @property
    def output(self) -> str:
        return f"out.{self.name}"

    def member(self) -> Membership:
        return Membership(f"copy.{self.name}", partitions=frozenset({self.input}))

    def sink(self) -> KafkaTransactions:
        bootstrap, identity = self.bootstrap or self.server.behind, f"copy-{self.name}"
        new, stable = partial(self.new_producer, bootstrap, identity), StableOffsets(bootstrap, {}, TIMEOUT_S)
        return KafkaTransactions(self.name, bootstrap, identity, (self.output, 0), new, stable)

    async def run(self, before: Callable[[int], None] = lambda _number: None) -> None:
        """Copy from the committed offset to the end. ``before(number)`` each transaction may bring faults."""
        sink = self.sink()
        try:
            await sink.start()
            at = await self.committed(sink)
            while at < self.records:
                before(at // self.batch)
                upto = min(at + self.batch, self.records)
                messages = [OutgoingMessage(self.output, None, b"%d" % number) for number in range(at, upto)]
                point = CommitPoint(upto)
                await sink.commit(messages, {self.input: point}, self.member)
                at = upto
        finally:
            self.outcomes.update(sink.outcomes)
            await sink.stop()

    async def run_to_the_end(
        self, before: Callable[[int], None] = lambda _number: None, within_s: float = 120.0
    ) -> None:
        """As a supervisor does: a copier that ends before its time is started again."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        await self.run(before)
                        return
                    except (Fenced, PartitionsMoved, SinkStopped) as error:
                        self.outcomes[type(error).__name__] += 1
        except TimeoutError:
            self.outcomes["hung"] += 1

    async def committed(self, sink: KafkaTransactions) -> int:
        while True:
            try:
                found = await sink.committed(self.member().group, [self.input])
                return found[self.input].offset if found else 0
            except OffsetsUnknown:
                await asyncio.sleep(0.2)

    async def read(self) -> list[int]:
        """What a reader of committed records gets."""
        return await read_committed(self.server.bootstrap, self.output)


async def read_committed(bootstrap: str, topic: str) -> list[int]:
    """The numbers in partition 0, of committed transactions; waits until none is open."""
    partition, got = TopicPartition(topic, 0), list[int]()
    # the end of what is committed may lie before a transaction whose mark is still to be written
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as whole:
        end = (await whole.end_offsets([partition]))[partition]
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        consumer.assign([partition])
        async with asyncio.timeout(60):
            while await consumer.position(partition) < end:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    got += [int(each.value) for each in records]
        return got
    finally:
        await consumer.stop()


@dataclass(frozen=True)
class Verdict:
    """Of what was read: ``lost``, ``doubled``: numbers; ``ordered``: each later than the one before."""

    lost: int
    doubled: int
    ordered: bool

    @classmethod
    def of(cls, read: list[int], records: int) -> "Verdict":
        counts = Counter(read)
        return cls(
            sum(number not in counts for number in range(records)),
            sum(count - 1 for count in counts.values()),
            read == sorted(read),
        )


RIGHT = Verdict(lost=0, doubled=0, ordered=True)


def hanging(server: KafkaServer | KafkaCluster) -> list[str]:
    """Transactions that no coordinator will end, by the release's own tool: where, and whose.

    It asks for open transactions first and for their coordinators' view then, and takes one that ends in
    between for a hanging one. So what is found must be found twice.
    """
    first = _found_hanging(server)
    return sorted(first & _found_hanging(server)) if first else []


def _found_hanging(server: KafkaServer | KafkaCluster) -> set[str]:
    printed = server.run_tool(
        "org.apache.kafka.tools.TransactionsCommand",
        *("--bootstrap-server", server.bootstrap, "find-hanging", "--broker-id", "1"),
        *("--max-transaction-timeout", "0"),  # minutes; by default what is younger than 15 is passed over
    )
    head, *rows = [line.split() for line in printed.splitlines() if line.strip()]
    assert head[:3] == ["Topic", "Partition", "ProducerId"], printed
    return {" ".join(row[:6]) for row in rows}  # behind these is what grows: time
