"""Kafka source and sink on librdkafka's mock cluster, which can inject faults."""

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.producer.message_accumulator import MessageBatch

from feeds.backoff import CAP_S, ConnectionLog, delay_s
from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.kafka_client import BrokerError, missing_topics
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource
from feeds.mock_broker import NOTICE, MockBroker, MockUnavailable
from feeds.source import (
    CatchesUp,
    CommitFailed,
    CommitPoint,
    ConnectionState,
    Incoming,
    PublishRefused,
    Sink,
    SinkStopped,
    Source,
)
from tests.kit import until
from tests.kit.kafka import free_ports
from tests.kit.kafka_clients import QUICK, KafkaClients, next_offsets, numbers, take
from tests.kit.kafka_proxy import Api, Fault, KafkaProxy

T = "md.trades.v1"


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker() as broker:
        broker.create_topic(T, 2)
        yield broker


@pytest.fixture
async def kafka(broker: MockBroker) -> AsyncIterator[KafkaClients]:
    async with KafkaClients(broker.bootstrap, T, QUICK) as clients:
        yield clients


async def test_what_is_not_read_yet_is_told_by_partition(kafka: KafkaClients) -> None:
    """The age is that of the newest record that was read, while others wait behind it."""
    source = kafka.source(max_records=10)
    assert source.lags == {}
    await kafka.publish(await kafka.open_sink(), 0, 300)
    await source.start()

    async def read() -> None:
        async for _ in source.batches():
            await asyncio.sleep(0.08)

    def waiting() -> int:
        return sum(lag.records for lag in source.lags.values())

    kafka.run(read())
    await until(lambda: 0 < waiting() < 300)
    assert any(lag.age_ns > 0 for lag in source.lags.values())
    await until(lambda: not waiting())
    assert {name: lag.age_ns for name, lag in source.lags.items()} == {(T, 0): 0, (T, 1): 0}


async def test_the_work_for_a_backlog_grows_with_its_length_alone(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that find no room in a batch wait in turn: not all of them try each batch."""
    sink, count, tries, wait = await kafka.open_sink(), 3000, 0, MessageBatch.wait_drain

    async def counted(batch: MessageBatch, *timeout_s: float | None) -> None:
        nonlocal tries
        tries += 1
        await wait(batch, *timeout_s)

    monkeypatch.setattr(MessageBatch, "wait_drain", counted)
    payload = bytes(900)
    await asyncio.gather(*(sink.publish(T, b"%d" % n, payload, {}) for n in range(count)))
    assert 0 < tries < 4 * count


async def test_round_trip_commit_and_resume(kafka: KafkaClients) -> None:
    sink = await kafka.open_sink()
    assert isinstance(sink, Sink)
    await kafka.publish(sink, 0, 300)
    source = await kafka.open_source("g", max_records=50, clock_ns=lambda: 42)
    assert isinstance(source, Source)
    got = await take(source, 300)
    assert numbers(got) == list(range(300))
    for key in {m.key for m in got}:  # one key, one partition, one order
        of_key = [(m.partition, int(m.payload)) for m in got if m.key == key]
        assert of_key == sorted(of_key)
        assert len({partition for partition, _ in of_key}) == 1
    assert got[0].ts_recv_ns == 42
    assert abs(got[0].ts_source_ns - time.time_ns()) < 60 * 10**9
    assert got[0].headers["seq"] == got[0].payload
    await source.commit(next_offsets(got))
    await source.stop()
    await kafka.publish(sink, 300, 310)
    again = await kafka.open_source("g")
    assert numbers(await take(again, 10)) == list(range(300, 310))
    await again.stop()
    await sink.stop()
    assert {again.connection.state, sink.connection.state} == {ConnectionState.STOPPED}


async def test_a_paused_source_fetches_nothing_and_resuming_loses_nothing(kafka: KafkaClients) -> None:
    """Also one that is paused before it has partitions."""
    sink, source = await kafka.open_sink(), kafka.source("g", poll_ms=50)
    source.pause()
    await kafka.publish(sink, 0, 10)
    await source.start()
    for first in (0, 10):
        with pytest.raises(TimeoutError):
            await take(source, 1, timeout_s=1)
        source.resume()
        assert numbers(await take(source, 10)) == list(range(first, first + 10))
        source.pause()
        await kafka.publish(sink, first + 10, first + 20)


async def test_broker_not_there_at_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop does not wait for the next attempt, which here is an hour away."""
    monkeypatch.setattr("feeds.backoff.delay_s", lambda attempt: 0.01 if attempt < 2 else 3600.0)
    (port,) = free_ports(1)
    caplog.set_level(logging.INFO, "feeds")
    source = KafkaSource("in", f"127.0.0.1:{port}", [T], "g")
    sink = KafkaSink("out", f"127.0.0.1:{port}")
    starting = [asyncio.ensure_future(source.start()), asyncio.ensure_future(sink.start())]
    await until(lambda: min(source.connection.retries, sink.retries) >= 3)
    assert (source.connection.state, sink.connection.state) == (ConnectionState.DOWN, ConnectionState.DOWN)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and r.name.startswith("feeds")]
    assert len(warnings) == 2  # once each, not once per attempt
    await source.stop()
    await sink.stop()
    await asyncio.wait_for(asyncio.gather(*starting), 60)


async def test_a_member_that_is_paused_for_long_stays_one(
    kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only fetching would bring it back, and it may fetch no more until it has committed as a member."""
    # its own session timeout: it must not fall silent on a busy machine
    source = await kafka.open_source("g", poll_ms=50, options={"session_timeout_ms": 60_000})
    reading = asyncio.create_task(anext(source.batches()))
    await until(lambda: source.membership is not None)
    source.pause()
    monkeypatch.setattr(SubscriptionState, "fetcher_idle_time", 3600.0)
    await asyncio.sleep(1.0)
    assert source.membership is not None
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_it_tells_up_to_when_it_has_read(
    broker: MockBroker, kafka: KafkaClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not past a record that was not taken, nor while it is paused or the broker is down."""
    sink, source = await kafka.open_sink(), await kafka.open_source("g", poll_ms=50)
    assert isinstance(source, CatchesUp)
    seen: list[Incoming] = []
    held, more = asyncio.Event(), asyncio.Event()
    more.set()

    async def read() -> None:
        async for batch in source.batches():
            held.set()
            await more.wait()
            seen.extend(batch)

    async def moves(past_ns: int) -> None:
        await until(lambda: source.read_until_ns > past_ns, 20)

    async def rests() -> None:
        """It does not move for longer than it does otherwise."""
        async with asyncio.timeout(30):
            before = 0
            while before != (before := source.read_until_ns):  # noqa: ASYNC110 - it announces itself to nobody
                await asyncio.sleep(2.5)

    kafka.run(read())
    await kafka.publish(sink, 0, 10)
    await moves(time.monotonic_ns())
    assert len(seen) == 10, "a quiet partition is read, too"
    await moves(time.monotonic_ns())
    held.clear()
    more.clear()
    await kafka.publish(sink, 10, 11)
    sent_ns = time.monotonic_ns()
    await held.wait()
    await rests()
    assert source.read_until_ns <= sent_ns, "what it has read is not taken"
    more.set()
    await moves(time.monotonic_ns())
    for hold, go_on in ((source.pause, source.resume), (broker.set_down, broker.set_up)):
        hold()
        await rests()
        rested, set_back_ns = source.read_until_ns, time.time_ns() - 3600 * 10**9
        with monkeypatch.context() as patched:
            patched.setattr(time, "time_ns", lambda set_back_ns=set_back_ns: set_back_ns)
            await rests()
        assert source.read_until_ns == rested, "the system's clock was set back"
        go_on()
        await moves(time.monotonic_ns())


async def test_broker_gone_and_back_loses_nothing_acknowledged(
    broker: MockBroker, kafka: KafkaClients
) -> None:
    # its own session timeout: a member that a broker forgets commits nothing
    sink = await kafka.open_sink()
    options = {"session_timeout_ms": 10_000, "heartbeat_interval_ms": 3000}
    source = await kafka.open_source("g", commit_timeout_s=3.0, options=options)
    await kafka.publish(sink, 0, 10)
    seen = await take(source, 10)
    broker.set_down()
    waiting = asyncio.ensure_future(kafka.publish(sink, 10, 20))
    more = asyncio.ensure_future(take(source, 10, timeout_s=90))
    await until(lambda: {sink.connection.state, source.connection.state} == {ConnectionState.DOWN})
    assert not waiting.done()
    assert sink.retries > 0
    with pytest.raises(CommitFailed, match="not stored"):
        await source.commit(next_offsets(seen))
    broker.set_up()
    await waiting
    seen += await more
    assert numbers(seen) == list(range(20))  # idempotence: nothing twice either
    assert {sink.connection.state, source.connection.state} == {ConnectionState.UP}
    await source.commit(next_offsets(seen))


async def test_stop_is_bounded_while_the_broker_is_down_and_publishers_get_an_error(
    broker: MockBroker, kafka: KafkaClients
) -> None:
    sink = await kafka.open_sink(stop_timeout_s=0.5)
    source = await kafka.open_source("g", stop_timeout_s=0.5)
    await kafka.publish(sink, 0, 1)
    broker.set_down()
    waiting = asyncio.ensure_future(sink.publish(T, None, b"late", {}))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        await sink.stop()
        await source.stop()
        with pytest.raises(SinkStopped):
            await waiting
    with pytest.raises(SinkStopped):
        await sink.publish(T, None, b"later", {})


async def test_refusals_are_final_and_the_sink_keeps_working(kafka: KafkaClients) -> None:
    sink = await kafka.open_sink(options={"request_timeout_ms": 1000})
    with pytest.raises(PublishRefused, match="2000000 bytes"):
        await sink.publish(T, None, b"x" * 2_000_000, {})
    await kafka.publish(sink, 0, 5)


async def test_a_source_without_a_group_reads_all_and_commits_nothing(kafka: KafkaClients) -> None:
    await kafka.publish(await kafka.open_sink(), 0, 10)
    source = kafka.source()
    with pytest.raises(CommitFailed):
        await source.commit({(T, 0): CommitPoint(1)})
    await source.start()
    assert len(await take(source, 10)) == 10
    with pytest.raises(CommitFailed, match="consumer group"):
        await source.commit({(T, 0): CommitPoint(1)})


async def test_missing_topics_and_no_broker(broker: MockBroker) -> None:
    assert await missing_topics(broker.bootstrap, [T, "answers.v1"], timeout_s=60) == ["answers.v1"]
    (port,) = free_ports(1)
    with pytest.raises(BrokerError, match=f"127.0.0.1:{port}"):
        await missing_topics(f"127.0.0.1:{port}", [T], timeout_s=1)


@pytest.mark.parametrize("stopped_s", [0.0, 0.1])
async def test_a_start_that_is_stopped_leaves_no_connection_open(
    broker: MockBroker, stopped_s: float
) -> None:
    """At the first request: a connection that is left to the garbage collector is an error here."""
    port, upstream = *free_ports(1), int(broker.bootstrap.rpartition(":")[2])
    proxy = KafkaProxy(port, upstream)
    proxy.faults.append(Fault(Api.METADATA, "delay", 0.4))
    await proxy.start()
    source = KafkaSource("in", f"127.0.0.1:{port}", [T], None)
    starting = asyncio.create_task(source.start())
    await until(lambda: Api.METADATA in proxy.seen)
    await asyncio.sleep(stopped_s)
    await source.stop()
    await starting
    gc.collect()
    await proxy.stop()


def test_the_mock_broker_says_what_it_is_and_ends() -> None:
    assert "not Apache Kafka" in NOTICE
    broker = MockBroker()
    with pytest.raises(RuntimeError, match="not started"):
        broker.create_topic(T)
    broker.start()
    broker.stop()
    broker.stop()


def test_without_confluent_kafka_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "confluent_kafka", raising=False)
    with pytest.raises(MockUnavailable, match=r"foretick\[demo\]"), contextlib.ExitStack() as stack:
        stack.enter_context(MockBroker())


async def test_backoff_doubles_to_its_cap_and_starts_over() -> None:
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    connection = ConnectionLog("x", "peer", logging.getLogger("feeds.test"), sleep)
    for _ in range(8):
        await connection.wait_before_retry("away")
    assert naps == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, CAP_S, CAP_S]
    assert delay_s(10**6) == CAP_S
    connection.up()
    await connection.wait_before_retry("away")
    assert naps[-1] == 0.1
    assert connection.retries == 9


HOUR_NS = 3600 * 10**9


async def test_a_start_at_the_earliest_or_latest_record_ignores_what_is_committed(
    kafka: KafkaClients,
) -> None:
    sink = await kafka.open_sink()
    await kafka.publish(sink, 0, 60)
    first = await kafka.open_source("g")
    await first.commit(next_offsets(await take(first, 60)))
    await first.stop()
    again = await kafka.open_source("g", start_at="earliest")
    assert numbers(await take(again, 60)) == list(range(60))
    await again.stop()
    latest = await kafka.open_source("new", poll_ms=50, start_at="latest")
    reading = asyncio.ensure_future(take(latest, 10))
    await until(lambda: len(latest.lags) == 2)
    await kafka.publish(sink, 60, 70)
    assert numbers(await reading) == list(range(60, 70))


async def test_what_is_older_than_any_window_holds_is_passed_over_and_counted(
    kafka: KafkaClients, caplog: pytest.LogCaptureFixture
) -> None:
    """The mock knows no offsets by time: for it the end is where windows begin."""
    sink = await kafka.open_sink()
    await kafka.publish(sink, 0, 40)
    ahead = 3 * HOUR_NS  # the source's clock is three hours later
    source = kafka.source("g", poll_ms=50, clock_ns=lambda: time.time_ns() + ahead)
    source.set_retention(HOUR_NS, True, few=0)
    await source.start()
    reading = asyncio.ensure_future(take(source, 1))
    await until(lambda: sum(source.skipped.values()) == 40)
    ahead = 0
    await kafka.publish(sink, 40, 41)
    assert numbers(await reading) == [40]
    assert sum(source.skipped.values()) == 40
    assert caplog.text.count("was behind: skipped offsets 0 to ") == 2


@pytest.mark.parametrize("asked", ["wait", "earliest", "near"])
async def test_a_backlog_that_is_asked_for_or_near_is_read(kafka: KafkaClients, asked: str) -> None:
    await kafka.publish(await kafka.open_sink(), 0, 20)
    ahead = HOUR_NS * 3 // 2 if asked == "near" else 3 * HOUR_NS
    start_at = "earliest" if asked == "earliest" else "committed"
    source = kafka.source("g", clock_ns=lambda: time.time_ns() + ahead, start_at=start_at)
    source.set_retention(HOUR_NS, asked != "wait", few=0)
    await source.start()
    assert numbers(await take(source, 20)) == list(range(20))
    assert source.skipped == {}


@pytest.mark.parametrize("text", ["commited", "2026-03-02T14:30:00", "", "42"])
def test_a_start_that_is_no_place_and_no_time_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(SettingError, match=r"^start_at"):
        KafkaSourceConnector("localhost:1", start_at=text).open("in", 1.0)
    KafkaSourceConnector("localhost:1", start_at="2026-03-02T14:30:00Z").open("in", 1.0)
