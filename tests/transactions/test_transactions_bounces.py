"""Apache Kafka's own transactions test (transactions_test.py), rebuilt: a copy through bounces.

Its plan: 100,000 messages, 750 in a transaction, copied while the broker or the copier is bounced three
times, cleanly or hard, and a read_committed reader runs. What is read is the input: each once, in order.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Literal

import pytest
from aiokafka import AIOKafkaConsumer

from feeds.kafka_client import quiet_client_log
from feeds.kafka_transactions import Fenced
from tests.kit import until
from tests.kit.kafka import KafkaServer
from tests.transactions.copying import RIGHT, Copy, Verdict, hanging, librdkafka

pytestmark = pytest.mark.kafka

BATCH, BOUNCES = 750, 3
Bounce = Literal["hard_bounce", "clean_bounce"]


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    quiet_client_log()
    # as published: groups must not wait, and a hard bounce must be noticed
    with KafkaServer(more={"offsets.topic.num.partitions": 4}) as running:
        yield running


async def read_along(server: KafkaServer, topic: str, got: list[int]) -> None:
    """The concurrent reader."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=server.bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        while True:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                got += [int(each.value) for each in records]
    finally:
        await consumer.stop()


async def bounce_broker(server: KafkaServer, how: Bounce) -> None:
    await asyncio.to_thread(server.kill if how == "hard_bounce" else server.stop)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(server.start)


def reached(copy: Copy, transactions: int) -> bool:
    """Whether so many are committed, or all."""
    return copy.outcomes["committed"] >= min(transactions, copy.records // copy.batch)


async def run(server: KafkaServer, records: int, what: str, how: Bounce) -> None:
    copy = Copy(
        server,
        uuid.uuid4().hex[:8],
        partial(librdkafka, timeout_s=10.0),
        records=records,
        batch=BATCH,
        bootstrap=server.bootstrap,
    )
    await copy.prepare()
    along: list[int] = []
    reader = asyncio.create_task(read_along(server, copy.output, along))
    every = records // BATCH // (BOUNCES + 1)
    running = asyncio.create_task(copy.run_to_the_end(within_s=240))
    for number in range(1, BOUNCES + 1):
        await until(partial(reached, copy, number * every), 120)
        if what == "brokers":
            await bounce_broker(server, how)
        else:
            successor = asyncio.create_task(copy.run_to_the_end(within_s=240))
            if how == "clean_bounce":
                running.cancel()
            # hard: the old one goes on until the new one fences it
            with suppress(asyncio.CancelledError, Fenced):
                await (running if how == "clean_bounce" else asyncio.sleep(0.3))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            running = successor
    await running
    read = await copy.read()
    assert Verdict.of(read, records) == RIGHT
    await until(lambda: len(along) >= records, 60)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert along == read
    assert not copy.outcomes["hung"]
    assert hanging(server) == []


@pytest.mark.parametrize("what", ["brokers", "clients"])
@pytest.mark.parametrize("how", ["hard_bounce", "clean_bounce"])
@pytest.mark.slow
@pytest.mark.sampled(1)
async def test_a_hundred_thousand_messages(server: KafkaServer, what: str, how: Bounce) -> None:
    await run(server, 100_000, what, how)
