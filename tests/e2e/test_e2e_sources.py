"""Several sources through one daemon: offsets, commits and health of each, and none stops the others."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import msgspec
import pytest

from daemon.config.load import load_config
from daemon.config.schema import UNTRAINED, BarsConfig, Config, ModelConfig, ProcessConfig
from daemon.supervision import TaskEnded
from feeds.curve import CurveKeys, make_keys
from feeds.durations import Duration
from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.market_data import DeadLetter
from feeds.mock_broker import MockBroker
from feeds.source import DataUnreadable, Fault, Incoming
from feeds.zmq_feed import ZmqSink, ZmqSource
from tests.kit import SECOND, START, TOPIC, QueueSource, incoming, inproc_config, trade, until
from tests.kit.daemon import committed
from tests.kit.fixtures import RealKafka
from tests.kit.inproc import DEAD, RunningDaemon, running
from tests.kit.kafka import create_topics

WHY = f"offsets 4 to 6 of {TOPIC}/0 cannot be read: its checksum is wrong"


def ticks(symbol: str, first: int, last: int) -> list[Incoming]:
    return [incoming(trade(symbol, START + n * SECOND), n) for n in range(first, last)]


class Failing(QueueSource):
    """Starts only when it may."""

    broken = True

    async def start(self) -> None:
        if self.broken:
            raise RuntimeError("the feed is broken")
        await super().start()


class Behind(QueueSource):
    """Tells up to when it was read."""

    read_until_ns = 0


class Partitioned(QueueSource):
    """Says which partitions are not read, and ends once ``stops`` is set."""

    stops = False

    def __init__(self, name: str = "test") -> None:
        super().__init__(name=name)
        self.not_read: list[str] = []

    def unread(self) -> list[str]:
        return self.not_read

    async def batches(self) -> AsyncIterator[list[Incoming]]:
        async for batch in super().batches():
            if self.stops:
                raise DataUnreadable(WHY)
            yield batch


def up(daemon: RunningDaemon, source: str) -> bool:
    """Whether /metrics says that a source is connected."""
    return f'foretick_source_up{{source="{source}"}} 1.0' in daemon.gateway.status.metrics().decode()


def sources_of(daemon: RunningDaemon, session: str = "aaa") -> set[str]:
    """Those that a session's answers name."""
    return {i.source for a in daemon.answers(session) for i in a.inputs}


async def test_sources_of_the_same_topic_have_their_own_offsets_and_commits() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    async with running(inproc_config(("V:AAA", "V:BBB")), [one, two], commit_every_s=0.05) as daemon:
        one.put(ticks("V:AAA", 0, 8))
        two.put(ticks("V:BBB", 0, 5))
        await until(lambda: daemon.answers("aaa") and daemon.answers("bbb"))
        assert (sources_of(daemon, "aaa"), sources_of(daemon, "bbb")) == ({"one"}, {"two"})
        await until(lambda: one.committed == {(TOPIC, 0): 7} and two.committed == {(TOPIC, 0): 4})
        assert (daemon.count("records", source="one"), daemon.count("records", source="two")) == (8, 5)
        assert up(daemon, "two")
        assert daemon.gateway.status.not_ready() == []


async def test_an_engine_in_a_process_of_its_own_reads_several_sources() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    model = ModelConfig(path=UNTRAINED, layers="torch", threads=1)
    process = ProcessConfig(mode="two", spare_engine=False, drain=Duration(5 * SECOND))
    config = inproc_config(("V:AAA", "V:BBB"), model=model, process=process)
    async with running(config, [one, two]) as daemon:
        one.put(ticks("V:AAA", 0, 8))
        two.put(ticks("V:BBB", 0, 5))
        await until(lambda: daemon.answers("aaa") and daemon.answers("bbb"), 60.0)
        assert (sources_of(daemon, "aaa"), sources_of(daemon, "bbb")) == ({"one"}, {"two"})


async def test_dead_letters_of_several_sources_name_theirs() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    bars = BarsConfig(interval=Duration(SECOND), late="refuse")
    async with running(inproc_config(("V:AAA", "V:BBB"), bars=bars), [one, two]) as daemon:
        one.put([incoming(b"{", 0)])
        two.put([*ticks("V:BBB", 0, 9), incoming(trade("V:BBB", START), 9)])
        await until(lambda: len(daemon.sink.messages(DEAD)) == 2)
        dead_letters = [each for each in daemon.sink.messages(DEAD) if isinstance(each, DeadLetter)]
        assert {(each.stage, each.source, each.offset) for each in dead_letters} == {
            ("read", "one", 0), ("process", "two", 9)
        }  # fmt: skip


async def test_one_symbol_of_two_sources_is_committed_to_both() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    async with running(inproc_config(("V:AAA",)), [one, two], commit_every_s=0.05) as daemon:
        one.put(ticks("V:AAA", 0, 3))
        await until(lambda: daemon.count("records", source="one") == 3)
        two.put(ticks("V:AAA", 3, 9))
        await until(lambda: one.committed == {(TOPIC, 0): 3} and two.committed == {(TOPIC, 0): 8})
        assert sources_of(daemon) == {"one", "two"}


async def test_a_source_that_fails_is_told_and_opened_again_while_the_other_goes_on() -> None:
    good, bad = QueueSource(name="good"), Failing(name="bad")
    async with running(inproc_config(("V:AAA", "V:BBB")), [good, bad]) as daemon:
        gateway = daemon.gateway
        assert gateway.status.not_ready() == ["source bad is not connected: RuntimeError: the feed is broken"]
        good.put(ticks("V:AAA", 0, 5))
        await until(daemon.answers)
        assert daemon.count("source_failures", source="bad") > 0
        assert not up(daemon, "bad")
        bad.broken = False
        await until(lambda: gateway.status.not_ready() == [])
        bad.put(ticks("V:BBB", 0, 5))
        await until(lambda: daemon.answers("bbb"))
        assert not gateway.failed.done()
        good.end()
        bad.end()
        await asyncio.wait_for(gateway.finish(), 60)


async def test_bars_stay_open_while_a_source_is_behind() -> None:
    """It may have more records of them; a record in time is not late afterwards."""
    ahead, behind = QueueSource(name="ahead"), Behind(name="behind")
    bars = BarsConfig(interval=Duration(SECOND), idle_close=Duration(SECOND // 5))
    async with running(inproc_config(("V:AAA", "V:BBB"), bars=bars), [ahead, behind]) as daemon:
        ahead.put(ticks("V:BBB", 0, 1))
        behind.put(ticks("V:AAA", 0, 1))
        await until(lambda: daemon.count("records", source="behind") == 1)
        await asyncio.sleep(1)
        assert not daemon.sink.sent
        behind.put([incoming(trade("V:AAA", START + SECOND // 2), 1)])
        await until(lambda: daemon.count("records", source="behind") == 2)
        behind.read_until_ns = time.monotonic_ns() + 10 * SECOND
        await until(lambda: daemon.answers("aaa") and daemon.answers("bbb"))
        assert {i.last_offset for a in daemon.answers() for i in a.inputs} == {1}
        assert daemon.count("records_late", session="aaa") == 0


# What cannot be read: the daemon is not ready and names it, or ends and names it.


@pytest.mark.parametrize("names", [["test"], ["one", "two"]])
async def test_ready_only_while_each_partition_is_read_and_the_end_at_damage_is_the_daemons(names):
    sources = [Partitioned(name) for name in names]
    prefix = "" if len(names) == 1 else f"source {names[0]}: "
    async with running(inproc_config(("V:AAA", "V:BBB")), sources) as daemon:
        for unread in ([], [f"{TOPIC}/3 is not read yet"], []):
            sources[0].not_read = unread
            assert daemon.gateway.status.not_ready() == [prefix + each for each in unread]
        sources[0].stops = True
        sources[0].put([])
        with pytest.raises(TaskEnded, match=WHY):
            await asyncio.wait_for(daemon.gateway.run(asyncio.Event()), 20)
        assert WHY in str(daemon.gateway.status.not_ready())


async def test_a_batch_that_cannot_be_read_is_a_dead_letter_record_and_the_next_answers_carry_gap():
    source = Partitioned()
    async with running(inproc_config(("V:AAA", "V:BBB")), source, commit_every_s=0.05) as daemon:
        source.put(ticks("V:AAA", 0, 4))
        await until(daemon.answers)
        assert not any("gap" in a.flags for a in daemon.answers())
        damaged = Incoming(TOPIC, 0, 4, None, b"", fault=Fault("corrupt", WHY, 6))
        source.put([damaged, *ticks("V:AAA", 7, 10)])
        await until(lambda: any("gap" in a.flags for a in daemon.answers()))
        await until(lambda: daemon.sink.messages(DEAD))
        (found,) = [each for each in daemon.sink.messages(DEAD) if isinstance(each, DeadLetter)]
        assert (found.stage, found.reason, found.offset, found.payload) == ("read", "corrupt", 4, b"")
        assert WHY in found.error
        assert daemon.count("records_skipped", source="test") == 3
        await until(lambda: source.committed.get((TOPIC, 0), 0) > 6)


# Kafka and ZeroMQ.


def with_kafka_and_zeromq(bootstrap: str, topic: str, folder: Path) -> Config:
    path = folder / "two.toml"
    path.write_text(
        f"""
        [[sources]]
        name = "exchange"
        [sources.kafka]
        bootstrap = "{bootstrap}"
        topics = ["{topic}"]
        group = "{topic}"

        [[sources]]
        name = "desk"
        [sources.zeromq]
        endpoint = "tcp://127.0.0.1:*"
        bind = true
        [sources.zeromq.curve]
        secret_key_file = "{folder}/server.secret"
        client_key_files = ["{folder}/client.public"]

        [[sessions]]
        name = "aaa"
        symbol = "V:AAA"
        [[sessions]]
        name = "bbb"
        symbol = "V:BBB"
        """
    )
    config, base = load_config(path, {}), inproc_config(("V:AAA", "V:BBB"))
    return msgspec.structs.replace(base, sources=config.sources)


@pytest.fixture(params=["mock", pytest.param("apache", marks=pytest.mark.kafka)])
async def exchange(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a broker, and a topic of its own there."""
    quiet_client_log()
    topic = f"ticks.{uuid.uuid4().hex[:8]}"
    if request.param == "mock":
        with MockBroker() as broker:
            broker.create_topic(topic)
            yield broker.bootstrap, topic
    else:
        real: RealKafka = request.getfixturevalue("real_kafka")
        await create_topics(real.bootstrap, {topic: 1})
        yield real.bootstrap, topic


async def test_kafka_and_encrypted_zeromq_from_one_configuration(
    exchange: tuple[str, str], tmp_path: Path
) -> None:
    bootstrap, topic = exchange
    make_keys(tmp_path / "server")
    make_keys(tmp_path / "client")
    config = with_kafka_and_zeromq(bootstrap, topic, tmp_path)
    async with running(config, (), commit_every_s=0.05) as daemon, AsyncExitStack() as stack:
        desk = next(each.source for each in daemon.gateway.input.runners if each.source.name == "desk")
        assert isinstance(desk, ZmqSource)
        await until(lambda: daemon.gateway.status.not_ready() == [])
        client = CurveKeys(f"{tmp_path}/client.secret", f"{tmp_path}/server.public").read(bind=False)
        publisher = ZmqSink("p", desk.endpoint, bind=False, keys=client)
        intruder = ZmqSink("i", desk.endpoint, bind=False)
        kafka = KafkaSink("k", bootstrap)
        for each in (publisher, intruder, kafka):
            await each.start()
            stack.push_async_callback(each.stop)
        for n in range(6):
            await kafka.publish(topic, b"V:AAA", trade("V:AAA", START + n * SECOND), {})
        async with asyncio.timeout(60):
            for n in count():
                await publisher.publish(topic, None, trade("V:BBB", START + n * SECOND), {})
                await intruder.publish(topic, None, trade("V:BBB", START, price="1"), {})
                await asyncio.sleep(0.02)
                if daemon.answers("bbb"):
                    break
        state = daemon.state("aaa")
        await until(lambda: state.times is not None and state.times.as_of >= START + 4 * SECOND)
        await until(lambda: daemon.answered("aaa", state.version))
        metrics = daemon.gateway.status.metrics
        await until(lambda: b'handshakes_failed_total{source="desk"} 0.0' not in metrics())
        assert (sources_of(daemon, "aaa"), sources_of(daemon, "bbb")) == ({"exchange"}, {"desk"})
        lag = f'foretick_consumer_lag_records{{partition="exchange/{topic}/0"}}'.encode()
        await until(lambda: lag in metrics())
        assert up(daemon, "exchange")
        assert up(daemon, "desk")
        await daemon.gateway.stop()
    assert await committed(bootstrap, topic, topic, 1) == {0: 5}, "no other source's"


async def test_a_cluster_that_goes_down_stops_only_its_own_sessions_and_comes_back(tmp_path: Path) -> None:
    quiet_client_log()
    with MockBroker() as one, MockBroker() as two:
        path = tmp_path / "clusters.toml"
        sources = "".join(
            f'[[sources]]\nname = "{name}"\n'
            f'[sources.kafka]\nbootstrap = "{each.bootstrap}"\ntopics = ["ticks"]\ngroup = "desk"\n'
            for name, each in (("one", one), ("two", two))
        )
        path.write_text(f'{sources}[[sessions]]\nname = "aaa"\nsymbol = "V:AAA"\n')
        config = load_config(path, {})
        settings = msgspec.structs.replace(inproc_config(("V:AAA", "V:BBB")), sources=config.sources)
        for each in (one, two):
            each.create_topic("ticks")
        feeds = {name: KafkaSink(name, each.bootstrap) for name, each in (("one", one), ("two", two))}
        async with running(settings, ()) as daemon, AsyncExitStack() as stack:
            for sink in feeds.values():
                await sink.start()
                stack.push_async_callback(sink.stop)

            async def answered(cluster: str, symbol: str, first: int, last: int) -> None:
                """Send trades of this many seconds, and wait for the answers about all whole bars."""
                for n in range(first, last):
                    payload = trade(symbol, START + n * SECOND)
                    await feeds[cluster].publish("ticks", symbol.encode(), payload, {})
                session, newest = symbol[-3:].lower(), START + (last - 2) * SECOND
                await until(lambda: any(a.as_of >= newest for a in daemon.answers(session)), 30.0, symbol)

            await answered("one", "V:AAA", 0, 4)
            await answered("two", "V:BBB", 0, 4)
            one.set_down()
            await until(lambda: not up(daemon, "one"), 40.0)
            assert up(daemon, "two")
            await answered("two", "V:BBB", 4, 8)
            one.set_up()
            await answered("one", "V:AAA", 4, 8)
            assert up(daemon, "one")
            # the records of both clusters have the same topic, partition and offsets
            assert (sources_of(daemon, "aaa"), sources_of(daemon, "bbb")) == ({"one"}, {"two"})
            for session in ("aaa", "bbb"):
                assert max(i.last_offset for a in daemon.answers(session) for i in a.inputs) == 6
            await daemon.gateway.stop()
