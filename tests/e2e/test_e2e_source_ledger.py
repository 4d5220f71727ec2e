"""A flood through each source: every record that was sent is in a bar, or counted for its reason."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from confluent_kafka import Producer
from websockets.asyncio.server import ServerConnection

from daemon.config.schema import SourceConfig
from daemon.ledger import Ledger, ledger
from feeds.connectors.http import HttpSourceConnector
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.connectors.websocket import WebSocketConnector
from feeds.connectors.zeromq import ZmqSourceConnector
from feeds.kafka_client import quiet_client_log
from feeds.mock_broker import MockBroker
from feeds.zmq_feed import ZmqSink, ZmqSource
from tests.kit import SECOND, START, TOPIC, QueueSource, incoming, inproc_config, trade, until
from tests.kit.daemon import invoke
from tests.kit.inproc import RunningDaemon, running
from tests.kit.venue import venue

COUNT, SECONDS = 12_000, 30
SYMBOLS = ("V:AAA", "V:BBB", "V:CCC")
KINDS, WEIGHTS = ("good", "unknown", "price", "json", "late", "again"), (100, 3, 3, 2, 3, 3)
RING = 1024
"""Records: a flood overwrites some that the engine has not read, where a source cannot pause."""
LINES = {"content-type": "application/x-ndjson"}
Send = Callable[[RunningDaemon], Awaitable[None]]


class Flood(NamedTuple):
    """What is sent, and how many of it are what."""

    payloads: list[bytes]
    kinds: Counter[str]


def flood(seed: int = 0) -> Flood:
    """Trades of three symbols in time order, among them what a feed should not send."""
    rng, made, kinds, last = Random(seed), list[bytes](), Counter[str](), b""
    for n in range(COUNT):
        symbol, at = rng.choice(SYMBOLS), START + n * SECONDS * SECOND // COUNT
        (kind,) = rng.choices(KINDS, WEIGHTS)
        if (kind == "late" and n < COUNT // 2) or not last:
            kind = "good"
        payload = trade(symbol, at, f"{100 + n % 9}.{n % 10}5", f"{1 + n % 5}", id=f"t{n}")
        match kind:
            case "good":
                last = payload
            case "again":
                payload = last
            case "unknown":
                payload = trade("V:ZZZ", at)
            case "price":
                payload = trade(symbol, at, "-1")
            case "json":
                payload = b'{"type":'
            case "late":
                payload = trade(symbol, START + SECOND, id=f"late{n}")
        kinds[kind] += 1
        made.append(payload)
    return Flood(made, kinds)


def is_settled(daemon: RunningDaemon) -> bool:
    """Nothing is on its way through the ring, in which a record that is refused leaves a mark, too."""
    found = ledger(daemon.gateway.store)
    missing, marks = sum(each.unaccounted for each in found.sessions), sum(found.read.malformed.values())
    return found.lost - marks <= missing <= found.lost


def expect_balance(daemon: RunningDaemon, sent: Flood, lost: int) -> Ledger:
    """``lost``: messages that never came, as the source counts them."""
    found = ledger(daemon.gateway.store)
    assert found.read.received + lost == COUNT
    assert found.read.unaccounted == 0
    assert is_settled(daemon), found
    if not lost:
        assert found.read.malformed == {"price": sent.kinds["price"], "json": sent.kinds["json"]}
        assert found.read.unknown_symbol == sent.kinds["unknown"]
        assert sum(each.records for each in found.sessions) == COUNT - sum(
            sent.kinds[kind] for kind in ("price", "json", "unknown")
        )
    if not lost and not found.lost:
        assert sum(each.late for each in found.sessions) == sent.kinds["late"]
        assert sum(each.repeated for each in found.sessions) == sent.kinds["again"]
    return found


@asynccontextmanager
async def by_kafka(sent: Flood) -> AsyncIterator[tuple[SourceConfig, Send]]:
    quiet_client_log()
    with MockBroker() as broker:
        broker.create_topic(TOPIC)
        connector = KafkaSourceConnector(bootstrap=broker.bootstrap, topics=(TOPIC,), group="ledger")

        async def send(_daemon: RunningDaemon) -> None:
            producer = Producer({"bootstrap.servers": broker.bootstrap})
            for payload in sent.payloads:
                producer.produce(TOPIC, payload, partition=0)
                producer.poll(0)
            assert await asyncio.to_thread(producer.flush, 60) == 0

        yield SourceConfig(kind="kafka", kafka=connector, ring_capacity=RING), send  # type: ignore[call-arg]  # by connectors


@asynccontextmanager
async def by_zeromq(sent: Flood) -> AsyncIterator[tuple[SourceConfig, Send]]:
    connector = ZmqSourceConnector(endpoint="tcp://127.0.0.1:*", bind=True)

    async def send(daemon: RunningDaemon) -> None:
        (source,) = [each.source for each in daemon.gateway.input.runners]
        assert isinstance(source, ZmqSource)
        sink = ZmqSink("flood", source.endpoint, bind=False)
        await sink.start()
        await asyncio.sleep(1)  # until the subscription is there
        for payload in sent.payloads:
            await sink.publish(TOPIC, None, payload, {})
        await asyncio.sleep(1)
        await sink.stop()

    yield SourceConfig(kind="zeromq", zeromq=connector, ring_capacity=RING), send  # type: ignore[call-arg]  # by connectors


@asynccontextmanager
async def by_http(sent: Flood) -> AsyncIterator[tuple[SourceConfig, Send]]:
    async def send(daemon: RunningDaemon) -> None:
        for first in range(0, COUNT, 500):
            body = b"\n".join(sent.payloads[first : first + 500])
            reply = await daemon.http("POST", "/v1/data?replay=true", body, LINES)
            assert reply.status == 202, reply.json

    yield SourceConfig(kind="http", http=HttpSourceConnector(max_waiting=COUNT), ring_capacity=RING), send  # type: ignore[call-arg]  # by connectors


@asynccontextmanager
async def by_websocket(sent: Flood) -> AsyncIterator[tuple[SourceConfig, Send]]:
    begin = asyncio.Event()

    async def serve(connection: ServerConnection) -> None:
        await begin.wait()
        for payload in sent.payloads:
            await connection.send(payload)
        await connection.wait_closed()

    async def send(_daemon: RunningDaemon) -> None:
        begin.set()

    async with venue(serve) as url:
        connector = WebSocketConnector(url=url)
        yield SourceConfig(kind="websocket", websocket=connector, ring_capacity=RING), send  # type: ignore[call-arg]  # by connectors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by", [by_kafka, by_zeromq, by_http, by_websocket])
async def test_nothing_is_lost_silently(
    by: Callable[[Flood], AsyncIterator[tuple[SourceConfig, Send]]],
) -> None:
    sent = flood()
    async with by(sent) as (source, send):  # type: ignore[attr-defined]  # of a parameter
        config = inproc_config(SYMBOLS, source=source, standing="none")
        async with running(config, ()) as daemon:
            await until(lambda: daemon.gateway.status.not_ready() == [], 30)
            await send(daemon)

            def lost() -> int:
                return daemon.count("records_lost_upstream", source=source.kind)

            await until(lambda: daemon.count("records", source=source.kind) + lost() == COUNT, 60)

            await until(lambda: is_settled(daemon), 30)
            expect_balance(daemon, sent, lost())


async def test_a_ring_that_overflows_counts_what_it_lost() -> None:
    """A source that cannot pause, and an engine that is slower."""
    sent, source = flood(), QueueSource(kind="dropping")
    config = inproc_config(SYMBOLS, source=SourceConfig(ring_capacity=64), standing="none")  # type: ignore[call-arg]  # a field of its table
    async with running(config, source) as daemon:
        source.put([incoming(payload, n) for n, payload in enumerate(sent.payloads)])
        await until(lambda: daemon.count("records", source="test") == COUNT, 60)
        await until(lambda: ledger(daemon.gateway.store).lost > 0, 30)
        await until(lambda: is_settled(daemon), 30)
        assert expect_balance(daemon, sent, 0).lost > 0


def test_a_replayed_file(tmp_path: Path) -> None:
    """Played as quickly as it goes; the summary adds up to its lines."""
    form = tmp_path / "ours.toml"
    form.write_text(
        'description = "a line each"\ncontainer = "jsonl"\n[[records]]\nkind = "trade"\n'
        'time = { field = "ts_event", format = "epoch-ns" }\n'
        'fields = { venue = "venue", symbol = "symbol", price = "price", size = "size", id = "id" }\n'
    )
    sent = flood()
    lines: Sequence[bytes] = [each for each in sent.payloads if b'"id"' in each]
    (tmp_path / "flood.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    done = invoke(
        *("replay", str(tmp_path / "flood.jsonl"), "--format", str(form), "--to", "inproc", "--speed", "0"),
        *("--symbols", "3", "--max-late", "50", "--set", "model.path=untrained", "--set", "standing=none"),
    )
    assert done.exit_code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    counted = {
        row[0]: list(map(int, row[1:8])) for row in rows if len(row) == 8 and row[0] in ("aaa", "bbb", "ccc")
    }
    assert len(counted) == len(SYMBOLS), done.stdout
    assert sum(records for records, *_ in counted.values()) == len(lines)
    assert all(records == sum(others) for records, *others in counted.values()), counted
    assert sum(late for _, _, late, *_ in counted.values()) == sent.kinds["late"]
    assert sum(repeated for _, _, _, repeated, *_ in counted.values()) == sent.kinds["again"]
