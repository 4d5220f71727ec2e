"""Messages of a running feed, for a sample."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from feeds.kafka_range import KafkaRange
from feeds.source import Incoming, Source


async def newest_of(bootstrap: str, topic: str, most: int, options: Mapping[str, Any]) -> list[Incoming]:
    """The newest messages of a topic, about as many of each partition. Raises BrokerError."""
    found: list[Incoming] = []
    async with KafkaRange(bootstrap, options=options) as reader:
        spans = await reader.spans([topic])
        share = max(1, most // max(1, len(spans)))
        for partition, span in spans.items():
            found += await reader.newest(partition, span, share)
    return sorted(found, key=lambda each: each.ts_source_ns)[-most:]


async def next_of(source: Source, most: int, seconds: float) -> list[Incoming]:
    """What a source yields, for at most so long."""
    found: list[Incoming] = []

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await source.start()
            async for batch in source.batches():
                found += batch
                if len(found) >= most:
                    break
    await source.stop()
    return found[:most]
