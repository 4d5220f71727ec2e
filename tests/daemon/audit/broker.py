"""Topics on a broker, and the form of a file: for tests of commands that look back."""

import asyncio
from collections.abc import Iterable

from feeds.codec import encode, make_headers
from feeds.kafka_range import KafkaRange
from feeds.kafka_sink import KafkaSink
from feeds.market_data import AnyMessage
from feeds.source import Incoming

FORM = """
description = "trades"
container = "csv"
[[records]]
kind = "trade"
venue = "V"
time = { field = "time", format = "epoch-ns" }
fields = { symbol = "symbol", price = "price", size = "size" }
"""
"""Of recorded trades with the header `time,symbol,price,size`."""


async def fill(bootstrap: str, topic: str, messages: Iterable[AnyMessage | bytes], key: bytes = b"k") -> None:
    """Publish messages, or payloads as they are, one after the other."""
    sink = KafkaSink("fill", bootstrap)
    await sink.start()
    try:
        for message in messages:
            if isinstance(message, bytes):
                await sink.publish(topic, key, message, {})
            else:
                headers = make_headers(message, "json", "test", 0)
                await sink.publish(topic, key, encode(message), headers)
    finally:
        await sink.stop()


async def everything(bootstrap: str, topic: str) -> list[Incoming]:
    """All of a topic."""
    async with KafkaRange(bootstrap) as reader:
        spans = await reader.spans([topic])
        return [m for p, span in spans.items() async for batch in reader.read(p, span) for m in batch]


def run_fill(bootstrap: str, topic: str, messages: Iterable[AnyMessage | bytes], key: bytes = b"k") -> None:
    asyncio.run(fill(bootstrap, topic, messages, key))


def run_everything(bootstrap: str, topic: str) -> list[Incoming]:
    return asyncio.run(everything(bootstrap, topic))
