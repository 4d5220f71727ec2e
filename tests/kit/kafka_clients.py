"""Kafka sources and sinks that a test opens, and what it writes and reads by them."""

import asyncio
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource
from feeds.source import CommitPoint, Incoming, Partition

QUICK = {"session_timeout_ms": 1000, "heartbeat_interval_ms": 200}
"""Options for the embedded broker, which takes that long to let a member leave."""


class KafkaClients:
    """Makes clients of one topic; on leaving the context they are stopped, and then what `run` began ends."""

    def __init__(self, bootstrap: str, topic: str, options: Mapping[str, Any] | None = None) -> None:
        self.bootstrap, self.topic, self._options = bootstrap, topic, options or {}
        self._clients: list[KafkaSource | KafkaSink] = []
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        quiet_client_log()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            await client.stop()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    def source(self, group: str | None = None, *, name: str = "in", **settings: Any) -> KafkaSource:
        """A source, not started."""
        options = {**self._options, **settings.pop("options", {})}
        made = KafkaSource(name, self.bootstrap, [self.topic], group, options=options, **settings)
        self._clients.append(made)
        return made

    async def open_source(self, group: str | None = None, **settings: Any) -> KafkaSource:
        """The same, started."""
        source = self.source(group, **settings)
        await source.start()
        return source

    async def open_sink(self, **settings: Any) -> KafkaSink:
        """A sink, started."""
        sink = KafkaSink("out", self.bootstrap, **settings)
        self._clients.append(sink)
        await sink.start()
        return sink

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` until the clients are stopped."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def publish(self, sink: KafkaSink, first: int, last: int) -> None:
        """Publish numbers; each of five keys is in one partition."""
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for n in range(first, last):
                group.create_task(sink.publish(self.topic, b"K%d" % (n % 5), b"%d" % n, {"seq": b"%d" % n}))


async def take(source: KafkaSource, count: int, timeout_s: float = 60) -> list[Incoming]:
    """At least ``count`` messages."""
    got: list[Incoming] = []
    async with asyncio.timeout(timeout_s):
        async for batch in source.batches():
            got += batch
            if len(got) >= count:
                break
    return got


def numbers(messages: list[Incoming]) -> list[int]:
    """What `KafkaClients.publish` wrote, sorted."""
    return sorted(int(message.payload) for message in messages)


def next_offsets(messages: list[Incoming]) -> dict[Partition, CommitPoint]:
    """The points behind these messages."""
    return {(m.topic, m.partition): CommitPoint(m.offset + 1) for m in messages}
