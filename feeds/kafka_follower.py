"""Reads partitions behind their owner: never past what it has committed, and as a member of no group."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from feeds.kafka_client import Clients, partitions_of
from feeds.kafka_fetcher import KafkaFetcher
from feeds.kafka_member import PLACE_EACH_S, PLACE_S, KafkaMember, not_counted
from feeds.kafka_positions import POSITION_S, KafkaPositions
from feeds.kafka_reader import first_offset, read_one
from feeds.kafka_start import KafkaStart
from feeds.source import CommitPoint, Incoming, Partition, StartPosition

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


class KafkaStandby:
    """Reads what the members of a group have committed, while this one has no partitions.

    ``behind``: see `StandbySource`.
    """

    def __init__(
        self,
        topics: Sequence[str],
        max_records: int,
        clients: Clients,
        fetcher: KafkaFetcher,
        positions: KafkaPositions,
        start: KafkaStart,
        member: KafkaMember,
    ) -> None:
        self._topics, self._max_records, self._clients = topics, max_records, clients
        self._fetcher, self._positions, self._start, self._member = fetcher, positions, start, member
        self.behind: dict[Partition, int] | None = None
        self._follower: KafkaFollower | None = None
        self._followed: dict[TopicPartition, CommitPoint] = {}
        self._looked = 0.0

    async def read(self, consumer: AIOKafkaConsumer) -> list[Incoming]:
        """Messages that other members have committed since; ``consumer`` is our membership."""
        if self._follower is None:
            opened = await self._clients.open(group_id=None, group_instance_id=None)
            if opened is None:
                return []
            self._follower, self._followed, self._looked = KafkaFollower(opened, self._max_records), {}, 0.0
        if time.monotonic() - self._looked >= FOLLOW_S:
            self._looked = time.monotonic()
            await self._look_ahead(consumer, self._follower)
        read = await self._follower.read(POSITION_S)
        fetched = {partition: self._fetcher.messages(partition, items) for partition, items in read.items()}
        self._positions.note_times(fetched)
        return [message for messages in fetched.values() for message in messages]

    async def _look_ahead(self, consumer: AIOKafkaConsumer, follower: KafkaFollower) -> None:
        """Let ``follower`` read what is committed by now, and tell the listener first."""
        names = partitions_of(consumer, self._topics)
        async with asyncio.timeout(PLACE_S + PLACE_EACH_S * len(names)) as limit:
            found = await self._member.offsets(consumer, names)
            moved = {p: point for p, point in found.items() if self._followed.get(p) != point}
            wanted: Mapping[Partition, StartPosition] = {}
            if moved and self._member.listener is not None:
                with not_counted(limit):
                    wanted = await self._member.listener.follows(moved)

            async def place(reading: AIOKafkaConsumer, partition: TopicPartition) -> None:
                await self._start.resume(reading, partition, moved[partition].offset, wanted.get(partition))

            if new := [each for each in moved if each not in follower]:
                await follower.add(new, place)
            follower.allow({partition: point.offset for partition, point in moved.items()})
            self._followed |= moved
            behind = await follower.behind()
        self._clients.connection.up()
        self.behind = {p: max(0, limit - at) for p, (at, limit) in behind.items()}
        ends = {p: (at, follower.consumer.highwater(p)) for p, (at, _) in behind.items()}
        self._positions.note_ends({p: (at, end) for p, (at, end) in ends.items() if end is not None})

    def forget(self) -> None:
        """Nothing is known of the others."""
        self.behind = None

    async def stop(self) -> None:
        """Stop reading."""
        follower, self._follower = self._follower, None
        if follower is not None:
            await self._clients.close(follower.consumer)
