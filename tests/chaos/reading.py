"""The answers topic as a reader of its own sees it."""

import asyncio
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from feeds.codec import decode_message, decode_record
from feeds.kafka_source import KafkaSource
from feeds.market_data import Answer


class Published(NamedTuple):
    """An answer and where it stands in the topic. ``answer_id``: by its header."""

    offset: int
    answer_id: str
    answer: Answer


def published(offset: int, payload: bytes, headers: dict[str, bytes]) -> Published | None:
    """The message, if it is an answer."""
    message = decode_message(payload)
    if not isinstance(message, Answer):
        return None
    return Published(offset, headers["answer_id"].decode(), message)


class Tail:
    """Reads a topic of one partition while it grows; a message that comes again counts once."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        at_once = {"fetch_max_wait_ms": 20}
        self._source = KafkaSource("test-answers", bootstrap, [topic], None, options=at_once)
        self._reading: asyncio.Task[None] | None = None
        self.found: dict[int, Published] = {}
        self.ordered: list[Published] = []
        """The same, as it came."""

    async def start(self) -> None:
        await self._source.start()
        self._reading = asyncio.create_task(self._read())

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._source.stop()

    async def _read(self) -> None:
        async for batch in self._source.batches():
            for each in batch:
                one = published(each.offset, each.payload, dict(each.headers))
                if one is not None and each.offset not in self.found:
                    self.found[each.offset] = one
                    self.ordered.append(one)


async def read_to_end(bootstrap: str, topic: str) -> list[Published]:
    """All committed answers of a topic of one partition, in the order of their offsets."""
    read = await _messages(bootstrap, topic, 1)
    found = (published(offset, payload, headers) for _, offset, payload, headers in read)
    return [each for each in found if each is not None]


async def offsets_in(bootstrap: str, topic: str, partitions: int, until_ns: int) -> dict[str, list[int]]:
    """Where each symbol's records before this event time are, in its partition.

    A producer that tries again while the broker is away may change their order, and write one twice.
    """
    found: dict[str, dict[int, int]] = {}
    for _, offset, payload, _ in await _messages(bootstrap, topic, partitions):
        record = decode_record(payload)
        if record.ts_event < until_ns:
            found.setdefault(record.key, {}).setdefault(record.ts_event, offset)
    return {symbol: list(offsets.values()) for symbol, offsets in found.items()}


_Message = tuple[int, int, bytes, dict[str, bytes]]
"""Partition, offset, payload, headers."""


async def _messages(bootstrap: str, topic: str, partitions: int) -> list[_Message]:
    """All committed messages of a topic."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    await consumer.start()
    found: list[_Message] = []
    try:
        for partition in (TopicPartition(topic, number) for number in range(partitions)):
            consumer.assign([partition])
            await consumer.seek_to_beginning(partition)
            end = (await consumer.end_offsets([partition]))[partition]
            while await consumer.position(partition) < end:
                read = (await consumer.getmany(partition, timeout_ms=200)).get(partition, [])
                found += [
                    (each.partition, each.offset, each.value or b"", dict(each.headers)) for each in read
                ]
    finally:
        await consumer.stop()
    return found
