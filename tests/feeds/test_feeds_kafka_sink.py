"""A sink whose producer is replaced while others publish."""

import asyncio
from typing import Any

from aiokafka.errors import KafkaError

from feeds.kafka_sink import KafkaSink
from tests.kit import until


class Producer:
    """Its messages are acknowledged by the test."""

    def __init__(self) -> None:
        self.client = self.cluster = self
        self.sent: list[asyncio.Future[None]] = []

    def partitions_for_topic(self, topic: str) -> set[int]:
        return {0}

    async def send(self, topic: str, payload: bytes, **more: Any) -> "asyncio.Future[None]":
        self.sent.append(asyncio.get_running_loop().create_future())
        return self.sent[-1]


class Clients:
    """Producers that take a moment to be opened and closed."""

    stop_timeout_s = 1.0

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.opened: list[Producer] = []

    async def open(self) -> Producer:
        await asyncio.sleep(0.05)
        self.opened.append(Producer())
        return self.opened[-1]

    async def close(self, client: Producer) -> None:
        await asyncio.sleep(0.05)


async def test_what_others_publish_waits_for_the_next_producer() -> None:
    sink, clients = KafkaSink("answers", "127.0.0.1:1"), Clients()
    sink._clients = clients  # type: ignore[assignment]  # as much of them as is used
    await sink.start()
    publishing = [asyncio.create_task(sink.publish("t", b"k", b"v", {})) for _ in range(3)]
    await asyncio.sleep(0.01)
    (first,) = clients.opened
    first.sent[0].set_exception(KafkaError("out of order"))
    await until(lambda: len(clients.opened) == 2 and len(clients.opened[1].sent) == 3)
    for each in clients.opened[1].sent:
        each.set_result(None)
    await asyncio.gather(*publishing)
