"""Kafka source and sink on a real Apache Kafka."""

import asyncio
import json
import uuid
from functools import partial

import pytest
from aiokafka import AIOKafkaProducer

from feeds.codec import decode_record, encode, make_headers
from feeds.decimals import from_units
from feeds.kafka_client import missing_topics, quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource
from feeds.kafka_start import StartAt
from feeds.market_data import Trade
from feeds.source import CommitPoint, ConnectionState, Incoming, PublishRefused, StartPosition
from tests.feeds.test_feeds_kafka_log import Notes
from tests.kit import until
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics
from tests.kit.kafka_bytes import Rec, store
from tests.kit.kafka_bytes import batch as batch_of

pytestmark = pytest.mark.kafka


@pytest.fixture
async def topic(real_kafka: RealKafka) -> str:
    """A topic of two partitions that no other run uses."""
    quiet_client_log()
    name = f"md.trades.{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {name: 2})
    return name


async def take(source: KafkaSource, count: int, timeout_s: float = 30) -> list[Incoming]:
    got: list[Incoming] = []
    async with asyncio.timeout(timeout_s):
        async for batch in source.batches():
            got += batch
            if len(got) >= count:
                break
    return got


def trade(n: int) -> Trade:
    now = 1_723_161_255_000_000_000 + n
    return Trade(
        venue="V",
        symbol=f"S{n % 16}",
        ts_event=now,
        ts_recv=now,
        price=from_units(10**9 + n),
        size=from_units(1),
        seq=n,
    )


async def publish(sink: KafkaSink, topic: str, first: int, last: int) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for n in range(first, last):
            one = trade(n)
            headers = make_headers(one, "json", "test", n)
            group.create_task(sink.publish(topic, one.key.encode(), encode(one), headers))


def next_offsets(messages: list[Incoming]) -> dict[tuple[str, int], CommitPoint]:
    return {(m.topic, m.partition): CommitPoint(m.offset + 1) for m in messages}


async def test_round_trip_commit_and_resume(real_kafka: RealKafka, topic: str) -> None:
    sink = KafkaSink("out", real_kafka.bootstrap)
    await sink.start()
    await publish(sink, topic, 0, 1000)
    source = KafkaSource("in", real_kafka.bootstrap, [topic], topic)
    await source.start()
    got = await take(source, 1000)
    assert sorted((decode_record(m.payload) for m in got), key=lambda t: t.seq) == [
        trade(n) for n in range(1000)
    ]
    assert all(m.headers["seq"] == str(json.loads(m.payload).get("seq", 0)).encode() for m in got)
    half = got[:500]
    await source.commit(next_offsets(half))
    await source.stop()
    again = KafkaSource("in", real_kafka.bootstrap, [topic], topic)
    await again.start()
    rest = await take(again, 500)
    assert {(m.partition, m.offset) for m in rest} == {(m.partition, m.offset) for m in got[500:]}
    await again.stop()
    await sink.stop()


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_what_its_own_console_producer_packs_is_read(
    real_kafka: RealKafka, topic: str, codec: str
) -> None:
    if real_kafka.server is None:
        pytest.skip("the release's tools come with a broker of our own")
    lines = [encode(trade(n)).decode() for n in range(500)]
    where = ("--bootstrap-server", real_kafka.bootstrap, "--topic", topic, "--compression-codec", codec)
    produce = partial(real_kafka.server.run_tool, text="".join(f"{line}\n" for line in lines))
    await asyncio.to_thread(produce, "org.apache.kafka.tools.ConsoleProducer", *where)
    source = KafkaSource("in", real_kafka.bootstrap, [topic], None)
    await source.start()
    got = await take(source, len(lines))
    assert sorted(m.payload.decode() for m in got) == sorted(lines)
    assert not any(m.fault for m in got)
    assert all(m.ts_source_ns for m in got)
    await source.stop()


async def test_names_of_headers_that_are_not_utf_8_cost_nothing(real_kafka: RealKafka, topic: str) -> None:
    """aiokafka cannot read such a batch, and Apache Kafka takes it."""
    odd = batch_of([Rec(b"odd", headers=[(b"\xff", b"1")]), Rec(b"too", headers=[(b"id", None)])], "zstd")
    plain = batch_of([Rec(b"plain")] * 3, "lz4")
    await store(real_kafka.bootstrap, topic, 0, plain, odd, plain)
    await store(real_kafka.bootstrap, topic, 1, plain)
    source = KafkaSource("in", real_kafka.bootstrap, [topic], topic, max_records=2)
    await source.start()
    got = await take(source, 11)
    first = [m for m in got if m.partition == 0]
    assert [m.offset for m in first] == list(range(8))
    assert [m.payload for m in first[3:5]] == [b"odd", b"too"]
    assert [dict(m.headers) for m in first[3:5]] == [{"\ufffd": b"1"}, {"id": b""}]
    assert source.unread() == []
    await source.stop()


async def test_what_was_not_committed_comes_again(real_kafka: RealKafka, topic: str) -> None:
    sink = KafkaSink("out", real_kafka.bootstrap)
    await sink.start()
    await publish(sink, topic, 0, 20)
    for _ in range(2):
        source = KafkaSource("in", real_kafka.bootstrap, [topic], topic)
        await source.start()
        assert len(await take(source, 20)) == 20
        await source.stop()
    await sink.stop()


async def test_two_members_share_the_partitions(real_kafka: RealKafka, topic: str) -> None:
    sink = KafkaSink("out", real_kafka.bootstrap)
    members = [KafkaSource(name, real_kafka.bootstrap, [topic], topic, poll_ms=50) for name in ("a", "b")]
    await sink.start()
    await asyncio.gather(*(member.start() for member in members))
    got: list[list[Incoming]] = [[], []]

    async def read(index: int) -> None:
        async for batch in members[index].batches():
            got[index] += batch

    reading = [asyncio.ensure_future(read(index)) for index in range(2)]
    sent = 0
    while not (got[0] and got[1]):  # the first member has all partitions until the second joins
        assert sent < 100_000
        await publish(sink, topic, sent, sent + 100)
        sent += 100
    start = sent
    await publish(sink, topic, start, start + 100)

    def latest(index: int) -> list[Incoming]:
        return [m for m in got[index] if int(m.headers["seq"]) >= start]

    await until(lambda: len(latest(0)) + len(latest(1)) == 100)
    assert len({m.partition for m in latest(0)}) == len({m.partition for m in latest(1)}) == 1
    assert {m.partition for m in latest(0)}.isdisjoint({m.partition for m in latest(1)})
    # Offsets of partitions that belong to the other member are its business.
    everything = next_offsets(got[0] + got[1])
    await asyncio.gather(*(member.commit(everything) for member in members))
    for member in members:
        await member.stop()
    await asyncio.gather(*reading)
    await sink.stop()


async def test_the_broker_refuses_large_messages_and_the_sink_keeps_working(
    real_kafka: RealKafka, topic: str
) -> None:
    sink = KafkaSink("out", real_kafka.bootstrap, max_bytes=8 << 20, options={"request_timeout_ms": 3000})
    await sink.start()
    with pytest.raises(PublishRefused, match="4000000 bytes"):  # our limit allows it, the broker's is 1 MiB
        await asyncio.wait_for(sink.publish(topic, b"k", b"x" * 4_000_000, {}), 30)
    with pytest.raises(PublishRefused, match=r"InvalidTopic|does not exist"):
        await asyncio.wait_for(sink.publish("no/such topic", b"k", b"x", {}), 30)
    with pytest.raises(PublishRefused, match="does not exist"):
        await asyncio.wait_for(sink.publish("nowhere.v1", b"k", b"x", {}), 30)
    await publish(sink, topic, 0, 10)
    source = KafkaSource("in", real_kafka.bootstrap, [topic], None)
    await source.start()
    assert len(await take(source, 10)) == 10
    await source.stop()
    await sink.stop()
    assert await missing_topics(real_kafka.bootstrap, [topic, "nowhere.v1"]) == ["nowhere.v1"]


async def test_broker_gone_and_back(real_kafka: RealKafka, topic: str) -> None:
    if real_kafka.server is None:
        pytest.skip("the broker that FORETICK_KAFKA names is not ours to stop")
    sink = KafkaSink("out", real_kafka.bootstrap)
    source = KafkaSource("in", real_kafka.bootstrap, [topic], topic)
    await sink.start()
    await source.start()
    await publish(sink, topic, 0, 100)
    seen = await take(source, 100)
    await source.commit(next_offsets(seen))
    await asyncio.to_thread(real_kafka.server.stop)
    waiting = asyncio.ensure_future(publish(sink, topic, 100, 200))
    more = asyncio.ensure_future(take(source, 100, timeout_s=90))
    await until(
        lambda: (
            sink.connection.state is ConnectionState.DOWN and source.connection.state is ConnectionState.DOWN
        )
    )
    assert not waiting.done()
    await asyncio.to_thread(real_kafka.server.start)
    await waiting
    seen += await more
    assert sorted(decode_record(m.payload).seq for m in seen) == list(range(200))
    await source.commit(next_offsets(seen))
    await source.stop()
    await sink.stop()


MINUTE_NS = 60 * 10**9


@pytest.mark.parametrize(
    ("begin", "committed", "few", "answered", "first"),
    [
        ("committed", 20, None, 0, 9),  # ten minutes before the last record that is committed
        ("committed", 20, 100, 0, 170),  # what no window holds is passed over
        ("committed", 20, 160, 0, 9),  # it is not much
        ("committed", 20, 100, 170, 9),  # one symbol is quiet, and others were answered
        ("committed", 20, 100, 150, 170),
        ("committed", 165, 0, 0, 154),  # what is not committed is not twice as old
        ("retention", 20, 0, 0, 170),
        ("half an hour ago", 20, 0, 0, 150),  # asked for
        ("earliest", 20, 0, 0, 0),
    ],
)
async def test_a_start_finds_its_place_by_the_times_of_records(
    real_kafka: RealKafka, topic: str, begin: str, committed: int, few: int | None, answered: int, first: int
) -> None:
    """A record a minute for three hours; windows hold ten minutes, and a group has committed an offset."""
    now = 1_723_161_255_000_000_000
    producer = AIOKafkaProducer(bootstrap_servers=real_kafka.bootstrap)
    await producer.start()
    for n in range(180):
        at = now // 10**6 - (180 - n) * 60_000
        await producer.send(topic, encode(trade(n)), partition=0, timestamp_ms=at)
    await producer.stop()
    before = KafkaSource("in", real_kafka.bootstrap, [topic], topic)
    await before.start()
    await take(before, 1)
    await before.commit({(topic, 0): CommitPoint(committed)})
    await before.stop()
    start_at: StartAt = now - 30 * MINUTE_NS if begin == "half an hour ago" else begin  # type: ignore[assignment]  # one of its words
    source = KafkaSource("in", real_kafka.bootstrap, [topic], topic, clock_ns=lambda: now, start_at=start_at)
    source.set_retention(10 * MINUTE_NS, few is not None, few or 0)
    if answered:
        at = StartPosition(committed, committed, now - (180 - answered) * MINUTE_NS)
        Notes(source, "", {(topic, 0): at})
    await source.start()
    got = await take(source, 180 - first)
    await source.stop()
    assert [m.offset for m in got] == list(range(first, 180))
    passed_over = first - committed if begin == "committed" and first == 170 else 0
    assert source.skipped == ({(topic, 0): passed_over} if passed_over else {})
