"""Reads a Kafka topic from a time, or its beginning, to where it ends now: once, by no consumer group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from feeds.kafka_client import BrokerError, close_client, why_closed

_POLL_MS = 200
_QUIET_S = 30.0
"""Longest wait for the next message before the end."""


class WholeTopic:
    """A topic as committed. ``from_start``: reading begins with its first message ever."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        since_ns: int = 0,
        options: Mapping[str, Any] = MappingProxyType({}),
        timeout_s: float = 10.0,
    ) -> None:
        self._settings = {
            "bootstrap_servers": bootstrap,
            **options,
            "isolation_level": "read_committed",
            "enable_auto_commit": False,
        }
        self._bootstrap = bootstrap
        self._topic, self._since_ns, self._timeout_s = topic, since_ns, timeout_s
        self.from_start = False

    async def messages(self) -> AsyncGenerator[list[bytes], None]:
        """Payloads, in offset order within each partition. Raises BrokerError."""
        consumer = AIOKafkaConsumer(**self._settings)
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await consumer.start()
                    ends = await self._begin(consumer)
            except (KafkaError, TimeoutError, OSError) as error:
                why = await why_closed(self._settings) or repr(error)
                raise BrokerError(f"no useful answer from {self._bootstrap}: {why}") from None
            loop = asyncio.get_running_loop()
            heard = loop.time()
            while ends:
                fetched = await consumer.getmany(timeout_ms=_POLL_MS)
                if fetched:
                    heard = loop.time()
                    yield [each.value or b"" for records in fetched.values() for each in records]
                elif loop.time() - heard > _QUIET_S:
                    raise BrokerError(f"{self._topic}: {len(ends)} partitions were not read to their end")
                for partition in [p for p, end in ends.items() if await consumer.position(p) >= end]:
                    consumer.pause(partition)
                    del ends[partition]
        finally:
            await close_client(consumer, 2.0)

    async def _begin(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, int]:
        """Assign all partitions, and go to where reading begins; returns the ends of those with messages."""
        # without a group there is no assignment to wait for
        cluster = await consumer._client.fetch_all_metadata()
        partitions = [TopicPartition(self._topic, n) for n in cluster.partitions_for_topic(self._topic) or ()]
        if not partitions:
            raise BrokerError(f"there is no topic {self._topic}")
        consumer.assign(partitions)
        starts = dict(await consumer.beginning_offsets(partitions))
        ends = dict(await consumer.end_offsets(partitions))
        self.from_start = not self._since_ns and not any(starts.values())
        if self._since_ns:
            found = await consumer.offsets_for_times(dict.fromkeys(partitions, self._since_ns // 1_000_000))
            starts = {p: ends[p] if at is None else at.offset for p, at in found.items()}
        for partition in partitions:
            consumer.seek(partition, starts[partition])
        return {partition: end for partition, end in ends.items() if starts[partition] < end}
