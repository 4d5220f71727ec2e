"""Where a partition is begun, and what is skipped of one that is far behind."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from feeds.kafka_client import broker_time_ms
from feeds.kafka_fetcher import Fetched
from feeds.kafka_reader import read_one
from feeds.source import Partition, StartPosition, source_time_ns

log = logging.getLogger(__name__)

_POLL_MS = 200
READ_WHOLE = 100_000
"""A partition that is at most this many records behind is read whole, however old they are."""

StartAt = int | Literal["committed", "latest", "earliest", "retention"]


class KafkaStart:
    """``start_at``: see `KafkaSource`. ``skipped``, ``deleted``: see `SeekingSource`."""

    def __init__(self, name: str, start_at: StartAt, has_group: bool, clock_ns: Callable[[], int]) -> None:
        self._name, self._start_at, self._has_group, self._clock_ns = name, start_at, has_group, clock_ns
        self.skipped: dict[Partition, int] = {}
        self.deleted: dict[Partition, int] = {}
        self._deleted_to: dict[TopicPartition, int] = {}
        """Up to where they were told."""
        self.truncated: set[TopicPartition] = set()
        """Their logs end before what was read of them: they are to begin again."""
        self._span_ns, self._skips, self._few = 0, False, READ_WHOLE
        self._began = False
        self._floor: dict[TopicPartition, int] = {}
        self._answered: dict[TopicPartition, int] = {}
        """Time of the newest bar that was answered before a partition was ours, ns."""
        self._asked_for: set[TopicPartition] = set()
        """Partitions whose past was asked for, and that have not caught up."""

    def set_retention(self, span_ns: int, skips: bool, few: int) -> None:
        """See `KafkaSource.set_retention`."""
        self._span_ns, self._skips, self._few = span_ns, skips, few

    @property
    def again(self) -> bool:
        """Whether the first assignment begins in a past that was asked for, which is answered again."""
        return not self._began and self._asks

    @property
    def resumes(self) -> bool:
        """Whether the next assignment begins at what is committed."""
        return self._began or self._start_at == "committed"

    @property
    def _asks(self) -> bool:
        return self._start_at == "earliest" or isinstance(self._start_at, int)

    def note_begun(self) -> None:
        """The first assignment was begun: later ones begin where the listener says."""
        self._began = True

    async def begin(
        self,
        consumer: AIOKafkaConsumer,
        partition: TopicPartition,
        committed: int | None,
        wanted: StartPosition | None,
    ) -> int:
        """Seek to where an assigned partition begins, and return that."""
        self._floor[partition] = committed or 0
        self._answered[partition] = wanted.answered_ns if wanted else 0
        if self._began or self._start_at == "committed":
            await self.resume(consumer, partition, committed, wanted)
        elif self._start_at == "earliest":
            await consumer.seek_to_beginning(partition)
        elif self._start_at == "latest":
            await consumer.seek_to_end(partition)
        elif self._start_at == "retention":
            consumer.seek(partition, await _offset_at(consumer, partition, self._clock_ns() - self._span_ns))
        else:
            consumer.seek(partition, await _offset_at(consumer, partition, self._start_at))
        if self.again:
            self._asked_for.add(partition)
        start = int(await consumer.position(partition))
        self.truncated.discard(partition)
        if self.resumes and committed is not None:
            self._note_deleted(partition, committed, start)
        return start

    def beyond(self, found: Mapping[TopicPartition, tuple[int, int]]) -> list[TopicPartition]:
        """Of these committed offsets and ends, the partitions whose log ends before: read it whole."""
        beyond = [partition for partition, (committed, end) in found.items() if committed > end]
        for partition in beyond:
            self._note_truncated(partition, *found[partition])
        return beyond

    async def go_on(
        self, consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Seek to the first offset that is left, where what was to be read next is deleted. Returns those.

        Raises KafkaError where a log ends before it: all is to begin again.
        """
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        at = {partition: await consumer.position(partition) for partition in partitions}
        moved = {partition: begin for partition, begin in begins.items() if at[partition] < begin}
        for partition, begin in moved.items():
            self._note_deleted(partition, at[partition], begin)
            consumer.seek(partition, begin)
        if truncated := [partition for partition in partitions if at[partition] > ends[partition]]:
            for partition in truncated:
                self._note_truncated(partition, at[partition], ends[partition])
            raise KafkaError("logs end before what was read")
        return moved

    def _note_deleted(self, partition: TopicPartition, first: int, begin: int) -> None:
        first = max(first, self._deleted_to.get(partition, 0))
        if first < begin:
            self._deleted_to[partition] = begin
            self.deleted[partition] = self.deleted.get(partition, 0) + begin - first
            log.error(
                "%s: offsets %d to %d of %s/%d were deleted before they were read",
                self._name, first, begin - 1, *partition,
            )  # fmt: skip

    def _note_truncated(self, partition: TopicPartition, offset: int, end: int) -> None:
        """How much is lost is not known: it counts as one."""
        self._deleted_to.pop(partition, None)
        if partition not in self.truncated:
            self.truncated.add(partition)
            self.deleted[partition] = self.deleted.get(partition, 0) + 1
            log.error(
                "%s: %s/%d ends at offset %d, before offset %d, up to which it was read: it was truncated, "
                "or deleted and made again",
                self._name, *partition, end, offset,
            )  # fmt: skip

    async def resume(
        self,
        consumer: AIOKafkaConsumer,
        partition: TopicPartition,
        committed: int | None,
        wanted: StartPosition | None,
    ) -> None:
        """Seek to ``wanted``, by default far enough before ``committed`` to fill the windows."""
        if committed is None:  # this client may have read on before
            await consumer.seek_to_beginning(partition)
            return
        offset, lookback_end, _ = wanted or StartPosition(committed, lookback_end=committed)
        start = min(committed, offset)
        if lookback_end and self._span_ns:
            start = min(start, await self._before(consumer, partition, min(committed, lookback_end)))
        beginning = (await consumer.beginning_offsets([partition]))[partition]
        consumer.seek(partition, max(start, beginning))

    async def _before(self, consumer: AIOKafkaConsumer, partition: TopicPartition, committed: int) -> int:
        """The offset as long before the last record below ``committed`` as windows span."""
        beginning = int((await consumer.beginning_offsets([partition]))[partition])
        back = 1
        while committed - back >= beginning:
            found = await _first_from(consumer, partition, committed - back)
            if found and (read_ns := source_time_ns(getattr(found, "timestamp", None))):
                at = await _offset_at(consumer, partition, read_ns - self._span_ns)
                # one that is older cannot be behind it: this broker does not know offsets by time
                return at if at <= found.offset else beginning
            back *= 2  # only marks of transactions, or a record whose time is unknown
        return beginning

    async def skip(self, consumer: AIOKafkaConsumer, fetched: Fetched) -> Fetched:
        """Without what is twice as old as windows span, and too much to read; its partitions go forward.

        Not where newer bars were answered: one symbol that is quiet holds back the committed offset.
        """
        if not (self._skips and self._span_ns):
            return fetched
        kept, now = dict(fetched), self._clock_ns()
        for partition, messages in fetched.items():
            asked_for = partition in self._asked_for
            floor = self._floor.get(partition, 0)
            first = next((message for message in messages if message.offset >= floor), None)
            if first is None:  # history
                continue
            if now - messages[-1].ts_source_ns <= self._span_ns:
                self._asked_for.discard(partition)
            newest = max(first.ts_source_ns, self._answered.get(partition, 0))
            too_old = first.ts_source_ns > 0 and newest < now - 2 * self._span_ns
            if not too_old or asked_for or not self._has_group:
                continue
            if (consumer.highwater(partition) or 0) - first.offset <= self._few:
                continue
            held = await _offset_at(consumer, partition, now - self._span_ns)
            if held <= first.offset:  # a record before it has a time that is still to come
                continue
            consumer.seek(partition, held)
            del kept[partition]
            self.skipped[partition] = self.skipped.get(partition, 0) + held - first.offset
            log.warning(
                "%s: %s/%d was behind: skipped offsets %d to %d, older than any window holds (%.0f s)",
                self._name, *partition, first.offset, held - 1, self._span_ns / 1e9,
            )  # fmt: skip
        return kept


async def _first_from(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> Any:
    """The first record from ``offset`` on; None where the broker has only marks of transactions there.

    Waits for the broker's answer, however long that takes: silence does not say that there is no record.
    """
    consumer.resume(partition)
    consumer.seek(partition, offset)
    while await consumer.position(partition) == offset:
        options = {"timeout_ms": _POLL_MS, "max_records": 1}
        if found := await read_one(consumer, partition, offset, **options):
            return found[0]
    return None


async def _offset_at(consumer: AIOKafkaConsumer, partition: TopicPartition, time_ns: int) -> int:
    """Of the partition's first record of this time or later, else its end."""
    found = (await consumer.offsets_for_times({partition: broker_time_ms(time_ns)}))[partition]
    if found is None:
        return int((await consumer.end_offsets([partition]))[partition])
    return int(found.offset)
