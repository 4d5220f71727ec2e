"""Batches that cannot be read, on librdkafka's mock cluster, which stores whatever bytes it is sent."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
from aiokafka import TopicPartition
from confluent_kafka import Producer

from feeds import kafka_batches, kafka_reader
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.kafka_follower import PartitionReader
from feeds.kafka_range import KafkaRange
from feeds.kafka_source import KafkaSource
from feeds.mock_broker import MockBroker
from feeds.source import YEAR_1990, YEAR_2100, DataUnreadable, Incoming, PartitionedSource
from tests.kit import until
from tests.kit.kafka_bytes import NAMES, Rec, batch, store
from tests.kit.kafka_clients import QUICK, KafkaClients

T = "md.trades.v1"
CODECS = sorted(set(NAMES) - {"none"})


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker() as broker:
        broker.create_topic(T, 2)
        yield broker


@pytest.fixture
async def kafka(broker: MockBroker) -> AsyncIterator[KafkaClients]:
    async with KafkaClients(broker.bootstrap, T, QUICK) as clients:
        yield clients


async def read(source: KafkaSource, until: int) -> list[Incoming]:
    """Messages up to the one that says ``until`` of partition 0, and 8 of partition 1."""
    got: list[Incoming] = []

    def done() -> bool:
        newest = max((m.last_offset for m in got if m.partition == 0), default=-1)
        return newest >= until and sum(m.partition == 1 for m in got) >= 8

    async with asyncio.timeout(30), aclosing(source.batches()) as batches:
        async for each in batches:
            got += each
            if done():
                break
    return got


def spans(got: list[Incoming], partition: int = 0) -> list[object]:
    mine = [m for m in got if m.partition == partition]
    return [m.offset if m.fault is None else (m.offset, m.last_offset) for m in mine]


DAMAGE = {
    "checksum": batch([Rec()] * 3, checksum=1),
    "codec": batch([Rec()] * 3, 6),
    "records": batch([Rec()] * 3, body=b"\xff" * 30),
    **{name: batch([Rec()] * 3, name, body=b"\xff" * 40) for name in CODECS},
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
async def test_a_damaged_batch_costs_its_own_offsets(kafka, kind):
    good = batch([Rec(b"good")] * 4)
    await store(kafka.bootstrap, T, 0, good, DAMAGE[kind], good)
    await store(kafka.bootstrap, T, 1, good, good)
    source = await kafka.open_source()
    got = await read(source, 10)
    assert spans(got) == [0, 1, 2, 3, (4, 6), 7, 8, 9, 10]
    assert spans(got, 1) == list(range(8))
    (fault,) = [m.fault for m in got if m.fault is not None]
    assert fault.reason == "corrupt"
    assert f"offsets 4 to 6 of {T}/0 cannot be read" in fault.message
    assert source.reached[T, 0][0] == 11


async def test_reading_stops_at_damage_where_the_settings_say_so(kafka):
    await store(kafka.bootstrap, T, 0, batch([Rec()] * 4), DAMAGE["checksum"])
    source = await kafka.open_source(on_unreadable="stop")
    with pytest.raises(DataUnreadable, match=f"offsets 4 to 6 of {T}/0"):
        await read(source, 6)


async def test_one_damaged_record_stops_nothing(kafka):
    bad = Rec(raw=b"\x01")
    await store(kafka.bootstrap, T, 0, batch([Rec(), bad, Rec(headers=[(b"\xff", None)])]))
    await store(kafka.bootstrap, T, 1, batch([Rec()] * 8))
    source = await kafka.open_source(on_unreadable="stop")
    got = await read(source, 2)
    assert spans(got) == [0, (1, 1), 2]
    assert got[[m.offset for m in got if m.partition == 0].index(2)].fault is None


async def test_a_partition_full_of_damage_keeps_no_other_waiting(kafka):
    await store(kafka.bootstrap, T, 0, *([DAMAGE["lz4"]] * 40))
    await store(kafka.bootstrap, T, 1, *([batch([Rec()] * 2)] * 4))
    source = await kafka.open_source()
    got = await read(source, 119)
    assert spans(got) == [(at, at + 2) for at in range(0, 120, 3)]
    assert spans(got, 1) == list(range(8))


@pytest.mark.parametrize("codec", CODECS)
async def test_what_a_producer_packs_is_read(kafka, codec):
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": codec, "linger.ms": 50})
    for n in range(30):
        producer.produce(T, b"%d" % n * 20, partition=n % 2)
    await asyncio.to_thread(producer.flush)
    source = await kafka.open_source()
    got = await read(source, 14)
    assert sorted(m.payload for m in got) == sorted(b"%d" % n * 20 for n in range(30))
    assert not any(m.fault for m in got)


async def test_a_batch_larger_than_a_fetch_is_read_whole(kafka, monkeypatch):
    """Brokers send a part of it, or the whole, by their version; this asks for a part first."""
    monkeypatch.setattr(kafka_reader, "_BYTES", 200)
    large = batch([Rec(b"x" * 100_000)] * 3)
    await store(kafka.bootstrap, T, 0, DAMAGE["lz4"], large, DAMAGE["codec"], large)
    await store(kafka.bootstrap, T, 1, batch([Rec()] * 8))
    source = await kafka.open_source(options={"max_partition_fetch_bytes": 200})
    got = await read(source, 11)
    assert spans(got) == [(0, 2), 3, 4, 5, (6, 8), 9, 10, 11]
    assert all(len(m.payload) == 100_000 for m in got if m.partition == 0 and m.fault is None)


async def test_times_outside_1990_to_2099_are_unknown(kafka):
    stamps = [-(2**63), -1, 0, YEAR_1990 // 10**6, 1_709_632_800_000, 1_709_632_800_000_000, 2**63 - 1]
    await store(kafka.bootstrap, T, 0, *(batch([Rec()], first_ms=each) for each in stamps))
    await store(kafka.bootstrap, T, 1, batch([Rec()] * 8))
    source = await kafka.open_source()
    got = [m.ts_source_ns for m in await read(source, 6) if m.partition == 0]
    assert got == [0, 0, 0, YEAR_1990, 1_709_632_800_000_000_000, 0, 0]
    assert source.unknown_times == 5
    assert all(YEAR_1990 <= each < YEAR_2100 for each in got if each)


async def test_windows_are_filled_behind_a_record_whose_time_is_unknown(kafka):
    """The record before the committed offset says how far back to read; where it does not, one before it."""
    now_ms = 1_709_632_800_000
    stamps = [*(now_ms + n * 1000 for n in range(20)), now_ms * 1000, -1]
    await store(kafka.bootstrap, T, 0, *(batch([Rec()], first_ms=each) for each in stamps))
    source = kafka.source("g")
    source.set_retention(5 * 10**9, skips=True)
    await source.start()
    async with asyncio.timeout(20), aclosing(source.batches()) as batches:
        async for each in batches:
            if any(m.offset == 21 for m in each):
                break
    assert source._consumer is not None
    await source._consumer.commit({p: 22 for p in source._consumer.assignment() if p.partition == 0})
    await source.stop()
    again = kafka.source("g")
    again.set_retention(5 * 10**9, skips=False)
    await again.start()
    async with asyncio.timeout(20), aclosing(again.batches()) as batches:
        first = (await anext(batches))[0]
    assert first.offset in (0, 13, 14)


async def test_null_and_empty_values_are_told_apart(kafka):
    await store(kafka.bootstrap, T, 0, batch([Rec(None), Rec(b""), Rec(b"x")]))
    await store(kafka.bootstrap, T, 1, batch([Rec()] * 8))
    source = await kafka.open_source()
    got = [(m.null, m.payload) for m in await read(source, 2) if m.partition == 0]
    assert got == [(True, b""), (False, b""), (False, b"x")]


async def test_a_reader_of_a_range_goes_on_behind_damage(broker):
    good = batch([Rec(b"good", headers=[(b"\xff", b"1")])] * 2)
    await store(broker.bootstrap, T, 0, good, DAMAGE["zstd"], good)
    async with KafkaRange(broker.bootstrap) as reader:
        got = [m async for each in reader.read((T, 0), range(0, 7)) for m in each]
    assert spans(got) == [0, 1, (2, 4), 5, 6]


async def test_a_client_that_stopped_fetching_is_read_on_without(kafka):
    """aiokafka says so in its log alone, and waits without an end."""
    await store(kafka.bootstrap, T, 0, batch([Rec()] * 2))
    source = await kafka.open_source()
    async with asyncio.timeout(25), aclosing(source.batches()) as batches:
        assert spans(await anext(batches)) == [0, 1]
        fetching = source._reading.reader.consumer._fetcher._fetch_task  # type: ignore[union-attr]
        fetching.cancel()
        await asyncio.wait([fetching])
        await store(kafka.bootstrap, T, 0, batch([Rec()] * 2))
        assert spans(await anext(batches)) == [2, 3]


async def test_ready_is_what_was_fetched(broker, kafka):
    source = await kafka.open_source()
    assert isinstance(source, PartitionedSource)
    reading = asyncio.create_task(read(source, 1))
    await until(lambda: source.unread() == [])  # nothing is in the topic, and the broker says so
    broker.set_down()
    await until(lambda: len(source.unread()) == 2 or "cannot be read" in str(source.unread()), 40)
    assert "in cannot be read" in source.unread()[0] or f"{T}/0" in source.unread()[0]
    broker.set_up()
    await until(lambda: source.unread() == [], 40)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await source.stop()
    assert source.unread() == []


class Polled:
    """A consumer of partitions 0 to 2, by when the broker answered last about each, ms."""

    def __init__(self, polled_ms: dict[int, int | None], paused: set[int]) -> None:
        self._polled_ms, self._paused = polled_ms, paused

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition(T, each) for each in self._polled_ms}

    def paused(self) -> set[TopicPartition]:
        return {TopicPartition(T, each) for each in self._paused}

    def last_poll_timestamp(self, partition: TopicPartition) -> int | None:
        return self._polled_ms[partition.partition]


def reads(source, consumer):
    """Let the source read all that the consumer has."""
    source._consumer, source._reading.reader = consumer, PartitionReader(consumer)
    source._reading.reader.partitions = consumer.assignment()


def test_a_partition_is_named_while_nothing_of_it_comes():
    source = KafkaSource("in", "127.0.0.1:1", [T], None)
    now_ms, long_ago = time.time_ns() // 10**6, time.monotonic_ns() - 60 * 10**9
    old_ms = now_ms - 30_000
    reads(source, Polled({0: now_ms, 1: None, 2: old_ms}, set()))
    source._waits_since = long_ago
    first, second = source.unread()
    assert first == f"{T}/1 is not read yet"
    assert second.startswith(f"{T}/2 cannot be read: nothing of it came from the broker for 3")
    source._waits_since = None  # what came is being taken
    assert source.unread() == [first]
    source._waits_since = time.monotonic_ns()  # it was, until now
    assert source.unread() == [first]
    source._waits_since = long_ago
    reads(source, Polled({0: now_ms, 1: None, 2: old_ms}, {1, 2}))
    assert source.unread() == [], "a partition that is paused could be read"
    reads(source, Polled({0: None}, {0}))
    assert source.unread() == []


def test_a_check_names_a_codec_that_is_missing(broker, monkeypatch):
    settings = KafkaSourceConnector(bootstrap=broker.bootstrap, topics=(T,))
    assert all(finding.ok for finding in settings.check())
    monkeypatch.setattr(kafka_batches, "broken_codecs", lambda: {"lz4": "it is not there"})
    (wrong,) = [finding for finding in settings.check() if not finding.ok]
    assert (wrong.key, "lz4 cannot be read: it is not there" in wrong.message) == ("codecs", True)
