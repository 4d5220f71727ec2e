"""How far partitions are read, how far behind their ends, and when they were read to them."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Set

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from feeds.kafka_fetcher import Fetched
from feeds.source import Lag, Membership, Partition

LOOK_S, POSITION_S = 0.5, 0.05
"""How often lags are noted, and the longest wait for a position, which a new partition lacks at first."""


class KafkaPositions:
    """``reached``: see `LogSource`."""

    def __init__(self) -> None:
        self.reached: dict[Partition, tuple[int, int]] = {}
        self.caught_up_ns = 0
        """All that the partitions had then, monotonic, was taken, or is in the newest batch."""
        self._read: dict[TopicPartition, int] = {}
        """Time of the newest record that was read, ns."""
        self._ends: Mapping[TopicPartition, tuple[int, int]] = {}
        """Position and end."""
        self._followed_ends: Mapping[TopicPartition, tuple[int, int]] = {}
        """The same of those that are read behind another member."""
        self._looked = 0.0
        self._marks: dict[TopicPartition, tuple[int, int]] = {}
        """An end of each partition that is behind, and when it was the end, monotonic, ns."""
        self._caught_up: dict[TopicPartition, int] = {}
        self._polled: dict[TopicPartition, tuple[int, int, int]] = {}
        """When the broker answered last about a partition: ms of the system's clock, and ns, monotonic. And
        when it had answered before: it was asked after that.
        """

    def begin(self, partition: TopicPartition, start: int) -> None:
        """Reading begins at ``start``."""
        self.reached[partition] = start, start

    def note(self, fetched: Fetched) -> None:
        """These were read."""
        self.note_times(fetched)
        for partition, messages in fetched.items():
            self.begin(partition, messages[-1].last_offset + 1)

    def note_times(self, fetched: Fetched) -> None:
        """These were read behind another member, which has the positions."""
        for partition, messages in fetched.items():
            self._read[partition] = messages[-1].ts_source_ns

    def note_ends(self, ends: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Position and end of each partition that is read behind another member are these."""
        self._followed_ends = ends

    def lags(self, now_ns: int) -> dict[Partition, Lag]:
        """Of the partitions that are read, as of the last second; while paused, too."""
        found: dict[Partition, Lag] = {}
        for partition, (position, end) in {**self._followed_ends, **self._ends}.items():
            waiting, read = max(0, end - position), self._read.get(partition, 0)
            found[partition] = Lag(waiting, max(0, now_ns - read) if waiting and read else 0)
        return found

    async def look(
        self, consumer: AIOKafkaConsumer, partitions: Set[TopicPartition], member: Membership | None
    ) -> None:
        """Note how far each partition is read, twice a second: its position also counts control batches."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        # a position that is not known in time is as it was
        ends = {each: self._ends[each] for each in partitions if each in self._ends}
        for partition in partitions:
            with contextlib.suppress(KafkaError, TimeoutError, IllegalStateError):
                async with asyncio.timeout(POSITION_S):
                    position = await consumer.position(partition)
                read, before = self.reached.get(partition, (position, 0))
                self.reached[partition] = read, max(before, position)
                end = consumer.highwater(partition)
                if end is not None:
                    ends[partition] = position, end
                    self._note_caught_up(partition, position, end, consumer.last_poll_timestamp(partition))
        self._ends = ends
        if partitions:
            reached = min(self._caught_up.get(partition, 0) for partition in partitions)
            self.caught_up_ns = max(self.caught_up_ns, reached)
        elif member and not (member.partitions or member.placing):  # nothing to read
            self.caught_up_ns = time.monotonic_ns()

    def _note_caught_up(self, partition: TopicPartition, position: int, end: int, polled_ms: int) -> None:
        """``end``: the partition's, when the broker answered last, at ``polled_ms`` of the system's clock.

        It was so when the broker was asked. The answer may have waited here, and records came meanwhile.
        """
        _, asked_ns = self._polled_and_asked_ns(partition, polled_ms)
        marked, since_ns = self._marks.get(partition, (end, asked_ns))
        if position >= min(marked, end):
            self._caught_up[partition] = asked_ns if position >= end else since_ns
            self._marks[partition] = end, asked_ns
        else:
            self._marks[partition] = marked, since_ns

    def polled_ns(self, partition: TopicPartition, polled_ms: int) -> int:
        """When the broker answered last, ``polled_ms`` of the system's clock, on the monotonic clock, ns."""
        return self._polled_and_asked_ns(partition, polled_ms)[0]

    def _polled_and_asked_ns(self, partition: TopicPartition, polled_ms: int) -> tuple[int, int]:
        known_ms, polled_ns, asked_ns = self._polled.get(partition, (0, 0, 0))
        if known_ms != polled_ms:  # once for each answer: the system's clock may be set meanwhile
            asked_ns = polled_ns  # the client asks for one thing at a time
            polled_ns = time.monotonic_ns() - max(0, time.time_ns() - polled_ms * 1_000_000)
            self._polled[partition] = polled_ms, polled_ns, asked_ns
        return polled_ns, asked_ns
