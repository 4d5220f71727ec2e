"""Records that Kafka has deleted before they were read are told once; other gaps in offsets are not."""

import asyncio
import logging

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import OffsetOutOfRangeError

from feeds.kafka_follower import KafkaFollower
from feeds.kafka_source import KafkaSource
from feeds.kafka_start import KafkaStart
from feeds.mock_broker import MockBroker
from feeds.source import CommitPoint, Incoming
from tests.feeds.test_feeds_kafka_log import Notes
from tests.kit import until
from tests.kit.kafka import administering, delete_records, producing
from tests.kit.kafka_clients import KafkaClients, take
from tests.kit.records import TOPIC

DELETED = "were deleted before they were read"
REMADE = "it was truncated, or deleted and made again"


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, "feeds")
    return caplog


async def write(clients: KafkaClients, count: int, partition: int = 0, payload: bytes = b"x") -> None:
    async with producing(clients.bootstrap) as producer:
        for _ in range(count):
            await producer.send_and_wait(clients.topic, payload, partition=partition)


async def flood(clients: KafkaClients) -> None:
    """More than the embedded broker keeps, in batches of one record."""
    async with producing(clients.bootstrap) as producer:
        for _ in range(12):
            await producer.send_and_wait(clients.topic, bytes(900_000), partition=0)


def follow(clients: KafkaClients, source: KafkaSource) -> list[Incoming]:
    """What it reads from now on."""
    got: list[Incoming] = []

    async def read() -> None:
        async for batch in source.batches():
            got.extend(batch)

    clients.run(read())
    return got


async def test_what_is_deleted_while_it_is_paused_is_told_once_and_reading_goes_on(
    kafka: KafkaClients, broker: MockBroker, told: pytest.LogCaptureFixture
) -> None:
    source = await kafka.open_source("g", poll_ms=50, options={"max_partition_fetch_bytes": 1 << 20})
    await write(kafka, 5)
    got = follow(kafka, source)
    await until(lambda: len(got) == 5)
    source.pause()
    await asyncio.sleep(0.5)  # a fetch may be under way
    await flood(kafka)
    source.resume()
    await until(lambda: got[-1].offset == 16)
    offsets = [message.offset for message in got]
    first = offsets[5]
    assert offsets == [*range(5), *range(first, 17)]
    if first == 5:
        pytest.fail("nothing was deleted")
    assert source.deleted == {(TOPIC, 0): first - 5}
    assert told.text.count(DELETED) == 1
    assert f"offsets 5 to {first - 1} of {TOPIC}/0 {DELETED}" in told.text
    assert source.connection.retries == 0, "it is not opened again"


async def test_what_is_deleted_behind_the_committed_offset_is_told_at_the_start(
    kafka: KafkaClients, told: pytest.LogCaptureFixture
) -> None:
    """And not again, once more is committed."""
    await write(kafka, 5)
    first = await kafka.open_source("g")
    await take(first, 5)
    await first.commit({(TOPIC, 0): CommitPoint(3)})
    await first.stop()
    await flood(kafka)
    second = await kafka.open_source("g")
    got = await take(second, 1)
    begin = got[0].offset
    assert second.deleted == {(TOPIC, 0): begin - 3}
    assert f"offsets 3 to {begin - 1} of {TOPIC}/0 {DELETED}" in told.text
    await second.commit({(TOPIC, 0): CommitPoint(begin)})
    await second.stop()
    third = await kafka.open_source("g")
    assert (await take(third, 1))[0].offset == begin
    assert third.deleted == {}
    assert told.text.count(DELETED) == 1


@pytest.mark.parametrize("span_ns", [0, 10**9], ids=["", "windows look back"])
async def test_a_committed_offset_beyond_the_end_is_told_and_the_log_is_read_whole(
    kafka: KafkaClients, told: pytest.LogCaptureFixture, span_ns: int
) -> None:
    await write(kafka, 5)
    first = await kafka.open_source("g")
    await take(first, 5)
    await first.commit({(TOPIC, 0): CommitPoint(1000)})
    await first.stop()
    second = kafka.source("g")
    second.set_retention(span_ns, skips=False)
    notes = Notes(second, "")
    await second.start()
    assert [message.offset for message in await take(second, 5)] == list(range(5))
    assert f"{TOPIC}/0 ends at offset 5, before offset 1000" in told.text
    assert told.text.count(REMADE) == 1
    assert second.deleted == {(TOPIC, 0): 1}
    assert notes.stored == {(TOPIC, 0): CommitPoint(0)}, "nothing that comes is taken for history"
    assert notes.made_anew == [(TOPIC, 0)]


@pytest.mark.kafka
async def test_one_partition_loses_records_and_the_others_are_read_on(
    real: KafkaClients, told: pytest.LogCaptureFixture
) -> None:
    source = await real.open_source(real.topic, poll_ms=50)
    got = follow(real, source)
    for partition in (0, 1):
        await write(real, 10, partition)
    await until(lambda: len(got) == 20)
    source.pause()
    await asyncio.sleep(1.0)  # a fetch may be under way
    for partition in (0, 1):
        await write(real, 20, partition)
    await delete_records(real.bootstrap, real.topic, 0, before=25)
    assert source.deleted == {}
    source.resume()
    await until(lambda: len(got) == 20 + 5 + 20)
    assert sorted((m.partition, m.offset) for m in got[20:]) == [
        *((0, n) for n in range(25, 30)),
        *((1, n) for n in range(10, 30)),
    ]
    assert source.deleted == {(real.topic, 0): 15}
    assert told.text.count(f"offsets 10 to 24 of {real.topic}/0 {DELETED}") == 1
    assert told.text.count(DELETED) == 1


@pytest.mark.kafka
async def test_what_is_deleted_before_it_was_read_behind_its_owner_is_told(
    real: KafkaClients, told: pytest.LogCaptureFixture
) -> None:
    """What was read of the other partition meanwhile is not lost by that."""
    both = one, other = TopicPartition(real.topic, 0), TopicPartition(real.topic, 1)
    start = KafkaStart("in", "committed", True, lambda: 0)
    options = {"auto_offset_reset": "none", "fetch_max_wait_ms": 20}
    async with AIOKafkaConsumer(bootstrap_servers=real.bootstrap, **options) as consumer:
        follower = KafkaFollower(consumer, 100)
        got: dict[TopicPartition, list[int]] = {one: [], other: []}

        async def place(reading: AIOKafkaConsumer, partition: TopicPartition) -> None:
            await asyncio.sleep(0.3)  # the client looks for positions that it lacks
            await start.resume(reading, partition, 0, None)

        async def read_up_to(limit: int) -> None:
            follower.allow({one: limit, other: limit})
            async with asyncio.timeout(60):
                while any(at < limit for at, _ in (await follower.behind()).values()):
                    try:
                        found = await follower.read(0.01)
                    except OffsetOutOfRangeError:
                        await follower.go_on(start)
                        continue
                    for partition, records in found.items():
                        got[partition] += [record.offset for record in records]

        for partition in both:
            await write(real, 5, partition.partition)
        await follower.add(both, place)
        await read_up_to(5)
        consumer.pause(*both)
        await asyncio.sleep(1.0)  # a fetch may be under way
        for partition in both:
            await write(real, 5, partition.partition)
        await delete_records(real.bootstrap, real.topic, 0, before=8)
        consumer.resume(*both)
        await read_up_to(10)
    assert got == {one: [*range(5), 8, 9], other: list(range(10))}
    assert start.deleted == {(real.topic, 0): 3}
    assert told.text.count(f"offsets 5 to 7 of {real.topic}/0 {DELETED}") == 1


@pytest.mark.kafka
async def test_deleted_marks_of_transactions_and_what_was_read_are_no_loss(
    real: KafkaClients, told: pytest.LogCaptureFixture
) -> None:
    """Also where the log is empty from where it was read to."""
    source = await real.open_source(real.topic, poll_ms=50)
    got = follow(real, source)
    async with producing(real.bootstrap, transactional_id=real.topic) as producer:

        async def commit(count: int) -> None:
            async with producer.transaction():
                for _ in range(count):
                    await producer.send(real.topic, b"x", partition=0)

        for count in (3, 2):
            await commit(count)
        await producer.begin_transaction()
        await producer.send_and_wait(real.topic, b"never", partition=0)
        await producer.abort_transaction()  # 3 + 1, 2 + 1, 1 + 1: the end is 9
        await until(lambda: len(got) == 5 and source.reached[real.topic, 0][1] == 9)
        await delete_records(real.bootstrap, real.topic, 0, before=9)
        await asyncio.sleep(1.0)
        await commit(1)
    await until(lambda: len(got) == 6)
    assert [message.offset for message in got] == [0, 1, 2, 4, 5, 9]
    assert source.deleted == {}
    assert not told.records


@pytest.mark.kafka
async def test_gaps_of_a_compacted_topic_are_no_loss(
    real: KafkaClients, told: pytest.LogCaptureFixture
) -> None:
    """Its cleaner leaves the newest record of each key, and the log begins where it did."""
    topic = f"{real.topic}.compacted"
    often = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.001",
        "max.compaction.lag.ms": "100",
    }
    async with administering(real.bootstrap) as admin:
        await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=often)])
    async with producing(real.bootstrap) as producer, KafkaClients(real.bootstrap, topic) as clients:
        sent = 0

        async def offsets() -> list[int]:
            """What is left, as a start from the committed offset 1 reads it."""
            nonlocal sent
            for _ in range(3):
                await producer.send_and_wait(topic, b"x", key=b"one", partition=0)
                await asyncio.sleep(0.12)
            sent += 3
            source = await clients.open_source(topic)
            found: list[int] = []
            async with asyncio.timeout(30):
                async for batch in source.batches():
                    found += [message.offset for message in batch]
                    if found[-1] == sent - 1:
                        break
            await source.commit({(topic, 0): CommitPoint(1)})
            await source.stop()
            assert source.deleted == {}
            return found

        async with asyncio.timeout(100):
            while len(found := await offsets()) >= sent - 1:  # noqa: ASYNC110 - the cleaner sends no event
                await asyncio.sleep(2.0)
        assert found[0] > 1, "the committed offset is not there any more"
    assert not told.records


@pytest.mark.kafka
async def test_a_topic_that_is_made_again_while_it_is_read_is_told_and_read_whole(
    real: KafkaClients, told: pytest.LogCaptureFixture
) -> None:
    source = real.source(real.topic, poll_ms=50)
    notes = Notes(source, "", commits=False)
    await source.start()
    real.run(notes.read())
    await write(real, 10)
    await until(lambda: len(notes.got) == 10)
    await source.commit({(real.topic, 0): CommitPoint(10)})
    async with administering(real.bootstrap) as admin:
        await admin.delete_topics([real.topic])
        await asyncio.sleep(1.0)
        await admin.create_topics([NewTopic(real.topic, 2, 1)])
    await write(real, 4, payload=b"new")
    await until(lambda: len(notes.got) == 14, 60)
    assert [(m.offset, m.payload) for m in notes.got[10:]] == [(n, b"new") for n in range(4)]
    assert (real.topic, 0) in notes.made_anew
    assert source.deleted == {(real.topic, 0): 1}
    assert told.text.count(REMADE) == 1
