"""Kafka from one offset to another: a reader without a group, for what is already in a topic.

It reads committed records only, as the daemon does, and ends where the topic ended when it was asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from feeds.kafka_client import (
    BrokerError,
    broker_time_ms,
    close_client,
    connections_of,
    partitions_of,
    quiet_client_log,
    start_client,
    why_closed,
)
from feeds.kafka_reader import first_offset, messages_of, read_one
from feeds.source import Incoming, Partition

_POLL_MS = 200


class OffsetsGone(RuntimeError):
    """Records were deleted: the topic's retention has passed them. ``first`` is the oldest that is left."""

    def __init__(self, partition: Partition, wanted: int, first: int) -> None:
        topic, number = partition
        super().__init__(
            f"{topic}/{number} has no offsets before {first} any more, and {wanted} is needed: the topic's "
            "retention has deleted them"
        )
        self.first = first


class KafkaRange:
    """An open reader; use it as an asynchronous context. ``options`` are aiokafka's.

    Raises BrokerError from anything when the broker does not answer within ``timeout_s``.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        timeout_s: float = 10.0,
    ) -> None:
        self._settings = {"bootstrap_servers": bootstrap, **options}
        self._bootstrap, self._timeout_s = bootstrap, timeout_s
        self._consumer: AIOKafkaConsumer | None = None

    async def __aenter__(self) -> Self:
        quiet_client_log()
        consumer = AIOKafkaConsumer(
            **self._settings,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_wait_ms=50,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await start_client(consumer)
        except (KafkaError, OSError, TimeoutError) as error:
            await close_client(consumer, 1.0)
            why = await why_closed(self._settings) or repr(error)
            raise BrokerError(f"no useful answer from Kafka at {self._bootstrap}: {why}") from error
        self._consumer = consumer
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._consumer is not None:
            await close_client(self._consumer, 2.0)

    async def spans(self, topics: Iterable[str]) -> dict[Partition, range]:
        """The offsets that each partition of ``topics`` holds now. Raises BrokerError: no such topic."""
        consumer, found = self._open, []
        async with self._bounded():
            # the client's own metadata is of the assigned topics only
            known = await connections_of(consumer).fetch_all_metadata()
            for topic in topics:
                if not (partitions := partitions_of(known, [topic])):
                    raise BrokerError(f"Kafka at {self._bootstrap} has no topic {topic!r}")
                found += partitions
            begin = await consumer.beginning_offsets(found)
            end = await consumer.end_offsets(found)
        return {(p.topic, p.partition): range(begin[p], end[p]) for p in sorted(found)}

    async def offset_at(self, partition: Partition, time_ns: int) -> int | None:
        """Of the first record of this time (Kafka's) or later; None without one."""
        which = TopicPartition(*partition)
        async with self._bounded():
            found = (await self._open.offsets_for_times({which: broker_time_ms(time_ns)}))[which]
        return None if found is None else int(found.offset)

    async def newest(self, partition: Partition, span: range, most: int) -> list[Incoming]:
        """The last records of ``span``, in order; without the rest of them if they are deleted meanwhile."""
        found: list[Incoming] = []
        with suppress(OffsetsGone):
            async for batch in self.read(partition, range(max(span.start, span.stop - most), span.stop)):
                found += batch
        return found

    async def read(self, partition: Partition, span: range) -> AsyncGenerator[list[Incoming], None]:
        """The records of ``span``, in order, in batches. Raises OffsetsGone."""
        consumer, which, at = self._open, TopicPartition(*partition), span.start
        if span.start >= span.stop:
            return
        async with self._bounded():
            begin = (await consumer.beginning_offsets([which]))[which]
        if begin > span.start:
            raise OffsetsGone(partition, span.start, begin)
        consumer.assign([which])
        consumer.seek(which, span.start)
        last_seen = time.monotonic()
        while at < span.stop:
            try:
                fetched = await read_one(consumer, which, at, timeout_ms=_POLL_MS)
                async with self._bounded():
                    position = await consumer.position(which)
            except OffsetOutOfRangeError as error:
                raise OffsetsGone(partition, at, begin) from error
            except KafkaError as error:
                raise BrokerError(f"{partition[0]}/{partition[1]}@{at}: {error!r}") from error
            if position > at or fetched:
                at, last_seen = position, time.monotonic()
            elif time.monotonic() - last_seen > self._timeout_s:
                raise BrokerError(f"{partition[0]}/{partition[1]}: nothing after offset {at} came in time")
            within = [each for each in fetched if first_offset(each) < span.stop]
            if within:
                yield messages_of(which, within, time.time_ns())
                last_seen = time.monotonic()  # whoever takes it may need long

    @property
    def _open(self) -> AIOKafkaConsumer:
        assert self._consumer is not None, "only inside its context"
        return self._consumer

    def _bounded(self) -> _Bounded:
        return _Bounded(self._bootstrap, self._timeout_s)


class _Bounded:
    """A broker that does not answer within the time raises BrokerError."""

    def __init__(self, bootstrap: str, timeout_s: float) -> None:
        self._bootstrap, self._timeout = bootstrap, asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise BrokerError(f"no answer from Kafka at {self._bootstrap} in time") from late
        if isinstance(error, KafkaError):
            raise BrokerError(f"no useful answer from Kafka at {self._bootstrap}: {error!r}") from error
