"""Reads partitions without being a member of a group: those that are ours, and others behind their owner.

Who is a member stops reading while its group is formed again, so what is read is read by other consumers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from feeds.kafka_client import Clients, partitions_of
from feeds.kafka_fetcher import Fetched, KafkaFetcher
from feeds.kafka_member import PLACE_EACH_S, PLACE_S, KafkaMember, not_counted
from feeds.kafka_positions import KafkaPositions
from feeds.kafka_reader import first_offset, read_one
from feeds.kafka_start import KafkaStart
from feeds.source import CommitPoint, Partition, StartPosition

FOLLOW_S = 0.5
"""How often the committed offsets are read."""
ALL_READY_S = 5.0
"""Partitions that are warm wait so long for the others, for each hand-over forms the group again."""
WARM_MOST_S = 30.0
"""One of which all was read is taken to be warm after so long: a daemon may have no time to get there."""
_POLL_MS = 100

Place = Callable[[AIOKafkaConsumer, TopicPartition], Awaitable[None]]
"""Seeks a partition to where its reading begins."""


class PartitionReader:
    """Partitions that come and go while the others are read on.

    ``consumer``: started, without a group; nothing else assigns partitions to it.
    """

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self.consumer = consumer
        self.partitions: Set[TopicPartition] = frozenset()
        self._held: Set[TopicPartition] = frozenset()
        self._paused = False

    async def change(
        self, gone: Collection[TopicPartition] = (), new: Collection[TopicPartition] = ()
    ) -> None:
        """Read other partitions from now on; seek in the new ones before anything else waits."""
        kept = self.partitions - frozenset(gone) - frozenset(new)
        # an assignment replaces the one before, with its positions
        positions = {each: await self.consumer.position(each) for each in kept}
        self.partitions = kept | frozenset(new)
        if new or (gone and self.partitions):  # without any it goes on with the last ones, paused
            self.consumer.assign(list(self.partitions))
            for partition, position in positions.items():
                self.consumer.seek(partition, position)
        self._apply()

    def hold(self, partitions: Collection[TopicPartition]) -> None:
        """Read all but these."""
        self._held = frozenset(partitions)
        self._apply()

    def pause(self, is_paused: bool) -> None:
        """Read nothing, or go on."""
        self._paused = is_paused
        self._apply()

    @property
    def paused(self) -> Set[TopicPartition]:
        """Those that are not read now."""
        return self.partitions & frozenset(self.consumer.paused())

    def _apply(self) -> None:
        assigned, paused = self.consumer.assignment(), self.consumer.paused()
        stopped = assigned if self._paused else assigned - (self.partitions - self._held)
        self.consumer.pause(*(stopped - paused))
        self.consumer.resume(*(paused - stopped))


class KafkaFollower:
    """Reads up to limits. ``consumer``: as of `PartitionReader`."""

    def __init__(self, consumer: AIOKafkaConsumer, max_records: int) -> None:
        self._reader, self._max_records = PartitionReader(consumer), max_records
        self._limits: dict[TopicPartition, int] = {}
        self._changing = asyncio.Lock()

    def __contains__(self, partition: TopicPartition) -> bool:
        return partition in self._limits

    @property
    def partitions(self) -> Set[TopicPartition]:
        """All that are followed."""
        return self._limits.keys()

    @property
    def consumer(self) -> AIOKafkaConsumer:
        """Its consumer."""
        return self._reader.consumer

    async def add(self, partitions: Collection[TopicPartition], place: Place) -> None:
        """Follow these, too. Nothing of them is read before `allow`."""
        async with self._changing:
            await self._reader.change(new=partitions)
            for partition in partitions:  # whoever gives up on the way leaves none without a position
                self.consumer.seek(partition, 0)
            for partition in partitions:
                await place(self.consumer, partition)
                self._limits[partition] = 0

    async def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Follow these no longer."""
        async with self._changing:
            for partition in partitions:
                self._limits.pop(partition, None)
            await self._reader.change(gone=partitions)

    def allow(self, limits: Mapping[TopicPartition, int]) -> None:
        """Read up to these offsets from now on; the records there are not read."""
        self._limits.update(limits)

    async def read(self, wait_s: float) -> dict[TopicPartition, list[Any]]:
        """Records below the limits, in order, at most ``max_records``; empty after a pause without any.

        ``wait_s`` 0: only those that the client has already. Raises OffsetOutOfRangeError: `go_on`.
        """
        found: dict[TopicPartition, list[Any]] = {}
        if not self._changing.locked():
            async with self._changing:
                found = await self._read(_POLL_MS if wait_s else 0)
        if not found and wait_s:
            await asyncio.sleep(wait_s)
        return found

    async def _read(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        found, room = dict[TopicPartition, list[Any]](), self._max_records
        for partition, limit in self._limits.items():
            position = await self.consumer.position(partition)
            most = min(room, limit - position)
            if most <= 0:
                continue
            options = {"timeout_ms": timeout_ms, "max_records": most}
            try:
                records = await read_one(self.consumer, partition, position, **options)
            except OffsetOutOfRangeError:
                if found:  # it comes again
                    break
                raise
            kept = [each for each in records if first_offset(each) < limit]
            if len(kept) < len(records):  # offsets are missing, such as those of marks of transactions
                self.consumer.seek(partition, limit)
            if kept:
                found[partition] = kept
                room -= len(kept)
        return found

    async def go_on(self, start: KafkaStart) -> None:
        """Read on where the logs have records: see `KafkaStart.go_on`."""
        async with self._changing, asyncio.timeout(PLACE_S):
            await start.go_on(self.consumer, self.partitions)

    async def behind(self) -> dict[TopicPartition, tuple[int, int]]:
        """By partition, the next offset to read, and its limit."""
        return {each: (await self.consumer.position(each), limit) for each, limit in self._limits.items()}


class WarmUps:
    """Reads what other members of a group have committed, in partitions that this one may be given.

    ``behind``: see `FollowingSource`.
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
        self._level_since: dict[TopicPartition, float] = {}
        self._ready_since: dict[TopicPartition, float] = {}
        self._looked = 0.0

    async def open(self) -> KafkaFollower | None:
        """The follower; None once the source is stopped."""
        if self._follower is None:
            opened = await self._clients.open(group_id=None, group_instance_id=None)
            if opened is not None:
                self._follower, self._looked = KafkaFollower(opened, self._max_records), 0.0
        return self._follower

    @property
    def is_due(self) -> bool:
        """Whether it is time to `look`."""
        wanted = self._member.warm or self._followed
        return bool(wanted) and time.monotonic() - self._looked >= FOLLOW_S

    async def read(self, wait_s: float) -> Fetched:
        """Messages that other members have committed since."""
        listener = self._member.listener
        if self._follower is None or (listener is not None and not listener.is_level()):
            await asyncio.sleep(wait_s)
            return {}
        try:
            read = await self._follower.read(wait_s)
        except OffsetOutOfRangeError:
            await self._follower.go_on(self._start)
            return {}
        fetched = {partition: self._fetcher.messages(partition, items) for partition, items in read.items()}
        self._positions.note_times(fetched)
        return fetched

    async def look(self, consumer: AIOKafkaConsumer) -> None:
        """Let be read what is committed by now, and tell the listener first; ``consumer``: our membership."""
        self._looked = time.monotonic()
        member, follower = self._member, await self.open()
        if follower is None:
            return
        warm = member.warm & set(partitions_of(consumer, self._topics))
        await self._forget(follower, self._followed.keys() - warm)
        if not warm:
            return
        if not self._start.resumes:  # nothing to be warm for
            self._note_ready(consumer, warm)
            return
        behind = await follower.behind()
        level = {each for each, (at, limit) in behind.items() if each in self._followed and limit <= at}
        async with asyncio.timeout(PLACE_S + PLACE_EACH_S * len(warm)) as limit:
            found = await member.offsets(consumer, sorted(warm))
            moved = {p: point for p, point in found.items() if self._followed.get(p) != point}
            wanted: Mapping[Partition, StartPosition] = {}
            if moved and member.listener is not None:
                with not_counted(limit):
                    wanted = await member.listener.follows(moved)

            new = [each for each in moved if each not in follower]
            # a log may end before what its owner has committed: see `KafkaStart.beyond`
            ends = await follower.consumer.end_offsets(new)

            async def place(reading: AIOKafkaConsumer, partition: TopicPartition) -> None:
                committed = min(moved[partition].offset, ends[partition])
                await self._start.resume(reading, partition, committed, wanted.get(partition))

            if new:
                await follower.add(new, place)
            follower.allow({partition: point.offset for partition, point in moved.items()})
            self._followed |= moved
            behind = await follower.behind()
        self._clients.connection.up()
        self.behind = {p: max(0, limit - at) for p, (at, limit) in behind.items()}
        ends = {p: (at, follower.consumer.highwater(p)) for p, (at, _) in behind.items()}
        self._positions.note_ends({p: (at, end) for p, (at, end) in ends.items() if end is not None})
        # one of which nothing is committed has nothing to warm
        self._note_ready(consumer, level | (warm - found.keys()))

    def _note_ready(self, consumer: AIOKafkaConsumer, level: Set[TopicPartition]) -> None:
        """``level``: partitions of which all is read that was committed at the look before."""
        now, member = time.monotonic(), self._member
        listener, new = member.listener, level - self._ready_since.keys()
        if new and (listener is None or listener.is_level()):
            is_warm = listener is None or listener.is_warm()
            for partition in new:
                since = self._level_since.setdefault(partition, now)
                if is_warm or now - since >= WARM_MOST_S:
                    self._ready_since[partition] = now
        ready = self._ready_since.keys()
        waited = any(
            now - since >= ALL_READY_S for p, since in self._ready_since.items() if p not in member.ready
        )
        if not ready <= member.ready and (ready >= member.warm or waited):
            member.note_ready(consumer, frozenset(ready))

    async def take(self, partitions: Collection[TopicPartition]) -> None:
        """These are read by their owner from now on, which we are."""
        for partition in partitions:
            for known in (self._followed, self._level_since, self._ready_since):
                known.pop(partition, None)
        if self._follower is not None:
            await self._follower.remove(partitions)
        self._note_behind()

    async def forget(self) -> None:
        """Nothing is known of the others."""
        if self._follower is not None:
            await self._follower.remove(list(self._follower.partitions))
        self._followed, self._level_since, self._ready_since, self.behind = {}, {}, {}, None
        self._positions.note_ends({})

    async def _forget(self, follower: KafkaFollower, partitions: Collection[TopicPartition]) -> None:
        """These go to somebody else after all, or stay with their owner."""
        gone = list(partitions)
        if not gone:
            return
        await self.take(gone)
        if self._member.listener is not None:
            self._member.listener.follows_no_longer([tuple(each) for each in gone])

    def _note_behind(self) -> None:
        if self.behind is not None:
            self.behind = {p: each for p, each in self.behind.items() if p in self._followed}
        if not self._followed:
            self._positions.note_ends({})

    async def stop(self) -> None:
        """Stop reading."""
        follower, self._follower = self._follower, None
        self._followed, self._level_since, self._ready_since = {}, {}, {}
        if follower is not None:
            await self._clients.close(follower.consumer)
