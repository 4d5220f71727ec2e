"""Whatever a source is sent, each message ends as records, a dead-letter record or a count."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.events import Events
from daemon.api.health import Health, health_of
from daemon.api.http_api import api_routes
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.pushes import Pushes
from daemon.supervision import Tasks
from daemon.tenants import Client
from feeds.kafka_client import quiet_client_log
from feeds.kafka_source import KafkaSource
from feeds.mock_broker import MockBroker
from feeds.push_source import PushedSource, PushLimits
from feeds.zmq_feed import Header, ZmqSource
from feeds.zstd import zstd
from metrics.catalogue import EMPTY, REASONS
from metrics.store import MetricStore
from tests.kit import START, trade, until
from tests.kit.fakes import awaited
from tests.kit.gateway import DecoderRig
from tests.kit.http import request
from tests.kit.kafka_bytes import NAMES, Rec, batch, store

FEW_EXAMPLES = {"deadline": None, "suppress_health_check": list(HealthCheck)}
GOOD = trade("V:AAA", START)
LIMIT = 1 << 16

payloads = st.one_of(
    st.just(GOOD),
    st.just(b"\xef\xbb\xbf" + GOOD),
    st.just(b"[" + GOOD + b"," + GOOD + b"]"),
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda rest: b"\0\0\0\0\7" + rest),
    st.text(max_size=30).map(str.encode),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["trade", "quote", "bar", "heartbeat", "x"])},
        optional={
            name: st.integers() | st.text(max_size=6) | st.floats() | st.none()
            for name in (
                "venue",
                "symbol",
                "ts_event",
                "ts_recv",
                "price",
                "size",
                "bid",
                "seq",
                "id",
                "side",
            )
        },
    ).map(lambda members: json.dumps(members).encode()),
)


class Rig(DecoderRig):
    """Of any source."""

    async def read(self, until_done: Callable[[], Awaitable[None]]) -> None:
        """Read until that is over; an end before it is an error."""
        reading = asyncio.create_task(self.ingest.run())
        waiting = asyncio.ensure_future(until_done())
        try:
            async with asyncio.timeout(30):
                await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            await waiting
        finally:
            await self.source.stop()
            with suppress(TimeoutError):
                await asyncio.wait_for(reading, 5)
            waiting.cancel()

    def offsets(self) -> set[int]:
        """Of the records in the ring; the ring is closed."""
        found = {int(each) for each in self.records()["offset"]}
        self.close()
        return found

    def counted(self) -> dict[str, float]:
        """Messages that are neither records nor dead-letter records."""
        value = self.store.value
        kinds = {
            each: value("foretick_messages_empty_total", source=self.source.name, kind=each) for each in EMPTY
        }
        return kinds | {"unknown": value("foretick_records_unknown_symbol_total")}


def holds_nothing(payload: bytes) -> bool:
    """Whether it is an array of no records."""
    with suppress(ValueError):
        return bool(json.loads(payload.removeprefix(b"\xef\xbb\xbf")) == [])
    return False


def check_outcomes(rig: Rig, sent: dict[int, bytes], sure: set[int]) -> None:
    """Each offset of ``sent``, with its payload, has an outcome; ``sure`` are records of the session."""
    ring = rig.offsets()
    refused = {each.offset for each in rig.dead_letters}
    assert sure <= ring
    assert not sure & refused
    none = {n for n, payload in sent.items() if not payload or holds_nothing(payload)}
    left = sent.keys() - ring - refused - none
    assert len(left) <= rig.counted()["unknown"]
    assert rig.counted()["tombstone"] + rig.counted()["empty"] == sum(not each for each in sent.values())
    assert {each.reason for each in rig.dead_letters} <= set(REASONS)
    assert "internal" not in {each.reason for each in rig.dead_letters}


# Kafka


@pytest.fixture(scope="module")
def broker() -> Iterator[MockBroker]:
    quiet_client_log()
    with MockBroker() as broker:
        yield broker


records = st.builds(
    Rec,
    value=payloads | st.none(),
    key=st.binary(max_size=30) | st.none(),
    headers=st.lists(
        st.tuples(
            st.binary(max_size=8) | st.sampled_from([b"encoding", b"replay", b"schema"]),
            st.binary(max_size=12) | st.none() | st.sampled_from([b"JSON", b"msgpack", b"application/json"]),
        ),
        max_size=3,
    ),
    time_ms=st.integers(-(2**62), 2**62),
)
batches = st.lists(
    st.tuples(
        st.lists(records, min_size=1, max_size=8),
        st.sampled_from(sorted(NAMES)),
        st.integers(-(2**62), 2**62) | st.just(1_709_632_800_000),
        st.sampled_from(["whole"] * 4 + ["checksum", "codec", "body"]),
    ),
    min_size=1,
    max_size=6,
)
topics = (f"t{n}" for n in count())


@given(batches)
@settings(max_examples=30, **FEW_EXAMPLES)
def test_kafka(broker, drawn):
    asyncio.run(_kafka(broker, drawn))


async def _kafka(broker: MockBroker, drawn: list[tuple[list[Rec], str, int, str]]) -> None:
    topic = next(topics)
    broker.create_topic(topic)
    damage: dict[str, dict[str, Any]] = {
        "whole": {},
        "checksum": {"checksum": 7},
        "codec": {"codec": 6},
        "body": {"body": b"\xff" * 30},
    }
    sent: dict[int, bytes] = {}
    sure, damaged, packed, end = set[int](), set[int](), list[bytes](), 0
    for each, codec, first_ms, how in drawn:
        packed.append(batch(each, **{"codec": codec, "first_ms": first_ms} | damage[how]))
        for rec in each:
            if how == "whole":
                sent[end] = rec.value or b""
                names = {name.decode(errors="replace") for name, _ in rec.headers}
                if rec.value == GOOD and "encoding" not in names:
                    sure.add(end)
            else:
                damaged.add(end)
            end += 1
    packed.append(batch([Rec(GOOD)]))
    sent[end] = GOOD
    await store(broker.bootstrap, topic, 0, *packed)
    rig = Rig(KafkaSource("test", broker.bootstrap, [topic], None), max_bytes=LIMIT)
    await rig.source.start()
    await rig.read(lambda: until(lambda: rig.tracker.next_offset((topic, 0)) > end))
    assert damaged.isdisjoint(sent)
    firsts = {n for n in damaged if n - 1 not in damaged}
    assert firsts <= {
        dead_letter.offset for dead_letter in rig.dead_letters if dead_letter.reason == "corrupt"
    }
    check_outcomes(rig, sent, sure | {end})


# ZeroMQ

numbers = st.integers(-(2**63), 2**64 - 1)
headers_of_frames = st.one_of(
    st.binary(max_size=30),
    st.builds(Header, seq=numbers, encoding=st.text(max_size=8), schema=st.text(max_size=8),
              source=st.text(max_size=8), epoch=numbers).map(msgspec.msgpack.encode),
)  # fmt: skip
multiparts = st.one_of(
    st.lists(st.binary(max_size=20), min_size=1, max_size=6),
    st.tuples(st.binary(max_size=8), payloads).map(list),
    st.tuples(st.binary(max_size=8), headers_of_frames, payloads).map(list),
)


@given(st.lists(multiparts, max_size=40))
@settings(max_examples=40, **FEW_EXAMPLES)
def test_zeromq(drawn):
    asyncio.run(_zeromq([*drawn, [b"end", GOOD]]))


async def _zeromq(drawn: list[list[bytes]]) -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.bind("inproc://any")
    rig = Rig(ZmqSource("test", "inproc://any", [""], context=context), max_bytes=LIMIT)
    await rig.source.start()
    await publisher.recv()  # the subscription
    for frames in drawn:
        await publisher.send_multipart(frames)
    await rig.read(lambda: until(lambda: rig.tracker.next_offset(("end", 0)) == len(drawn)))
    publisher.close(linger=0)
    context.term()
    sent = {n: frames[-1] if len(frames) in (2, 3) else b"x" for n, frames in enumerate(drawn)}
    refused = {each.offset for each in rig.dead_letters if each.reason == "frames"}
    sent |= dict.fromkeys(refused, b"x")
    assert {n for n, frames in enumerate(drawn) if len(frames) not in (2, 3)} <= refused
    sure = {n for n, frames in enumerate(drawn) if len(frames) == 2 and frames[1] == GOOD}
    check_outcomes(rig, sent, sure)


# HTTP

codings: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "identity": bytes,
    "gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "br": bytes,
}
printable = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
media = ("application/json", "application/x-ndjson", "application/msgpack", "text/csv")
bodies = st.tuples(
    payloads | st.lists(payloads, max_size=5).map(b"\n".join),
    st.sampled_from(["application/json", "application/x-ndjson", "application/msgpack", "text/csv"])
    | printable,
    st.sampled_from(sorted(codings)) | printable,
    st.booleans(),
)


@given(st.lists(bodies, max_size=8))
@settings(max_examples=30, **FEW_EXAMPLES)
def test_http(drawn):
    asyncio.run(_http(drawn))


async def _http(drawn: list[tuple[bytes, str, str, bool]]) -> None:
    source = PushedSource("test", PushLimits(waiting=1000, body_bytes=1 << 16))
    rig = Rig(source, max_bytes=LIMIT)
    await source.start()
    store = MetricStore.local({})
    pushes, events = Pushes({"test": source}, store, 1 << 16), Events(1, store, max_clients=1, kept=1)

    def health(client: Client) -> Health:
        return health_of([], [], "", spare=False)

    async def answer(*_: object) -> messages.Reply:
        raise AssertionError("nothing is asked")

    routes = api_routes(Requests(awaited(answer)), events, pushes, health, Access())
    server = HttpServer(lambda names: b"", list, more=routes, closing=events.close)
    await server.start(Tasks())

    async def push(body: bytes, kind: str, coding: str) -> int:
        headers = {"content-type": kind} | ({"content-encoding": coding} if coding else {})
        return (await request(server.port, "POST", "/v1/data", body, headers)).status

    async def push_all() -> None:
        for body, kind, coding, packs in drawn:
            sent = codings.get(coding, bytes)(body) if packs else body
            assert await push(sent, kind, coding) in (202, 400, 413, 415, 422)
        assert await push(gzip.compress(GOOD), "application/json", "gzip") == 202
        await until(lambda: source.read_until_ns > 0)

    try:
        await rig.read(push_all)
    finally:
        await server.stop()
    assert rig.tracker.next_offset(("test", 0)) - 1 in rig.offsets(), "the last one is read"
    assert "internal" not in {each.reason for each in rig.dead_letters}
