"""Clients that listen over HTTP, without a daemon: slow ones, floods, other origins, and what is cut off."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import quote

import pytest

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.connections import Timeouts
from daemon.api.events import Events
from daemon.api.health import Health, health_of
from daemon.api.http_api import api_routes
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.pushes import Pushes
from daemon.api.websocket import BURST_S, MESSAGE_BYTES, SocketLimits
from daemon.supervision import Tasks
from daemon.tenants import Client
from feeds.market_data import FlashReady
from feeds.push_source import PushedSource, PushLimits
from metrics.store import MetricStore
from tests.kit import until
from tests.kit.fakes import awaited
from tests.kit.http import connected, conversing, head, listening, request

KEPT = 64
SOCKET = SocketLimits(messages=150, requests=24, subscriptions=12)
BURST = int(SOCKET.messages * BURST_S)
LIMITS = PushLimits(waiting=10, body_bytes=1000)
SHORT = Timeouts(headers=0.3, body=0.3, write=0.3)


@dataclass
class Bench:
    """A server over a backend that holds asks until ``release``."""

    server: HttpServer
    events: Events
    store: MetricStore
    source: PushedSource
    release: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[messages.ClientRequest] = field(default_factory=list)
    given_up: int = 0

    @property
    def port(self) -> int:
        return self.server.port

    async def answer(self, request: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
        self.asked.append(request)
        if isinstance(request, messages.Ask):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return messages.ErrorReply(request.id, "unknown_session", "none here")

    def publish(self, n: int, size: int = 0) -> None:
        """An event of about ``size`` bytes."""
        session = f"s{'x' * size}"
        self.events.publish(FlashReady(session=session, data_version=n, as_of=0, answers=1))

    def listeners(self, transport: str) -> float:
        return self.store.value("foretick_listeners", transport=transport)


async def serving(
    timeouts: Timeouts | None = None,
    max_listeners: int = 50,
    limits: PushLimits = LIMITS,
) -> Bench:
    store = MetricStore.local({})
    events = Events(1, store, max_clients=max_listeners, kept=KEPT)
    source = PushedSource("http", limits)

    def health(client: Client) -> Health:
        return health_of(["the engine is not up"], [], "", spare=False)

    async def answer(asked: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
        return await bench.answer(asked, client, since)

    requests, pushes = Requests(awaited(answer)), Pushes({"http": source}, store, 1 << 20)
    routes = api_routes(requests, events, pushes, health, Access(), socket=SOCKET)
    server = HttpServer(
        lambda names: b"",
        list,
        more=routes,
        closing=events.close,
        max_listeners=max_listeners,
        timeouts=timeouts,
    )
    bench = Bench(server, events, store, source)
    await server.start(Tasks())
    return bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = await serving()
    yield made
    await made.server.stop()


@pytest.fixture
async def hasty() -> AsyncIterator[Bench]:
    made = await serving(SHORT, max_listeners=2)
    yield made
    await made.server.stop()


async def test_a_slow_stream_loses_only_its_own_events_and_is_told_how_many(bench: Bench) -> None:
    async with listening(bench.port) as slow, listening(bench.port) as quick:
        await until(lambda: bench.listeners("sse") == 2)
        big, sent = 200_000, 400  # more than the buffers of both ends and those between hold

        async def read_all() -> list[int]:
            return [(await quick.next()).data["data_version"] for _ in range(sent)]

        reading = asyncio.ensure_future(read_all())
        for n in range(sent):
            bench.publish(n, big)
            await asyncio.sleep(0.001)
        assert await asyncio.wait_for(reading, 60) == list(range(sent))
        assert bench.store.value("foretick_events_dropped_total", transport="sse") > 0
        got, lost = [], 0
        while not got or got[-1] != sent - 1:
            event = await slow.next()
            if event.kind == "lost":
                assert event.data["reason"] == "slow"
                assert event.data["exact"]
                lost += event.data["events"]
            else:
                got.append(event.data["data_version"])
        assert got == sorted(got)
        assert lost == sent - len(got) > 0


def paused(writer: asyncio.StreamWriter) -> None:
    """The client reads nothing more."""
    assert isinstance(writer.transport, asyncio.Transport)
    writer.transport.pause_reading()


def resumed(writer: asyncio.StreamWriter) -> None:
    """The client reads again."""
    assert isinstance(writer.transport, asyncio.Transport)
    writer.transport.resume_reading()


async def test_a_client_that_never_reads_is_cut_off(hasty: Bench) -> None:
    async with listening(hasty.port) as stuck:
        await until(lambda: hasty.listeners("sse") == 1)
        paused(stuck.writer)
        for n in range(KEPT):
            hasty.publish(n, 500_000)
        await until(lambda: hasty.listeners("sse") == 0)
        resumed(stuck.writer)
        with contextlib.suppress(ConnectionError):
            assert len(await asyncio.wait_for(stuck.reader.read(), 10)) < KEPT * 500_000


async def test_a_socket_that_never_reads_is_cut_off(hasty: Bench) -> None:
    async with conversing(hasty.port) as stuck:
        await stuck.ask(type="subscribe", id=1)
        paused(stuck.writer)
        for n in range(KEPT):
            hasty.publish(n, 500_000)
        await until(lambda: hasty.listeners("websocket") == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/version HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /v1/ask HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 9\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\n",
    ],
    ids=["nothing", "half of the headers", "half of the body", "half of the next headers"],
)  # fmt: skip
async def test_a_request_that_comes_too_slowly_is_cut_off(hasty: Bench, sent: bytes) -> None:
    async with connected(hasty.port) as (reader, writer):
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 60)
    assert hasty.source.waiting == 0


async def test_streams_outlast_the_timeouts_of_requests() -> None:
    made = await serving(Timeouts(headers=2.0, body=0.3, write=0.3))
    async with listening(made.port) as stream, conversing(made.port) as socket:
        await socket.ask(type="subscribe", id=1)
        await asyncio.sleep(2.5)
        made.publish(1)
        assert (await stream.next()).data["data_version"] == 1
        assert (await socket.next("event"))["data"]["data_version"] == 1
    await made.server.stop()


async def test_head_of_a_stream_has_its_headers_and_ends(bench: Bench) -> None:
    head_only = await request(bench.port, "HEAD", "/v1/events?session=a")
    async with listening(bench.port) as stream:
        theirs = stream.reply.headers
    assert (head_only.status, head_only.body) == (200, b"")
    for name in ("content-type", "cache-control"):
        assert head_only.headers[name] == theirs[name]
    assert "content-length" not in head_only.headers
    assert (await request(bench.port, "HEAD", "/v1/events?event=none")).status == 400
    await until(lambda: bench.listeners("sse") == 0)


async def test_only_so_many_listen(hasty: Bench) -> None:
    async with listening(hasty.port), listening(hasty.port), listening(hasty.port) as third:
        assert (third.reply.status, third.reply.json["code"]) == (429, "busy")
        async with conversing(hasty.port) as socket:
            assert (socket.accepted, socket.status) == (False, 429)
    await until(lambda: hasty.listeners("sse") == 0)
    # a WebSocket is one of them, with its first subscription or without
    async with conversing(hasty.port) as socket, conversing(hasty.port) as idle:
        assert (socket.accepted, idle.accepted) == (True, True)
        assert hasty.listeners("websocket") == 2
        assert (await socket.ask(type="subscribe", id=1))["type"] == "subscribed"
        assert (await socket.ask(type="subscribe", id=2))["code"] == "busy"
        assert hasty.listeners("websocket") == 2
        async with conversing(hasty.port) as third_socket, listening(hasty.port) as stream:
            assert (third_socket.status, stream.reply.status) == (429, 429)
    await until(lambda: hasty.listeners("websocket") == 0)


async def test_a_socket_is_told_what_is_wrong(bench: Bench) -> None:
    async with conversing(bench.port) as socket:
        assert (await socket.ask(type="subscribe", id=3))["type"] == "subscribed"
        for message, number, part in (
            ("{", None, "truncated"),
            ('{"type": "ask", "id": 4}', 4, "missing required field"),
            ('{"type": "fly", "id": 5}', 5, "Invalid value"),
            ('{"type": "sessions", "id": -1}', None, "Expected"),
            (b"bytes", None, "not bytes"),
            ({"type": "unsubscribe", "id": 6, "subscription": 99}, 6, "no subscription"),
            ({"type": "subscribe", "id": 3}, 3, "there is a subscription"),
        ):
            await socket.send(message)
            error = await socket.next("error")
            assert (error["id"], error["code"]) == (number, "bad_request")
            assert part in error["message"].lower() or part in error["message"]
        assert (await socket.ask(type="unsubscribe", id=8, subscription=3))["type"] == "unsubscribed"
        bench.publish(1)
        for n in range(SOCKET.subscriptions):
            assert (await socket.ask(type="subscribe", id=100 + n))["type"] == "subscribed"
        assert (await socket.ask(type="subscribe", id=200))["code"] == "busy"
    await until(lambda: bench.listeners("websocket") == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"x",
        b"null",
        b"undefined",
        b"17\xe9.5",
        b"\xff\xfe\x80",
        "\u0661.\u0662".encode(),
        b"abc.99999999999999999999",
        b"18a2f0c3",
        b"18a2f0c3.5, 18a2f0c3.6",
        b"a" * 9000,
    ],
)
@pytest.mark.parametrize("in_header", [True, False])
async def test_an_unreadable_id_begins_now_and_the_stream_says_so(
    bench: Bench, sent: bytes, in_header: bool
) -> None:
    bench.publish(1)
    line = b"last-event-id: " + sent + b"\r\n" if in_header else b""
    query = b"" if in_header else b"?after=" + quote(sent).encode()
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /v1/events" + query + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n" + line + b"\r\n")
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
            text = await reader.readuntil(b"}\n\n")
        newest = bench.events.newest
        lost = json.dumps(
            {"events": "unknown", "exact": False, "reason": "unknown_id", "after": newest},
            separators=(",", ":"),
        )
        assert f"id: {newest}\nevent: lost\ndata: {lost}\n\n".encode() in text
        bench.publish(2)
        async with asyncio.timeout(60):
            assert f"id: {bench.events.newest}\n".encode() in await reader.readuntil(b"}\n\n")
    async with listening(bench.port, last_event_id=newest) as again:
        assert (await again.next()).kind != "lost"


async def test_a_number_that_no_message_holds_is_refused_over_a_socket(bench: Bench) -> None:
    async with conversing(bench.port) as socket:
        for number in (2**63, 2**70):
            asked = await socket.ask(type="complete", id=1, text="x", max_tokens=number)
            assert (asked["id"], asked["code"]) == (1, "bad_request")
        assert (await socket.ask(type="sessions", id=2**64))["code"] == "bad_request"
    assert bench.asked == []


async def test_a_client_that_closes_its_connection_ends_its_request(bench: Bench) -> None:
    body = b'{"session": "a", "question": "?"}'
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    async with connected(bench.port) as (_, writer):
        writer.write(head("POST", "/v1/ask", fields) + body)
        await until(lambda: len(bench.asked) == 1)
        assert bench.given_up == 0
    await until(lambda: bench.given_up == 1)


async def test_a_socket_without_subscriptions_is_closed_when_its_key_is_gone(bench: Bench) -> None:
    async with conversing(bench.port) as socket:
        bench.events.dismiss(lambda client: True)
        assert (await socket.ask(type="sessions", id=1))["id"] == 1
        bench.events.dismiss(lambda client: False)
        with pytest.raises(EOFError, match="1008"):
            await socket.next()
    await until(lambda: not bench.events.connections)


async def test_a_message_that_is_too_long_closes_the_socket(bench: Bench) -> None:
    async with conversing(bench.port) as socket:
        await socket.send("x" * (MESSAGE_BYTES + 1))
        with pytest.raises(EOFError, match="1009"):
            await socket.next()


async def test_a_flood_over_one_socket_is_refused_and_the_rest_answered(bench: Bench) -> None:
    async with conversing(bench.port) as socket:
        for n in range(BURST + 200):
            await socket.send({"type": "sessions", "id": n})
        codes = [(await socket.next())["code"] for _ in range(BURST + 200)]
    assert codes.count("busy") > 0
    assert codes.count("unknown_session") >= BURST


async def test_a_socket_with_enough_requests_in_flight_is_not_read(bench: Bench) -> None:
    async with conversing(bench.port) as socket:
        for n in range(SOCKET.requests + 5):
            await socket.send({"type": "ask", "id": n, "session": "a", "question": "?"})
        await until(lambda: len(bench.asked) == SOCKET.requests)
        await asyncio.sleep(0.1)
        assert len(bench.asked) == SOCKET.requests
        bench.release.set()
        replies = [await socket.next() for _ in range(SOCKET.requests + 5)]
        assert sorted(reply["id"] for reply in replies) == list(range(SOCKET.requests + 5))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"host": "prices.example:7800"},
        {"host": "127.0.0.1.evil.example"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_pages_of_other_origins_neither_read_nor_write(bench: Bench, headers: dict[str, str]) -> None:
    await bench.source.start()
    for path in ("/", "/openapi.json", "/v1/sessions", "/v1/events", "/v1/health", "/v1/nothing"):
        reply = await request(bench.port, "GET", path, headers=headers)
        assert (reply.status, reply.json["code"]) == (403, "forbidden")
    assert (await request(bench.port, "POST", "/v1/data", {}, headers)).status == 403
    async with conversing(bench.port, **headers) as socket:
        assert (socket.accepted, socket.status) == (False, 403)
    assert (await request(bench.port, "GET", "/healthz", headers=headers)).status == 200
    assert (bench.asked, bench.source.waiting) == ([], 0)


async def test_our_own_page_may_use_them_and_links_lead_to_it(bench: Bench) -> None:
    ours = {"origin": f"http://127.0.0.1:{bench.port}", "sec-fetch-site": "same-origin"}
    reply = await request(bench.port, "GET", "/v1/version", headers=ours)
    assert (reply.status, reply.headers["x-content-type-options"]) == (200, "nosniff")
    async with conversing(bench.port, origin=ours["origin"]) as socket:
        assert socket.accepted
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for path in ("/", "/live/questions/trend"):
        page = await request(bench.port, "GET", path, headers=link)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (await request(bench.port, "GET", "/live/sessions.js", headers=link)).status == 403
    assert (await request(bench.port, "GET", "/v1/sessions", headers=link)).status == 403


async def test_what_is_not_ready_is_in_the_health(bench: Bench) -> None:
    health = (await request(bench.port, "GET", "/v1/health")).json
    assert (health["status"], health["ready"]) == ("waiting", False)
    assert health["reasons"] == ["the engine is not up"]


async def test_a_source_that_is_not_read_takes_no_pushes(bench: Bench) -> None:
    reply = await request(bench.port, "POST", "/v1/data", {})
    assert (reply.status, reply.json["code"]) == (503, "engine")
