"""The answers topic as a reader of its own sees it."""

import asyncio
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from feeds.codec import decode_message
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
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    await consumer.start()
    found: list[Published] = []
    try:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end = (await consumer.end_offsets([partition]))[partition]
        while await consumer.position(partition) < end:
            for record in (await consumer.getmany(partition, timeout_ms=200)).get(partition, []):
                one = published(record.offset, record.value or b"", dict(record.headers))
                if one is not None:
                    found.append(one)
    finally:
        await consumer.stop()
    return found
