"""A sink that leaves its transactional id to another process until it begins; a broker that restarts."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from feeds.kafka_transactions import Fenced, GroupOffsets, KafkaTransactions
from feeds.librdkafka import LibrdkafkaProducer
from feeds.source import CommitPoint, Membership, OutgoingMessage, Partition
from tests.kit import until
from tests.kit.daemon import committed
from tests.kit.kafka import KafkaServer, create_topics

MARKER = ("answers", 0)


class Broker:
    """Of one transactional id: whose producer is the newest, and the number of the newest transaction."""

    def __init__(self) -> None:
        self.newest: Producer | None = None
        self.number: int | None = None

    def sink(self) -> KafkaTransactions:
        return KafkaTransactions("kafka", "a:1", "pair", MARKER, lambda: Producer(self), Committed(self))


class Producer:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def open(self) -> None:
        self.broker.newest = self

    async def transact(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        if self.broker.newest is not self:
            raise Fenced("another process has this transactional id")
        self.broker.number = offsets[0].points[MARKER].offset

    async def close(self) -> None:
        pass


class Committed:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def __call__(self, group: str, partitions: Sequence[Partition]) -> Mapping[Partition, CommitPoint]:
        return {} if self.broker.number is None else {MARKER: CommitPoint(self.broker.number)}

    async def close(self) -> None:
        pass


async def write(sink: KafkaTransactions) -> None:
    await sink.commit([OutgoingMessage("answers", None, b"")], {}, lambda: None)


async def test_a_standby_fences_when_it_begins_and_not_before_and_the_numbers_go_on() -> None:
    broker = Broker()
    first, second = broker.sink(), broker.sink()
    for sink in (first, second):
        sink.stand_by()
        await sink.start()
    assert broker.newest is None
    await first.begin()
    await write(first)
    await write(first)
    await second.begin()
    with pytest.raises(Fenced):
        await write(first)
    await write(second)
    assert broker.number == 3
    await first.begin()  # as one that stands by again
    await write(first)
    assert broker.number == 4
    for sink in (first, second):
        await sink.stop()


TICKS = ("ticks", 3)


class Group:
    """Offsets of the group "desk", and what a producer was given to commit."""

    def __init__(self, stored: Mapping[Partition, CommitPoint]) -> None:
        self.stored, self.asked = stored, list[tuple[str, list[Partition]]]()
        self.committed: list[Sequence[GroupOffsets]] = []

    async def open(self) -> None:
        pass

    async def transact(self, messages: Sequence[OutgoingMessage], offsets: Sequence[GroupOffsets]) -> None:
        self.committed.append(offsets)

    async def close(self) -> None:
        pass

    async def __call__(self, group: str, partitions: Sequence[Partition]) -> Mapping[Partition, CommitPoint]:
        self.asked.append((group, list(partitions)))
        return self.stored if group == "desk" else {}


@pytest.mark.parametrize("stored", [{TICKS: CommitPoint(41, {"s": b"state"})}, {}], ids=["committed", "new"])
async def test_answers_without_new_offsets_are_fenced_by_those_that_are_committed(
    stored: dict[Partition, CommitPoint],
) -> None:
    """A broker knows a former member by the generation that comes with offsets of its group alone."""
    group = Group(stored)
    sink = KafkaTransactions("kafka", "a:1", "pair", MARKER, lambda: group, group)  # type: ignore[arg-type]
    await sink.start()
    ours = Membership("desk", "member", 7, partitions=frozenset({TICKS}))
    message = [OutgoingMessage("answers", None, b"")]
    await sink.commit(message, {}, lambda: ours, {TICKS})
    ((_, *again),) = group.committed
    assert again == ([GroupOffsets(ours, {TICKS: CommitPoint(41)})] if stored else [])
    await sink.commit(message, {TICKS: CommitPoint(50)}, lambda: ours, {TICKS})
    assert group.committed[1][1:] == [GroupOffsets(ours, {TICKS: CommitPoint(50)})]
    await sink.commit(message, {}, lambda: ours)  # about no partition
    assert len(group.committed[2]) == 1
    assert [each for each in group.asked if each[0] == "desk"] == [("desk", [TICKS])]
    await sink.stop()


@pytest.mark.kafka
async def test_a_producer_goes_on_when_its_only_broker_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """It must not hang, which a new producer would follow; that the broker is away is logged meanwhile."""
    with KafkaServer() as broker:
        await create_topics(broker.bootstrap, {"answers": 1, "ticks": 1})
        await committed(broker.bootstrap, "group", "ticks", 1)  # it has a coordinator, which may take a while
        producer, group = LibrdkafkaProducer(broker.bootstrap, "one", {}), Membership("group")
        await producer.open()

        async def write(number: int) -> None:
            points = {("ticks", 0): CommitPoint(number)}
            await producer.transact(
                [OutgoingMessage("answers", b"k", b"v", {})], [GroupOffsets(group, points)]
            )

        await write(1)
        await write(2)
        caplog.clear()
        await asyncio.to_thread(broker.kill)
        await until(lambda: "onnect" in caplog.text)
        await asyncio.to_thread(broker.start)
        await write(3)
        await producer.close()
