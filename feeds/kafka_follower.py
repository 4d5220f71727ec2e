"""Reads partitions behind their owner: never past what it has committed, and as a member of no group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from feeds.kafka_reader import first_offset, read_one

FOLLOW_S = 0.5
"""How often the committed offsets are read."""
_POLL_MS = 100

Place = Callable[[AIOKafkaConsumer, TopicPartition], Awaitable[None]]
"""Seeks a partition to where its reading begins."""


class KafkaFollower:
    """Reads up to limits. ``consumer``: started, without a group; nothing else reads by it."""

    def __init__(self, consumer: AIOKafkaConsumer, max_records: int) -> None:
        self.consumer, self._max_records = consumer, max_records
        self._limits: dict[TopicPartition, int] = {}

    def __contains__(self, partition: TopicPartition) -> bool:
        return partition in self._limits

    async def add(self, partitions: Collection[TopicPartition], place: Place) -> None:
        """Follow these, too. Nothing of them is read before `allow`."""
        # an assignment replaces the one before, with its positions
        before = {each: await self.consumer.position(each) for each in self._limits}
        self.consumer.assign([*before, *partitions])
        for partition, position in before.items():
            self.consumer.seek(partition, position)
        for partition in partitions:
            await place(self.consumer, partition)
            self._limits[partition] = 0

    def allow(self, limits: Mapping[TopicPartition, int]) -> None:
        """Read up to these offsets from now on; the records there are not read."""
        self._limits.update(limits)

    async def read(self, wait_s: float) -> dict[TopicPartition, list[Any]]:
        """Records below the limits, in order, at most ``max_records``; empty after a pause without any."""
        found, room = {}, self._max_records
        for partition, limit in self._limits.items():
            position = await self.consumer.position(partition)
            most = min(room, limit - position)
            if most <= 0:
                continue
            options = {"timeout_ms": _POLL_MS, "max_records": most}
            records = await read_one(self.consumer, partition, position, **options)
            kept = [each for each in records if first_offset(each) < limit]
            if len(kept) < len(records):  # offsets are missing, such as those of marks of transactions
                self.consumer.seek(partition, limit)
            if kept:
                found[partition] = kept
                room -= len(kept)
        if not found:
            await asyncio.sleep(wait_s)
        return found

    async def behind(self) -> dict[TopicPartition, tuple[int, int]]:
        """By partition, the next offset to read, and its limit."""
        return {each: (await self.consumer.position(each), limit) for each, limit in self._limits.items()}
