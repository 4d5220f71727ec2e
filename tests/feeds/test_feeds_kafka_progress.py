"""Records beside committed offsets, in a compacted topic of a real Apache Kafka."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import TopicAuthorizationFailedError

from feeds.backoff import ConnectionLog
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.kafka_client import Clients
from feeds.kafka_progress import ProgressTopic, ensure_topic, is_compacted, read_progress
from feeds.source import CommitFailed, CommitPoint
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics, producing

pytestmark = pytest.mark.kafka
P, Q = ("ticks", 0), ("ticks", 1)
Open = Callable[..., ProgressTopic]


@pytest.fixture
def topic() -> str:
    """One that no other run uses."""
    return f"progress.{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def open_topic(real_kafka: RealKafka, topic: str) -> AsyncIterator[Open]:
    settings = {"bootstrap_servers": real_kafka.bootstrap}
    async with AsyncExitStack() as stack:

        def made(group: str = "g") -> ProgressTopic:
            connection = ConnectionLog("progress", real_kafka.bootstrap, logging.getLogger())
            clients = Clients(AIOKafkaConsumer, connection, settings, 5.0)
            opened = ProgressTopic(topic, group, settings, clients)
            stack.push_async_callback(opened.stop)
            return opened

        yield made


async def written(real_kafka: RealKafka, topic: str) -> int:
    async with AIOKafkaConsumer(topic, bootstrap_servers=real_kafka.bootstrap) as consumer:
        return sum((await consumer.end_offsets(consumer.assignment())).values())


async def test_thousands_of_records_are_there_for_the_next_reader(
    real_kafka: RealKafka, topic: str, open_topic: Open
) -> None:
    """Only what changed is written, and what a point lacks is deleted."""
    first, point = open_topic(), CommitPoint(7, {f"w/session-{n}": b"%d" % n for n in range(2000)})
    assert await first.join({P: CommitPoint(7)}) == {P: CommitPoint(7)}
    assert await is_compacted({"bootstrap_servers": real_kafka.bootstrap}, topic)
    await first.write({P: point}, 30.0)
    assert await open_topic().join({P: CommitPoint(7)}) == {P: point}
    assert await open_topic("another group").join({P: CommitPoint(7)}) == {P: CommitPoint(7)}
    assert await written(real_kafka, topic) == 2000
    left = {name: value for name, value in point.state.items() if name != "w/session-5"}
    await first.write({P: CommitPoint(9, left | {"w/session-6": b"more"})}, 30.0)
    assert await written(real_kafka, topic) == 2002
    found = await read_progress(topic, "g", {"bootstrap_servers": real_kafka.bootstrap}, ["ticks"])
    assert found == {P: left | {"w/session-6": b"more"}}


async def test_a_writer_whose_partition_went_elsewhere_overwrites_nothing(open_topic: Open) -> None:
    old, new = open_topic(), open_topic()
    await old.write({P: CommitPoint(5, {"old/aaa": b"5"}), Q: CommitPoint(1, {"old/bbb": b"1"})}, 30.0)
    points = await new.join({P: CommitPoint(5)})
    new.note(points)
    await new.write({P: CommitPoint(8, {"new/aaa": b"8"})}, 30.0)
    assert (await open_topic().join({P: CommitPoint(8)}))[P].state == {"new/aaa": b"8"}
    await old.write({P: CommitPoint(6, {"old/aaa": b"6"})}, 30.0)  # it wakes up
    found = await new.join({P: CommitPoint(8), Q: CommitPoint(1)})
    assert found[P].state == {"new/aaa": b"8", "old/aaa": b"6"}
    assert found[Q].state == {"old/bbb": b"1"}


async def test_a_reader_waits_for_an_open_transaction_and_reads_no_aborted_one(
    real_kafka: RealKafka, topic: str, open_topic: Open
) -> None:
    """Offsets that were read before may be of that transaction."""
    reader = open_topic()
    await reader.join({})
    key = msgspec.json.encode(["g", *P, "w/aaa"])
    async with producing(real_kafka.bootstrap, transactional_id=topic) as producer:
        for value, commits in ((b"1", True), (b"2", False), (b"3", True)):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, value, key)
            reading = asyncio.ensure_future(reader.join({P: CommitPoint(0)}))
            await asyncio.sleep(0.3)
            assert not reading.done()
            await (producer.commit_transaction() if commits else producer.abort_transaction())
            assert (await reading)[P].state == {"w/aaa": value if commits else b"1"}


async def test_records_of_others_are_passed_by(real_kafka: RealKafka, topic: str, open_topic: Open) -> None:
    reader = open_topic()
    await reader.join({})
    async with producing(real_kafka.bootstrap) as producer:
        for key in (b"by hand", b'["g", "ticks"]', b'["other", "ticks", 0, "w/aaa"]'):
            await producer.send_and_wait(topic, b"x", key)
    assert (await reader.join({P: CommitPoint(0)}))[P].state == {}


async def test_what_was_not_stored_is_written_again(
    open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, point = open_topic(), CommitPoint(5, {"w/aaa": b"5"})

    async def refused(*_: object, **__: object) -> None:
        raise TopicAuthorizationFailedError

    with monkeypatch.context() as patch:
        patch.setattr(AIOKafkaProducer, "send", refused)
        with pytest.raises(CommitFailed, match="TopicAuthorizationFailed"):
            await writer.write({P: point}, 30.0)
    await writer.write({P: point}, 30.0)
    assert (await open_topic().join({P: CommitPoint(5)}))[P] == point


async def test_check_names_a_topic_that_would_lose_records(real_kafka: RealKafka, topic: str) -> None:
    connector = KafkaSourceConnector(bootstrap=real_kafka.bootstrap, topics=(), progress_topic=topic)

    def found() -> list[bool]:
        return [each.ok for each in connector.check() if each.key == "progress_topic"]

    assert await asyncio.to_thread(found) == [True], "it will be created"
    await create_topics(real_kafka.bootstrap, {topic: 1})
    assert await asyncio.to_thread(found) == [False]
    brokers, compacted = {"bootstrap_servers": real_kafka.bootstrap}, f"{topic}.compacted"
    connector = KafkaSourceConnector(bootstrap=real_kafka.bootstrap, topics=(), progress_topic=compacted)
    await asyncio.gather(*(ensure_topic(brokers, compacted) for _ in range(3)))
    assert await asyncio.to_thread(found) == []
