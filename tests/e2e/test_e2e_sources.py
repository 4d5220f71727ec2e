"""Several sources through one daemon: offsets, commits and health of each, and none stops the others."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import msgspec
import pytest

from daemon.config.load import load_config
from daemon.config.schema import BarsConfig, Config
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.curve import CurveKeys, make_keys
from feeds.durations import Duration
from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.market_data import DeadLetter
from feeds.mock_broker import MockBroker
from feeds.source import Incoming
from feeds.zmq_feed import ZmqSink, ZmqSource
from tests.kit import (
    SECOND,
    START,
    TOPIC,
    MemorySink,
    QueueSource,
    incoming,
    inproc_config,
    trade,
    until,
)
from tests.kit.daemon import committed
from tests.kit.fixtures import RealKafka
from tests.kit.inproc import ANSWERS, DEAD, UPDATES, answers
from tests.kit.kafka import create_topics


def ticks(symbol: str, first: int, last: int) -> list[Incoming]:
    return [incoming(trade(symbol, START + n * SECOND), n) for n in range(first, last)]


class Failing(QueueSource):
    """Raises once it is told to, and starts again only when it may."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.broken = False

    async def start(self) -> None:
        if self.broken:
            raise RuntimeError("the feed is broken")
        await super().start()

    def put(self, *batches: object) -> None:
        super().put(*batches)  # type: ignore[arg-type]  # as it is


async def make(config: Config, *sources: QueueSource) -> tuple[Gateway, MemorySink]:
    sink = MemorySink()
    gateway = make_gateway(
        config, source=sources or None, routes=[SinkRoute(sink, ANSWERS, UPDATES, DEAD)], commit_every_s=0.05
    )
    await asyncio.wait_for(gateway.start(), 180)
    return gateway, sink


async def test_sources_of_the_same_topic_have_their_own_offsets_and_commits() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    gateway, sink = await make(inproc_config(("V:AAA", "V:BBB")), one, two)
    try:
        one.put(ticks("V:AAA", 0, 8))
        two.put(ticks("V:BBB", 0, 5))
        await until(lambda: len({a.session for a in sink.messages(ANSWERS)}) == 2)  # type: ignore[union-attr]  # answers
        for session, source in (("aaa", "one"), ("bbb", "two")):
            assert {i.source for a in answers(sink, session) for i in a.inputs} == {source}
        await until(lambda: one.committed and two.committed)
        await until(lambda: one.committed == {(TOPIC, 0): 7} and two.committed == {(TOPIC, 0): 4})
        assert gateway.store.value("foretick_records_total", source="one") == 8
        assert gateway.store.value("foretick_records_total", source="two") == 5
        assert 'foretick_source_up{source="two"} 1.0' in gateway.status.metrics().decode()
        assert gateway.status.not_ready() == []
    finally:
        await gateway.stop()


async def test_dead_letters_of_several_sources_name_theirs() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    bars = BarsConfig(interval=Duration(SECOND), late="refuse")
    gateway, sink = await make(inproc_config(("V:AAA", "V:BBB"), bars=bars), one, two)
    try:
        bad = msgspec.structs.replace(ticks("V:AAA", 0, 1)[0], payload=b"{")
        late = msgspec.structs.replace(ticks("V:BBB", 0, 1)[0], offset=9)
        one.put([bad])
        two.put([*ticks("V:BBB", 0, 9), late])
        await until(lambda: len(sink.messages(DEAD)) == 2)
        dead_letters = [each for each in sink.messages(DEAD) if isinstance(each, DeadLetter)]
        assert {(each.stage, each.source, each.offset) for each in dead_letters} == {
            ("read", "one", 0), ("process", "two", 9)
        }  # fmt: skip
    finally:
        await gateway.stop()


async def test_one_symbol_of_two_sources_is_committed_to_both() -> None:
    one, two = QueueSource(name="one"), QueueSource(name="two")
    gateway, sink = await make(inproc_config(("V:AAA",)), one, two)
    try:
        one.put(ticks("V:AAA", 0, 3))
        await until(lambda: gateway.store.value("foretick_records_total", source="one") == 3)
        two.put(ticks("V:AAA", 3, 9))
        await until(lambda: one.committed == {(TOPIC, 0): 3} and two.committed == {(TOPIC, 0): 8})
        assert {i.source for a in answers(sink) for i in a.inputs} == {"one", "two"}
    finally:
        await gateway.stop()


async def test_a_source_that_fails_is_told_and_opened_again_while_the_other_goes_on() -> None:
    good, bad = QueueSource(name="good"), Failing("bad")
    bad.broken = True
    gateway, sink = await make(inproc_config(("V:AAA", "V:BBB")), good, bad)
    try:
        assert gateway.status.not_ready() == ["source bad is not connected: RuntimeError: the feed is broken"]
        good.put(ticks("V:AAA", 0, 5))
        await until(lambda: answers(sink, "aaa"))
        assert gateway.store.value("foretick_source_failures_total", source="bad") > 0
        assert 'foretick_source_up{source="bad"} 0.0' in gateway.status.metrics().decode()
        bad.broken = False
        await until(lambda: gateway.status.not_ready() == [])
        bad.put(ticks("V:BBB", 0, 5))
        await until(lambda: answers(sink, "bbb"))
        assert not gateway.failed.done()
        good.end()
        bad.end()
        await asyncio.wait_for(gateway.finish(), 30)
    finally:
        await gateway.stop()


class Behind(QueueSource):
    """Tells up to when it was read."""

    read_until_ns = 0


async def test_bars_stay_open_while_a_source_is_behind() -> None:
    """It may have more records of them; a record in time is not late afterwards."""
    ahead, behind = QueueSource(name="ahead"), Behind(name="behind")
    bars = BarsConfig(interval=Duration(SECOND), idle_close=Duration(SECOND // 5))
    gateway, sink = await make(inproc_config(("V:AAA", "V:BBB"), bars=bars), ahead, behind)
    try:
        ahead.put(ticks("V:BBB", 0, 1))
        behind.put(ticks("V:AAA", 0, 1))
        await until(lambda: gateway.store.value("foretick_records_total", source="behind") == 1)
        await asyncio.sleep(1)
        assert not sink.sent
        behind.put([incoming(trade("V:AAA", START + SECOND // 2), 1)])
        await until(lambda: gateway.store.value("foretick_records_total", source="behind") == 2)
        behind.read_until_ns = time.monotonic_ns() + 10 * SECOND
        await until(lambda: answers(sink, "aaa") and answers(sink, "bbb"))
        assert {i.last_offset for a in answers(sink, "aaa") for i in a.inputs} == {1}
        assert gateway.store.value("foretick_records_late_total", session="aaa") == 0
    finally:
        await gateway.stop()


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


async def both(bootstrap: str, topic: str, folder: Path) -> Gateway:
    """Kafka and encrypted ZeroMQ into one daemon; returns it, with all answered."""
    make_keys(folder / "server")
    make_keys(folder / "client")
    config = with_kafka_and_zeromq(bootstrap, topic, folder)
    gateway, sink = await make(config)
    desk = next(each.source for each in gateway.input.runners if each.source.name == "desk")
    assert isinstance(desk, ZmqSource)
    await until(lambda: gateway.status.not_ready() == [])
    client = CurveKeys(f"{folder}/client.secret", f"{folder}/server.public").read(bind=False)
    publisher = ZmqSink("p", desk.endpoint, bind=False, keys=client)
    intruder = ZmqSink("i", desk.endpoint, bind=False)
    kafka = KafkaSink("k", bootstrap)
    for each in (publisher, intruder, kafka):
        await each.start()
    for n in range(6):
        await kafka.publish(topic, b"V:AAA", trade("V:AAA", START + n * SECOND), {})

    async def publish() -> None:
        n = 0
        while not answers(sink, "bbb"):
            await publisher.publish(topic, None, trade("V:BBB", START + n * SECOND), {})
            await intruder.publish(topic, None, trade("V:BBB", START, price="1"), {})
            n += 1
            await asyncio.sleep(0.02)

    await asyncio.wait_for(publish(), 30)
    await until(lambda: answers(sink, "aaa"))
    await until(lambda: 'handshakes_failed_total{source="desk"} 0.0' not in gateway.status.metrics().decode())
    assert {i.source for a in answers(sink, "aaa") for i in a.inputs} == {"exchange"}
    assert {i.source for a in answers(sink, "bbb") for i in a.inputs} == {"desk"}
    await until(
        lambda: (
            f'foretick_consumer_lag_records{{partition="exchange/{topic}/0"}}'
            in str(gateway.status.metrics())
        )
    )
    for each in (publisher, intruder, kafka):
        await each.stop()
    return gateway


async def test_kafka_and_zeromq_from_one_configuration(tmp_path: Path) -> None:
    quiet_client_log()
    with MockBroker() as broker:
        broker.create_topic("ticks")
        gateway = await both(broker.bootstrap, "ticks", tmp_path)
        assert 'foretick_source_up{source="exchange"} 1.0' in gateway.status.metrics().decode()
        assert 'foretick_source_up{source="desk"} 1.0' in gateway.status.metrics().decode()
        await gateway.stop()


@pytest.mark.kafka
async def test_a_real_kafka_gets_its_commits_and_no_other_source_does(
    real_kafka: RealKafka, tmp_path: Path
) -> None:
    quiet_client_log()
    topic = f"ticks.{uuid.uuid4().hex[:8]}"
    await create_topics(real_kafka.bootstrap, {topic: 1})
    gateway = await both(real_kafka.bootstrap, topic, tmp_path)
    await gateway.stop()
    assert await committed(real_kafka.bootstrap, topic, topic, 1) == {0: 5}


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
        gateway, sink = await make(settings)
        feeds = {name: KafkaSink(name, each.bootstrap) for name, each in (("one", one), ("two", two))}

        async def answered(cluster: str, symbol: str, first: int, last: int) -> None:
            """Send so many seconds of trades, and wait for the answers about all whole bars."""
            for n in range(first, last):
                payload = trade(symbol, START + n * SECOND)
                await feeds[cluster].publish("ticks", symbol.encode(), payload, {})
            session = symbol[-3:].lower()
            newest = START + (last - 2) * SECOND
            await until(lambda: any(a.as_of >= newest for a in answers(sink, session)), 30.0, symbol)

        try:
            for each in feeds.values():
                await each.start()
            await answered("one", "V:AAA", 0, 4)
            await answered("two", "V:BBB", 0, 4)
            one.set_down()
            await until(
                lambda: 'foretick_source_up{source="one"} 0.0' in gateway.status.metrics().decode(), 40.0
            )
            assert 'foretick_source_up{source="two"} 1.0' in gateway.status.metrics().decode()
            await answered("two", "V:BBB", 4, 8)
            one.set_up()
            await answered("one", "V:AAA", 4, 8)
            assert 'foretick_source_up{source="one"} 1.0' in gateway.status.metrics().decode()
            # the records of both clusters have the same topic, partition and offsets
            for session, source in (("aaa", "one"), ("bbb", "two")):
                found = [i for a in answers(sink, session) for i in a.inputs]
                assert {i.source for i in found} == {source}
                assert max(i.last_offset for i in found) == 6
        finally:
            for each in feeds.values():
                await each.stop()
            await gateway.stop()
