"""Reads the partitions of a member: its own, and behind their owners those that it is to take over.

What takes its time when partitions come (to restore sessions, to look what others have committed) is done
aside, one thing after the other, so that those that stay are read on.
"""

import asyncio
from collections.abc import Mapping, Set

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from feeds.kafka_client import Clients
from feeds.kafka_fetcher import Fetched, KafkaFetcher
from feeds.kafka_follower import PartitionReader, WarmUps
from feeds.kafka_member import PLACE_S, BegunPartition, KafkaMember
from feeds.kafka_positions import POSITION_S, KafkaPositions
from feeds.kafka_start import KafkaStart


class KafkaReading:
    """``clients``: open the consumer that reads what is ours."""

    def __init__(
        self,
        clients: Clients,
        fetcher: KafkaFetcher,
        positions: KafkaPositions,
        start: KafkaStart,
        member: KafkaMember,
        warm_ups: WarmUps,
    ) -> None:
        self._clients, self._fetcher, self._positions, self._start = clients, fetcher, positions, start
        self._member, self._warm_ups = member, warm_ups
        self.reader: PartitionReader | None = None
        """Of our partitions, since there were any."""
        self._paused = False
        self._arranging: asyncio.Task[dict[TopicPartition, BegunPartition]] | None = None
        self._commits_next = False
        self._warms = False
        """The newest batch had records of others' partitions."""

    @property
    def partitions(self) -> Set[TopicPartition]:
        """Ours that have begun."""
        return frozenset() if self.reader is None else self.reader.partitions

    @property
    def paused(self) -> Set[TopicPartition]:
        """Those of them that are not read now."""
        return frozenset() if self.reader is None else self.reader.paused

    def pause(self, is_paused: bool) -> None:
        """Read nothing, or go on."""
        self._paused = is_paused
        if self.reader is not None:
            self.reader.pause(is_paused)

    def hold(self) -> None:
        """The group is about to be formed again: what others may be given is not read meanwhile."""
        if self.reader is not None:
            self.reader.hold(self._member.leaves)

    async def next(self, member: AIOKafkaConsumer) -> tuple[Fetched, Fetched]:
        """Messages of our partitions and of others'; none after a pause without any. ``member`` reads none.

        Raises KafkaError, TimeoutError, OffsetsUnknown.
        """
        await self._arrange(member)
        if not self._member.may_read(member):
            await asyncio.sleep(POSITION_S)
            return {}, {}
        fetched: Fetched = {}
        consumer, partitions = self.reader and self.reader.consumer, self.partitions
        if partitions:
            try:
                found = await self._fetcher.fetch(consumer, self._positions.reached, waits=not self._warms)
            except OffsetOutOfRangeError:
                found = {}
                async with asyncio.timeout(PLACE_S):
                    for partition, start in (await self._start.go_on(consumer, partitions)).items():
                        self._positions.begin(partition, start)
            async with asyncio.timeout(PLACE_S):
                fetched = await self._start.skip(consumer, found)
            self._positions.note(fetched)
        await self._positions.look(consumer, partitions, self._member.of(member))
        warm = await self._warm_ups.read(0 if partitions else POSITION_S)
        self._warms = bool(warm)
        return fetched, warm

    async def _arrange(self, member: AIOKafkaConsumer) -> None:
        """Read the partitions that are ours."""
        member.pause(*(member.assignment() - member.paused()))  # it reads nothing
        if self._member.has_rejoined:
            stopped = self._member.part(member)
            if self.reader is not None:
                await self.reader.change(gone=stopped)
                self.reader.hold(())
        task = self._arranging
        if task is None:
            self._member.give_up(member)
            new = self._member.new(member)
            if new or self._commits_next or self._warm_ups.is_due:
                self._arranging = asyncio.create_task(self._arrange_aside(member, new))
        elif task.done() and not self._member.rejoined:
            self._arranging = None
            if starts := self._member.still(task.result()):
                await self._begin(starts)

    async def _begin(self, starts: Mapping[TopicPartition, BegunPartition]) -> None:
        """Read these, too."""
        if self.reader is None:
            opened = await self._clients.open(group_id=None, group_instance_id=None)
            if opened is None:
                return
            self.reader = PartitionReader(opened)
        await self.reader.change(new=starts)
        for partition, found in starts.items():
            self.reader.consumer.seek(partition, found.start)
        if self._member.rejoined:  # some may be somebody else's again
            await self.reader.change(gone=starts)
            return
        self.reader.pause(self._paused)
        self._member.begin(starts)
        self._commits_next = True

    async def _arrange_aside(
        self, member: AIOKafkaConsumer, new: set[TopicPartition]
    ) -> dict[TopicPartition, BegunPartition]:
        """Where ``new`` partitions begin; or commit what has begun, or look at what others have committed."""
        found: dict[TopicPartition, BegunPartition] = {}
        if new:
            follower = await self._warm_ups.open()
            if follower is not None:
                found = await self._member.place(member, new, follower)
                await self._warm_ups.take(new)
        elif self._commits_next:
            self._commits_next = False
            if self._member.listener is not None:
                await self._member.listener.commit()
        else:
            await self._warm_ups.look(member)
        return found

    async def rest(self) -> None:
        """Nothing is read until the next `next`."""
        task, self._arranging = self._arranging, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def restart(self) -> None:
        """All partitions begin again."""
        await self.rest()
        if self.reader is not None:
            await self.reader.change(gone=self.reader.partitions)
        await self._warm_ups.forget()

    async def close(self) -> None:
        """Disconnect."""
        await self.rest()
        reader, self.reader = self.reader, None
        if reader is not None:
            await self._clients.close(reader.consumer)
        await self._warm_ups.stop()
