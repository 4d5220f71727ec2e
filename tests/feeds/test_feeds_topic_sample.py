"""A sample of a topic: whose records its partitions hold, and how many come a second."""

import asyncio

import pytest

from feeds.kafka_client import BrokerError
from feeds.kafka_sink import KafkaSink
from feeds.mock_broker import MockBroker
from feeds.payloads.payload_decoder import WireDecoder
from feeds.source import Incoming
from feeds.topic_sample import TopicSample, _rates_of, sample_topics
from tests.kit.records import SECOND, START, TOPIC, trade


def received(symbol: str, at_s: float, payload: bytes | None = None) -> Incoming:
    found = trade(symbol, START) if payload is None else payload
    return Incoming(TOPIC, 0, 0, None, found, ts_source_ns=START + round(at_s * SECOND))


async def publish(bootstrap: str, records: list[tuple[str, bytes]]) -> None:
    sink = KafkaSink("fill", bootstrap)
    await sink.start()
    await asyncio.gather(*(sink.publish(TOPIC, key.encode(), payload, {}) for key, payload in records))
    await sink.stop()


async def test_each_partition_says_whose_newest_records_it_has() -> None:
    with MockBroker() as broker:
        broker.create_topic(TOPIC, 3)
        symbols = [f"V:S{n}" for n in range(6)]
        await publish(broker.bootstrap, [("old", trade("V:OLD", START))])
        await publish(broker.bootstrap, [(s, trade(s, START + n)) for n in range(20) for s in symbols])
        sample = await sample_topics(broker.bootstrap, [TOPIC], WireDecoder(1 << 20), newest=15)
        assert sorted(sample.rates) == [(TOPIC, n) for n in range(3)]
        assert all(len(sample.partitions_of(symbol)) == 1 for symbol in symbols)
        assert sample.partitions_of("V:OLD") == [], "older than the newest"
        with pytest.raises(BrokerError, match="no topic"):
            await sample_topics(broker.bootstrap, ["none"], WireDecoder(1 << 20))


def test_rates_are_by_the_brokers_time() -> None:
    found = [received("V:A", n / 10) for n in range(21)] + [received("V:B", 1.0)]
    assert _rates_of(found, WireDecoder(1 << 20)) == {"V:A": 10.5, "V:B": 0.5}


def test_what_is_no_record_of_a_symbol_does_not_count() -> None:
    beat = b'{"type": "heartbeat", "venue": "V", "ts_event": %d, "ts_recv": %d}' % (START, START)
    odd = [received("", 0.0, payload) for payload in (b"", b"{", b"\xff", beat)]
    assert _rates_of([*odd, received("V:A", 0.0)], WireDecoder(1 << 20)) == {"V:A": 1.0}


def test_a_symbol_may_be_in_several_partitions() -> None:
    sample = TopicSample({(TOPIC, 2): {"V:A": 1.0}, (TOPIC, 0): {"V:A": 2.0}, (TOPIC, 1): {}})
    assert sample.partitions_of("V:A") == [(TOPIC, 0), (TOPIC, 2)]
