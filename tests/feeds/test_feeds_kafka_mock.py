"""Kafka source and sink on librdkafka's mock cluster, which can inject faults."""

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator

import pytest
from aiokafka.consumer.subscription_state import SubscriptionState

from feeds.backoff import CAP_S, ConnectionLog, delay_s
from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.kafka_client import BrokerError, missing_topics, quiet_client_log
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
from tests.kit.kafka_proxy import Api, Fault, KafkaProxy

T = "md.trades.v1"
QUICK = {
    "session_timeout_ms": 1000,
    "heartbeat_interval_ms": 200,
}  # the mock takes this long to let a member leave


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_client_log()


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker() as broker:
        broker.create_topic(T, 2)
        yield broker


async def take(source: KafkaSource, count: int, timeout_s: float = 20) -> list[Incoming]:
    got: list[Incoming] = []
    async with asyncio.timeout(timeout_s):
        async for batch in source.batches():
            got += batch
            if len(got) >= count:
                break
    return got


async def publish(sink: KafkaSink, first: int, last: int, topic: str = T) -> None:
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for n in range(first, last):
            group.create_task(sink.publish(topic, b"K%d" % (n % 5), b"%d" % n, {"seq": b"%d" % n}))


async def test_what_is_not_read_yet_is_told_by_partition(broker: MockBroker) -> None:
    """The age is that of the newest record that was read, while others wait behind it."""
    sink = KafkaSink("out", broker.bootstrap)
    source = KafkaSource("in", broker.bootstrap, [T], None, max_records=10, options=QUICK)
    assert source.lags == {}
    await sink.start()
    await publish(sink, 0, 300)
    await source.start()

    async def read() -> None:
        async for _ in source.batches():
            await asyncio.sleep(0.08)

    def waiting() -> int:
        return sum(lag.records for lag in source.lags.values())

    reading = asyncio.create_task(read())
    await until(lambda: 0 < waiting() < 300)
    assert any(lag.age_ns > 0 for lag in source.lags.values())
    await until(lambda: not waiting())
    assert {name: lag.age_ns for name, lag in source.lags.items()} == {(T, 0): 0, (T, 1): 0}
    await source.stop()
    await reading
    await sink.stop()


def next_offsets(messages: list[Incoming]) -> dict[tuple[str, int], CommitPoint]:
    return {(m.topic, m.partition): CommitPoint(m.offset + 1) for m in messages}


async def test_round_trip_commit_and_resume(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    source = KafkaSource("in", broker.bootstrap, [T], "g", max_records=50, clock_ns=lambda: 42, options=QUICK)
    assert isinstance(source, Source)
    assert isinstance(sink, Sink)
    await sink.start()
    await publish(sink, 0, 300)
    await source.start()
    got = await take(source, 300)
    assert sorted(int(m.payload) for m in got) == list(range(300))
    for key in {m.key for m in got}:  # one key, one partition, one order
        numbers = [(m.partition, int(m.payload)) for m in got if m.key == key]
        assert numbers == sorted(numbers)
        assert len({partition for partition, _ in numbers}) == 1
    assert got[0].ts_recv_ns == 42
    assert abs(got[0].ts_source_ns - time.time_ns()) < 60 * 10**9
    assert got[0].headers["seq"] == got[0].payload
    await source.commit(next_offsets(got))
    await source.stop()
    await publish(sink, 300, 310)
    again = KafkaSource("in", broker.bootstrap, [T], "g", options=QUICK)
    await again.start()
    assert sorted(int(m.payload) for m in await take(again, 10)) == list(range(300, 310))
    await again.stop()
    await sink.stop()
    assert (again.connection.state, sink.connection.state) == (
        ConnectionState.STOPPED,
        ConnectionState.STOPPED,
    )


async def test_a_paused_source_fetches_nothing_and_resuming_loses_nothing(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    source = KafkaSource("in", broker.bootstrap, [T], "g", poll_ms=50)
    await sink.start()
    await source.start()
    await publish(sink, 0, 10)
    await take(source, 10)
    source.pause()
    await publish(sink, 10, 20)
    with pytest.raises(TimeoutError):
        await take(source, 1, timeout_s=1)
    source.resume()
    assert sorted(int(m.payload) for m in await take(source, 10)) == list(range(10, 20))
    await source.stop()
    await sink.stop()


async def test_a_source_paused_from_the_start_stays_paused_through_its_assignment(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    source = KafkaSource("in", broker.bootstrap, [T], "g", poll_ms=50)
    source.pause()
    await sink.start()
    await publish(sink, 0, 10)
    await source.start()
    with pytest.raises(TimeoutError):
        await take(source, 1, timeout_s=1)
    source.resume()
    assert len(await take(source, 10)) == 10
    await source.stop()
    await sink.stop()


async def test_broker_not_there_at_start(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    caplog.set_level(logging.INFO, "feeds")
    source = KafkaSource("in", f"127.0.0.1:{port}", [T], "g")
    sink = KafkaSink("out", f"127.0.0.1:{port}")
    starting = [asyncio.ensure_future(source.start()), asyncio.ensure_future(sink.start())]
    await until(lambda: min(source.connection.retries, sink.retries) >= 3)
    assert (source.connection.state, sink.connection.state) == (ConnectionState.DOWN, ConnectionState.DOWN)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and r.name.startswith("feeds")]
    assert len(warnings) == 2  # once each, not once per attempt
    began = time.monotonic()
    await source.stop()
    await sink.stop()
    await asyncio.wait_for(asyncio.gather(*starting), 2)
    assert time.monotonic() - began < 2


async def test_a_member_that_is_paused_for_long_stays_one(
    broker: MockBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only fetching would bring it back, and it may fetch no more until it has committed as a member."""
    source = KafkaSource("in", broker.bootstrap, [T], "g", options=QUICK, poll_ms=50)
    await source.start()
    reading = asyncio.create_task(anext(source.batches()))
    await until(lambda: source.membership is not None)
    source.pause()
    monkeypatch.setattr(SubscriptionState, "fetcher_idle_time", 3600.0)
    await asyncio.sleep(1.0)
    assert source.membership is not None
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await source.stop()


async def test_it_tells_up_to_when_it_has_read(broker: MockBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not past a record that was not taken, nor while it is paused or the broker is down."""
    sink = KafkaSink("out", broker.bootstrap)
    source = KafkaSource("in", broker.bootstrap, [T], "g", options=QUICK, poll_ms=50)
    assert isinstance(source, CatchesUp)
    await sink.start()
    await source.start()
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

    reading = asyncio.create_task(read())
    await publish(sink, 0, 10)
    await moves(time.monotonic_ns())
    assert len(seen) == 10, "a quiet partition is read, too"
    await moves(time.monotonic_ns())
    held.clear()
    more.clear()
    await publish(sink, 10, 11)
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
    reading.cancel()
    await source.stop()
    await sink.stop()


async def test_broker_gone_and_back_loses_nothing_acknowledged(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    source = KafkaSource("in", broker.bootstrap, [T], "g", commit_timeout_s=0.5)
    await sink.start()
    await source.start()
    await publish(sink, 0, 10)
    seen = await take(source, 10)
    broker.set_down()
    waiting = asyncio.ensure_future(publish(sink, 10, 20))
    more = asyncio.ensure_future(take(source, 10, timeout_s=40))
    await until(
        lambda: (
            sink.connection.state is ConnectionState.DOWN and source.connection.state is ConnectionState.DOWN
        )
    )
    assert not waiting.done()
    assert sink.retries > 0
    with pytest.raises(CommitFailed, match="not stored"):
        await source.commit(next_offsets(seen))
    broker.set_up()
    await waiting
    seen += await more
    assert sorted(int(m.payload) for m in seen) == list(range(20))  # idempotence: nothing twice either
    assert (sink.connection.state, source.connection.state) == (ConnectionState.UP, ConnectionState.UP)
    await source.commit(next_offsets(seen))
    await source.stop()
    await sink.stop()


async def test_stop_is_bounded_while_the_broker_is_down_and_publishers_get_an_error(
    broker: MockBroker,
) -> None:
    sink = KafkaSink("out", broker.bootstrap, stop_timeout_s=0.5)
    source = KafkaSource("in", broker.bootstrap, [T], "g", stop_timeout_s=0.5)
    await sink.start()
    await source.start()
    await publish(sink, 0, 1)
    broker.set_down()
    waiting = asyncio.ensure_future(sink.publish(T, None, b"late", {}))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await sink.stop()
    await source.stop()
    assert time.monotonic() - began < 3
    with pytest.raises(SinkStopped):
        await asyncio.wait_for(waiting, 1)
    with pytest.raises(SinkStopped):
        await sink.publish(T, None, b"later", {})


async def test_refusals_are_final_and_the_sink_keeps_working(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap, options={"request_timeout_ms": 1000})
    await sink.start()
    with pytest.raises(PublishRefused, match="2000000 bytes"):
        await sink.publish(T, None, b"x" * 2_000_000, {})
    await publish(sink, 0, 5)
    await sink.stop()


async def test_a_source_without_a_group_reads_all_and_commits_nothing(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    await sink.start()
    await publish(sink, 0, 10)
    source = KafkaSource("in", broker.bootstrap, [T], None)
    with pytest.raises(CommitFailed):
        await source.commit({(T, 0): CommitPoint(1)})
    await source.start()
    assert len(await take(source, 10)) == 10
    with pytest.raises(CommitFailed, match="consumer group"):
        await source.commit({(T, 0): CommitPoint(1)})
    await source.stop()
    await sink.stop()


async def test_missing_topics_and_no_broker(broker: MockBroker) -> None:
    assert await missing_topics(broker.bootstrap, [T, "answers.v1"]) == ["answers.v1"]
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


async def test_a_start_at_the_earliest_or_latest_record_ignores_what_is_committed(broker: MockBroker) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    await sink.start()
    await publish(sink, 0, 60)
    first = KafkaSource("in", broker.bootstrap, [T], "g", options=QUICK)
    await first.start()
    await first.commit(next_offsets(await take(first, 60)))
    await first.stop()
    again = KafkaSource("in", broker.bootstrap, [T], "g", options=QUICK, start_at="earliest")
    await again.start()
    got = await take(again, 60)
    assert sorted(int(m.payload) for m in got) == list(range(60))
    await again.stop()
    latest = KafkaSource("in", broker.bootstrap, [T], "new", options=QUICK, poll_ms=50, start_at="latest")
    await latest.start()
    reading = asyncio.ensure_future(take(latest, 10))
    await until(lambda: len(latest.lags) == 2)
    await publish(sink, 60, 70)
    assert sorted(int(m.payload) for m in await reading) == list(range(60, 70))
    await latest.stop()
    await sink.stop()


async def test_what_is_older_than_any_window_holds_is_passed_over_and_counted(
    broker: MockBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The mock knows no offsets by time: for it the end is where windows begin."""
    sink = KafkaSink("out", broker.bootstrap)
    await sink.start()
    await publish(sink, 0, 40)
    ahead = 3 * HOUR_NS  # the source's clock is three hours later
    source = KafkaSource(
        "in", broker.bootstrap, [T], "g", options=QUICK, poll_ms=50, clock_ns=lambda: time.time_ns() + ahead
    )
    source.set_retention(HOUR_NS, True, few=0)
    await source.start()
    reading = asyncio.ensure_future(take(source, 1, timeout_s=8))
    await until(lambda: sum(source.skipped.values()) == 40)
    ahead = 0
    await publish(sink, 40, 41)
    assert [int(m.payload) for m in await reading] == [40]
    assert sum(source.skipped.values()) == 40
    assert caplog.text.count("was behind: skipped offsets 0 to ") == 2
    await source.stop()
    await sink.stop()


@pytest.mark.parametrize("asked", ["wait", "earliest", "near"])
async def test_a_backlog_that_is_asked_for_or_near_is_read(broker: MockBroker, asked: str) -> None:
    sink = KafkaSink("out", broker.bootstrap)
    await sink.start()
    await publish(sink, 0, 20)
    ahead = HOUR_NS * 3 // 2 if asked == "near" else 3 * HOUR_NS
    source = KafkaSource(
        "in", broker.bootstrap, [T], "g", options=QUICK, clock_ns=lambda: time.time_ns() + ahead,
        start_at="earliest" if asked == "earliest" else "committed",
    )  # fmt: skip
    source.set_retention(HOUR_NS, asked != "wait", few=0)
    await source.start()
    assert sorted(int(m.payload) for m in await take(source, 20)) == list(range(20))
    assert source.skipped == {}
    await source.stop()
    await sink.stop()


@pytest.mark.parametrize("text", ["commited", "2026-03-02T14:30:00", "", "42"])
def test_a_start_that_is_no_place_and_no_time_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(SettingError, match=r"^start_at"):
        KafkaSourceConnector("localhost:1", start_at=text).open("in", 1.0)
    KafkaSourceConnector("localhost:1", start_at="2026-03-02T14:30:00Z").open("in", 1.0)
