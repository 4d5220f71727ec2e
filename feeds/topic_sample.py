"""Which symbols the newest records of a topic are of, partition by partition, and how many come a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from feeds.codec import MalformedRecord, decode_record, header_encoding
from feeds.kafka_range import KafkaRange, OffsetsGone, Span
from feeds.market_data import VenueHeartbeat
from feeds.source import Incoming, Partition

NEWEST = 1000
"""Records of each partition."""


class TopicSample(NamedTuple):
    """``rates``: records a second by VENUE:SYMBOL, of every partition; empty where it holds none."""

    rates: Mapping[Partition, Mapping[str, float]]

    def partitions_of(self, symbol: str) -> list[Partition]:
        """Where its records are, in order."""
        return sorted(partition for partition, rates in self.rates.items() if symbol in rates)


async def sample_topics(
    bootstrap: str,
    topics: Iterable[str],
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    newest: int = NEWEST,
    timeout_s: float = 10.0,
) -> TopicSample:
    """Read the ``newest`` records of each partition; those that are no record of a symbol do not count.

    Raises BrokerError: no answer in time, or no such topic.
    """
    rates: dict[Partition, Mapping[str, float]] = {}
    async with KafkaRange(bootstrap, options=options, timeout_s=timeout_s) as reader:
        for partition, span in (await reader.spans(topics)).items():
            found: list[Incoming] = []
            try:
                async for batch in reader.read(partition, Span(max(span.first, span.end - newest), span.end)):
                    found += batch
            except OffsetsGone:  # deleted while it was read: the rest is enough
                pass
            rates[partition] = _rates_of(found)
    return TopicSample(rates)


def _rates_of(messages: Iterable[Incoming]) -> dict[str, float]:
    """By the broker's times; records of one moment count as those of a second."""
    counts: Counter[str] = Counter()
    times = []
    for message in messages:
        if symbol := _symbol_of(message):
            counts[symbol] += 1
            times.append(message.ts_source_ns)
    seconds = (max(times) - min(times)) / 1e9 if times else 0.0
    return {symbol: count / (seconds or 1.0) for symbol, count in sorted(counts.items())}


def _symbol_of(message: Incoming) -> str:
    """VENUE:SYMBOL; empty for what is no usable record of one."""
    if message.fault is not None or not message.payload:
        return ""
    try:
        record = decode_record(message.payload, header_encoding(message.headers))
    except MalformedRecord:
        return ""
    return "" if isinstance(record, VenueHeartbeat) else record.key
