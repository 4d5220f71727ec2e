"""Reading behind a group: exactly what is below the limits, in order, whatever lies between the records."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from feeds.kafka_client import quiet_client_log
from feeds.kafka_follower import KafkaFollower
from feeds.kafka_source import KafkaSource
from feeds.mock_broker import MockBroker
from feeds.source import CommitPoint, StartPosition
from tests.feeds.test_feeds_kafka_log import QUICK, Notes, T, produce
from tests.kit import until
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics


class Reading:
    """A follower and what it has read of each partition."""

    def __init__(self, consumer: AIOKafkaConsumer, most: int = 100) -> None:
        self.follower = KafkaFollower(consumer, most)
        self.got: dict[TopicPartition, list[int]] = {}

    async def add(self, *partitions: TopicPartition, start: int = 0) -> None:
        async def place(consumer: AIOKafkaConsumer, partition: TopicPartition) -> None:
            consumer.seek(partition, start)

        await self.follower.add(partitions, place)

    async def all(self) -> None:
        """Until several reads have found nothing."""
        quiet = 0
        while quiet < 3:
            found = await self.follower.read(0.01)
            quiet = 0 if found else quiet + 1
            for partition, records in found.items():
                self.got.setdefault(partition, []).extend(each.offset for each in records)


@pytest.fixture
async def mocked() -> AsyncIterator[tuple[MockBroker, AIOKafkaConsumer]]:
    quiet_client_log()
    with MockBroker() as broker:
        broker.create_topic(T, 2)
        consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap, **QUICK)
        await consumer.start()
        yield broker, consumer
        await consumer.stop()


async def test_nothing_is_read_at_or_beyond_a_limit(mocked: tuple[MockBroker, AIOKafkaConsumer]) -> None:
    broker, consumer = mocked
    await produce(broker.bootstrap, T, 40, partitions=2)
    one, other = TopicPartition(T, 0), TopicPartition(T, 1)
    reading = Reading(consumer, most=6)
    await reading.add(one, start=2)
    await reading.all()
    assert reading.got == {}
    for limit in (3, 3, 11, 20):
        reading.follower.allow({one: limit})
        await reading.all()
        assert reading.got == {one: list(range(2, limit))}
    await reading.add(other)  # the first one goes on where it was
    reading.follower.allow({other: 5})
    await reading.all()
    assert reading.got == {one: list(range(2, 20)), other: list(range(5))}
    assert await reading.follower.behind() == {one: (20, 20), other: (5, 5)}


async def test_one_that_stands_by_alone_is_given_all_and_fences_before_it_reads_what_is_committed() -> None:
    quiet_client_log()
    with MockBroker() as broker:
        broker.create_topic(T)
        await produce(broker.bootstrap, T, 4)
        source = KafkaSource("in", broker.bootstrap, [T], "g", options=QUICK)
        events: list[str] = []

        class Noting(Notes):
            async def on_assigned(self, stored: object) -> dict[tuple[str, int], StartPosition]:
                events.append("assigned")
                return {}

        async def before() -> None:
            events.append("fenced")

        source.stand_by(before)
        notes = Noting(source, "")
        assert await source.stored() == {}
        await source.start()
        try:
            async for batch in source.batches():
                notes.got += batch
                if len(notes.got) == 4:
                    break
        finally:
            await source.stop()
        assert events == ["fenced", "assigned"]


@pytest.mark.kafka
async def test_marks_of_transactions_hide_nothing_and_let_nothing_through(real_kafka: RealKafka) -> None:
    """Every limit of a topic with committed and aborted transactions."""
    quiet_client_log()
    topic = f"follow.{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {topic: 1})
    producer = AIOKafkaProducer(bootstrap_servers=real_kafka.bootstrap, transactional_id=topic)
    await producer.start()
    for n in range(5):
        await producer.begin_transaction()
        for _ in range(2):
            await producer.send_and_wait(topic, b"x", partition=0)
        await (producer.abort_transaction() if n == 1 else producer.commit_transaction())
    await producer.stop()  # offsets 3k and 3k+1 are records, 3k+2 is a mark
    kept = [n for n in range(15) if n % 3 < 2 and n // 3 != 1]
    consumer = AIOKafkaConsumer(
        bootstrap_servers=real_kafka.bootstrap, isolation_level="read_committed", **QUICK
    )
    await consumer.start()
    try:
        partition = TopicPartition(topic, 0)
        reading = Reading(consumer)
        await reading.add(partition)
        for limit in range(1, 16):
            reading.follower.allow({partition: limit})
            await reading.all()
            assert reading.got.get(partition, []) == [n for n in kept if n < limit], limit
    finally:
        await consumer.stop()


@pytest.mark.kafka
async def test_the_end_of_librdkafka_s_strings_is_no_part_of_the_text(real_kafka: RealKafka) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    quiet_client_log()
    topic = f"text.{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {topic: 1})
    settings = {"bootstrap.servers": real_kafka.bootstrap, "group.id": topic, "enable.auto.commit": False}
    other = confluent.Consumer(settings)
    point = confluent.TopicPartition(topic, 0, 3, "the text")
    other.commit(offsets=[point], asynchronous=False)
    other.close()
    source = KafkaSource("in", real_kafka.bootstrap, [topic], topic)
    found: dict[object, CommitPoint] = {}

    async def look() -> bool:
        found.update(await source.stored())
        return bool(found)

    await look()
    await until(lambda: found == {(topic, 0): CommitPoint(3, "the text")})
