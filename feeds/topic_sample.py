"""Which symbols the newest records of a topic are of, partition by partition, and how many come a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from feeds.kafka_range import KafkaRange
from feeds.market_data import AnyRecord
from feeds.payloads.payload_decoder import PayloadDecoder
from feeds.source import Incoming, Partition

NEWEST = 1000
"""Records of each partition."""


class TopicSample(NamedTuple):
    """``rates``: records a second by VENUE:SYMBOL, of every partition; empty where it holds none."""

    rates: Mapping[Partition, Mapping[str, float]]

    def partitions_of(self, symbol: str) -> list[Partition]:
        """Where its records are, in order."""
        return sorted(partition for partition, rates in self.rates.items() if symbol in rates)

    def renamed(self, symbols: Mapping[str, str]) -> TopicSample:
        """With the rates of other names as those of their ``symbols``."""
        found: dict[Partition, dict[str, float]] = {}
        for partition, rates in self.rates.items():
            own = found[partition] = {}
            for name, rate in rates.items():
                symbol = symbols.get(name, name)
                own[symbol] = own.get(symbol, 0.0) + rate
        return TopicSample(found)


async def sample_topics(
    bootstrap: str,
    topics: Iterable[str],
    payloads: PayloadDecoder,
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
            found = await reader.newest(partition, span, newest)
            await payloads.prepare(found)
            rates[partition] = _rates_of(found, payloads)
    return TopicSample(rates)


def _rates_of(messages: Iterable[Incoming], payloads: PayloadDecoder) -> dict[str, float]:
    """By the broker's times; records of one moment count as those of a second."""
    counts: Counter[str] = Counter()
    times = []
    for message in messages:
        if symbols := _symbols_of(message, payloads):
            counts.update(symbols)
            times.append(message.ts_source_ns)
    seconds = (max(times) - min(times)) / 1e9 if times else 0.0
    return {symbol: count / (seconds or 1.0) for symbol, count in sorted(counts.items())}


def _symbols_of(message: Incoming, payloads: PayloadDecoder) -> list[str]:
    """VENUE:SYMBOL of each usable record."""
    if message.fault is not None or not message.payload:
        return []
    records = [part.record for part in payloads.parts(message).parts]
    return [each.key for each in records if isinstance(each, AnyRecord)]
