"""Kafka source and sink on a real Apache Kafka."""

import asyncio
import json
from functools import partial

import pytest

from feeds.codec import decode_record, encode, make_headers
from feeds.decimals import from_units
from feeds.kafka_client import missing_topics
from feeds.kafka_sink import KafkaSink
from feeds.kafka_start import StartAt
from feeds.market_data import Trade
from feeds.source import CommitPoint, ConnectionState, Incoming, PublishRefused, StartPosition
from tests.feeds.test_feeds_kafka_log import Notes
from tests.kit import until
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import producing
from tests.kit.kafka_bytes import Rec, store
from tests.kit.kafka_bytes import batch as batch_of
from tests.kit.kafka_clients import KafkaClients, next_offsets, take

pytestmark = pytest.mark.kafka


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


async def publish(real: KafkaClients, sink: KafkaSink, first: int, last: int) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for n in range(first, last):
            one = trade(n)
            headers = make_headers(one, "json", "test", n)
            group.create_task(sink.publish(real.topic, one.key.encode(), encode(one), headers))


async def test_round_trip_commit_and_resume(real: KafkaClients) -> None:
    """What was not committed comes again."""
    await publish(real, await real.open_sink(), 0, 1000)
    unread = await real.open_source(real.topic)
    assert len(await take(unread, 1000)) == 1000
    await unread.stop()
    source = await real.open_source(real.topic)
    got = await take(source, 1000)
    records = sorted((decode_record(m.payload) for m in got), key=lambda t: t.seq)
    assert records == [trade(n) for n in range(1000)]
    assert all(m.headers["seq"] == str(json.loads(m.payload).get("seq", 0)).encode() for m in got)
    await source.commit(next_offsets(got[:500]))
    await source.stop()
    for _ in range(2):
        again = await real.open_source(real.topic)
        rest = await take(again, 500)
        assert {(m.partition, m.offset) for m in rest} == {(m.partition, m.offset) for m in got[500:]}
        await again.stop()


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_what_its_own_console_producer_packs_is_read(
    real_kafka: RealKafka, real: KafkaClients, codec: str
) -> None:
    if real_kafka.server is None:
        pytest.skip("the release's tools come with a broker of our own")
    lines = [encode(trade(n)).decode() for n in range(500)]
    where = ("--bootstrap-server", real_kafka.bootstrap, "--topic", real.topic, "--compression-codec", codec)
    produce = partial(real_kafka.server.run_tool, text="".join(f"{line}\n" for line in lines))
    await asyncio.to_thread(produce, "org.apache.kafka.tools.ConsoleProducer", *where)
    got = await take(await real.open_source(), len(lines))
    assert sorted(m.payload.decode() for m in got) == sorted(lines)
    assert not any(m.fault for m in got)
    assert all(m.ts_source_ns for m in got)


async def test_names_of_headers_that_are_not_utf_8_cost_nothing(real: KafkaClients) -> None:
    """aiokafka cannot read such a batch, and Apache Kafka takes it."""
    odd = batch_of([Rec(b"odd", headers=[(b"\xff", b"1")]), Rec(b"too", headers=[(b"id", None)])], "zstd")
    plain = batch_of([Rec(b"plain")] * 3, "lz4")
    await store(real.bootstrap, real.topic, 0, plain, odd, plain)
    await store(real.bootstrap, real.topic, 1, plain)
    source = await real.open_source(real.topic, max_records=2)
    got = await take(source, 11)
    first = [m for m in got if m.partition == 0]
    assert [m.offset for m in first] == list(range(8))
    assert [m.payload for m in first[3:5]] == [b"odd", b"too"]
    assert [dict(m.headers) for m in first[3:5]] == [{"\ufffd": b"1"}, {"id": b""}]
    assert source.unread() == []


async def test_two_members_share_the_partitions(real: KafkaClients) -> None:
    sink = await real.open_sink()
    members = [real.source(real.topic, name=name, poll_ms=50) for name in ("a", "b")]
    await asyncio.gather(*(member.start() for member in members))
    got: list[list[Incoming]] = [[], []]

    async def read(index: int) -> None:
        async for batch in members[index].batches():
            got[index] += batch

    for index in range(2):
        real.run(read(index))
    sent = 0
    while not (got[0] and got[1]):  # the first member has all partitions until the second joins
        assert sent < 100_000
        await publish(real, sink, sent, sent + 100)
        sent += 100
    start = sent
    await publish(real, sink, start, start + 100)

    def latest(index: int) -> list[Incoming]:
        return [m for m in got[index] if int(m.headers["seq"]) >= start]

    await until(lambda: len(latest(0)) + len(latest(1)) == 100)
    assert len({m.partition for m in latest(0)}) == len({m.partition for m in latest(1)}) == 1
    assert {m.partition for m in latest(0)}.isdisjoint({m.partition for m in latest(1)})
    # Offsets of partitions that belong to the other member are its business.
    everything = next_offsets(got[0] + got[1])
    await asyncio.gather(*(member.commit(everything) for member in members))


async def test_the_broker_refuses_large_messages_and_the_sink_keeps_working(
    real: KafkaClients,
) -> None:
    sink = await real.open_sink(max_bytes=8 << 20, options={"request_timeout_ms": 3000})
    with pytest.raises(PublishRefused, match="4000000 bytes"):  # our limit allows it, the broker's is 1 MiB
        await asyncio.wait_for(sink.publish(real.topic, b"k", b"x" * 4_000_000, {}), 60)
    with pytest.raises(PublishRefused, match=r"InvalidTopic|does not exist"):
        await asyncio.wait_for(sink.publish("no/such topic", b"k", b"x", {}), 60)
    with pytest.raises(PublishRefused, match="does not exist"):
        await asyncio.wait_for(sink.publish("nowhere.v1", b"k", b"x", {}), 60)
    await publish(real, sink, 0, 10)
    assert len(await take(await real.open_source(), 10)) == 10
    assert await missing_topics(real.bootstrap, [real.topic, "nowhere.v1"]) == ["nowhere.v1"]


async def test_broker_gone_and_back(real_kafka: RealKafka, real: KafkaClients) -> None:
    if real_kafka.server is None:
        pytest.skip("the broker that FORETICK_KAFKA names is not ours to stop")
    sink, source = await real.open_sink(), await real.open_source(real.topic)
    await publish(real, sink, 0, 100)
    seen = await take(source, 100)
    await source.commit(next_offsets(seen))
    await asyncio.to_thread(real_kafka.server.stop)
    waiting = asyncio.ensure_future(publish(real, sink, 100, 200))
    more = asyncio.ensure_future(take(source, 100, timeout_s=90))
    await until(lambda: {sink.connection.state, source.connection.state} == {ConnectionState.DOWN})
    assert not waiting.done()
    await asyncio.to_thread(real_kafka.server.start)
    await waiting
    seen += await more
    assert sorted(decode_record(m.payload).seq for m in seen) == list(range(200))
    await source.commit(next_offsets(seen))


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
    real: KafkaClients, begin: str, committed: int, few: int | None, answered: int, first: int
) -> None:
    """A record a minute for three hours; windows hold ten minutes, and a group has committed an offset."""
    now, topic = 1_723_161_255_000_000_000, real.topic
    async with producing(real.bootstrap) as producer:
        for n in range(180):
            at = now // 10**6 - (180 - n) * 60_000
            await producer.send(topic, encode(trade(n)), partition=0, timestamp_ms=at)
    before = await real.open_source(topic)
    await take(before, 1)
    await before.commit({(topic, 0): CommitPoint(committed)})
    await before.stop()
    start_at: StartAt = now - 30 * MINUTE_NS if begin == "half an hour ago" else begin  # type: ignore[assignment]  # one of its words
    source = real.source(topic, clock_ns=lambda: now, start_at=start_at)
    source.set_retention(10 * MINUTE_NS, few is not None, few or 0)
    if answered:
        at = StartPosition(committed, committed, now - (180 - answered) * MINUTE_NS)
        Notes(source, "", {(topic, 0): at})
    await source.start()
    got = await take(source, 180 - first)
    assert [m.offset for m in got] == list(range(first, 180))
    passed_over = first - committed if begin == "committed" and first == 170 else 0
    assert source.skipped == ({(topic, 0): passed_over} if passed_over else {})
