"""Reading behind a group: exactly what is below the limits, in order, whatever lies between the records."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from feeds.kafka_client import quiet_client_log
from feeds.kafka_follower import KafkaFollower
from feeds.source import CommitPoint, StartPosition
from tests.feeds.test_feeds_kafka_log import Notes, T, produce, two_partitions
from tests.kit.kafka import producing
from tests.kit.kafka_clients import KafkaClients, take


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


@asynccontextmanager
async def consuming(bootstrap: str) -> AsyncIterator[AIOKafkaConsumer]:
    quiet_client_log()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", fetch_max_wait_ms=20
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


@two_partitions
async def test_nothing_is_read_at_or_beyond_a_limit(kafka: KafkaClients) -> None:
    await produce(kafka.bootstrap, T, 40, partitions=2)
    async with consuming(kafka.bootstrap) as consumer:
        await read_up_to_limits(Reading(consumer, most=6))


async def read_up_to_limits(reading: Reading) -> None:
    one, other = TopicPartition(T, 0), TopicPartition(T, 1)
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


async def test_one_that_stands_by_alone_is_given_all_and_fences_before_it_reads_what_is_committed(
    kafka: KafkaClients,
) -> None:
    await produce(kafka.bootstrap, T, 4)
    source, events = kafka.source("g"), list[str]()

    class Noting(Notes):
        async def on_assigned(self, stored: object) -> dict[tuple[str, int], StartPosition]:
            events.append("assigned")
            return {}

    async def before() -> None:
        events.append("fenced")

    source.stand_by(before)
    Noting(source, "")
    assert await source.stored() == {}
    await source.start()
    assert len(await take(source, 4)) == 4
    assert events == ["fenced", "assigned"]


@pytest.mark.kafka
async def test_marks_of_transactions_hide_nothing_and_let_nothing_through(real: KafkaClients) -> None:
    """Every limit of a topic with committed and aborted transactions."""
    topic = real.topic
    async with producing(real.bootstrap, transactional_id=topic) as producer:
        for n in range(5):
            await producer.begin_transaction()
            for _ in range(2):
                await producer.send_and_wait(topic, b"x", partition=0)
            await (producer.abort_transaction() if n == 1 else producer.commit_transaction())
    # offsets 3k and 3k+1 are records, 3k+2 is a mark
    kept = [n for n in range(15) if n % 3 < 2 and n // 3 != 1]
    async with consuming(real.bootstrap) as consumer:
        partition = TopicPartition(topic, 0)
        reading = Reading(consumer)
        await reading.add(partition)
        for limit in range(1, 16):
            reading.follower.allow({partition: limit})
            await reading.all()
            assert reading.got.get(partition, []) == [n for n in kept if n < limit], limit


@pytest.mark.kafka
async def test_a_text_that_another_client_left_beside_an_offset_is_ignored(real: KafkaClients) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    topic = real.topic
    settings = {"bootstrap.servers": real.bootstrap, "group.id": topic, "enable.auto.commit": False}
    other = confluent.Consumer(settings)
    point = confluent.TopicPartition(topic, 0, 3, "the text")
    other.commit(offsets=[point], asynchronous=False)
    other.close()
    assert await real.source(topic).stored() == {(topic, 0): CommitPoint(3)}
