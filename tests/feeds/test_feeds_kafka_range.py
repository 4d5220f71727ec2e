"""Reading Kafka from one offset to another: on a mock broker, and what only Apache Kafka can do on that."""

import asyncio
import time
import uuid

import pytest

from feeds.kafka_client import BrokerError
from feeds.kafka_range import KafkaRange, OffsetsGone
from feeds.kafka_sink import KafkaSink
from feeds.mock_broker import MockBroker
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics, delete_records, free_ports


async def fill(bootstrap: str, topic: str, first: int, count: int) -> None:
    sink = KafkaSink("fill", bootstrap)
    await sink.start()
    for n in range(first, first + count):
        await sink.publish(topic, b"k", b"%d" % n, {})
    await sink.stop()


async def read(reader: KafkaRange, topic: str, span: range) -> list[int]:
    return [int(m.payload) async for batch in reader.read((topic, 0), span) for m in batch]


async def test_a_span_is_read_from_its_first_to_before_its_end() -> None:
    with MockBroker() as broker:
        broker.create_topic("a", 1)
        broker.create_topic("b", 2)
        await fill(broker.bootstrap, "a", 0, 30)
        async with KafkaRange(broker.bootstrap) as reader:
            assert await reader.spans(["a", "b"]) == {
                ("a", 0): range(0, 30), ("b", 0): range(0, 0), ("b", 1): range(0, 0)
            }  # fmt: skip
            for span in (range(0, 30), range(7, 8), range(29, 30), range(5, 5)):
                assert await read(reader, "a", span) == list(span)
            await fill(broker.bootstrap, "a", 30, 1)
            assert (await reader.spans(["a"]))["a", 0] == range(0, 31)
            with pytest.raises(BrokerError, match="no topic 'c'"):
                await reader.spans(["c"])


async def test_a_reader_that_takes_long_over_a_batch_gets_the_next_one() -> None:
    with MockBroker() as broker:
        broker.create_topic("a", 1)
        await fill(broker.bootstrap, "a", 0, 3)
        found = []
        async with KafkaRange(broker.bootstrap, timeout_s=2.0) as reader:
            async for batch in reader.read(("a", 0), range(0, 3)):
                found += [int(message.payload) for message in batch]
                time.sleep(2.2)  # noqa: ASYNC251  # the loop stands still, as in a forward pass
        assert found == [0, 1, 2]


async def test_a_broker_that_is_not_there_is_told_in_time() -> None:
    (port,) = free_ports(1)
    with pytest.raises(BrokerError, match="Kafka"):
        async with KafkaRange(f"127.0.0.1:{port}", timeout_s=2.0):
            pass


@pytest.mark.kafka
async def test_times_and_deleted_records(real_kafka: RealKafka) -> None:
    topic = f"range.{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {topic: 1})
    await fill(real_kafka.bootstrap, topic, 0, 5)
    await asyncio.sleep(0.05)
    middle = time.time_ns()
    await asyncio.sleep(0.05)
    await fill(real_kafka.bootstrap, topic, 5, 5)
    async with KafkaRange(real_kafka.bootstrap) as reader:
        assert await reader.offset_at((topic, 0), 0) == 0
        assert await reader.offset_at((topic, 0), middle) == 5
        assert await reader.offset_at((topic, 0), time.time_ns() + 10**12) is None
        await delete_records(real_kafka.bootstrap, topic, 0, before=4)
        assert (await reader.spans([topic]))[topic, 0] == range(4, 10)
        assert await read(reader, topic, range(4, 10)) == list(range(4, 10))
        with pytest.raises(OffsetsGone, match=f"{topic}/0"):
            await read(reader, topic, range(2, 10))
