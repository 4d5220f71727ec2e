"""Fetches messages from Kafka, also past what aiokafka cannot read."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from feeds.kafka_batches import Damaged
from feeds.kafka_client import has_stopped_fetching
from feeds.kafka_reader import description_of, is_of_data, messages_of, read_all_raw
from feeds.source import DataUnreadable, Incoming, Partition

Fetched = dict[TopicPartition, list[Incoming]]


class KafkaFetcher:
    """At most ``max_records`` at a time, until ``stop``.

    ``stops_at_damage``: a batch that cannot be read is an error.
    """

    def __init__(
        self,
        name: str,
        max_records: int,
        poll_ms: int,
        clock_ns: Callable[[], int],
        stop: asyncio.Event,
        stops_at_damage: bool,
    ) -> None:
        self._name, self._stop, self._stops_at_damage = name, stop, stops_at_damage
        self._max_records, self._poll_ms = max_records, poll_ms
        self._clock_ns = clock_ns
        self.unknown_times = 0
        """Records whose time is unknown, because it is outside the years 1990 to 2099."""

    async def fetch(
        self,
        consumer: AIOKafkaConsumer,
        reached: Mapping[Partition, tuple[int, int]],
        *,
        waits: bool = True,
    ) -> Fetched:
        """Messages by partition; ``waits`` for the first. Raises DataUnreadable where the settings say so."""
        try:
            return await self._fetch(consumer, self._poll_ms if waits else 0)
        except Exception as error:
            if not is_of_data(error):
                raise
            why = repr(error)
        return await self._fetch_carefully(consumer, reached, why)

    async def _fetch(self, consumer: AIOKafkaConsumer, timeout_ms: int) -> Fetched:
        fetched = await consumer.getmany(timeout_ms=timeout_ms, max_records=1)
        if not fetched and has_stopped_fetching(consumer) and not self._stop.is_set():
            raise KafkaError("the client has stopped fetching")
        if fetched and self._max_records > 1:
            with contextlib.suppress(OffsetOutOfRangeError):  # of another partition; it comes again
                for partition, more in (await consumer.getmany(max_records=self._max_records - 1)).items():
                    fetched.setdefault(partition, []).extend(more)
        return {partition: self.messages(partition, records) for partition, records in fetched.items()}

    async def _fetch_carefully(
        self, consumer: AIOKafkaConsumer, reached: Mapping[Partition, tuple[int, int]], why: str
    ) -> Fetched:
        """The same where the client cannot read some partition: it has not said which."""
        reading = consumer.assignment() - consumer.paused()
        starts = {each: reached[each][0] for each in reading if each in reached}
        for partition, start in starts.items():  # what the client had read of the others is lost
            consumer.seek(partition, start)
        read = await read_all_raw(consumer, starts.items())
        if starts and not read:
            raise KafkaError(f"nothing can be read: {why}")
        damaged = [(p, each) for p, items in read.items() for each in items if isinstance(each, Damaged)]
        if self._stops_at_damage and (found := next((d for d in damaged if d[1].batch), None)):
            raise DataUnreadable(f"{self._name}: {description_of(*found)}")
        return {p: self.messages(p, items) for p, items in read.items() if items}

    def messages(self, partition: TopicPartition, records: Iterable[Any]) -> list[Incoming]:
        """Records of aiokafka, or of `feeds.kafka_reader`, as messages that arrive now."""
        messages = messages_of(partition, records, self._clock_ns())
        self.unknown_times += sum(not (each.ts_source_ns or each.fault) for each in messages)
        return messages
