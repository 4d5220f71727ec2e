"""One HTTP connection, byte by byte: what is read, refused, cut off, and in which order it is replied to."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from daemon.api.auth import Access
from daemon.api.connections import HEADER_BYTES, MAX_PIPELINED, HttpConnection, Joining, Timeouts
from daemon.api.http_server import HttpServer
from daemon.api.limits import Connections
from daemon.api.messages import QueryError
from daemon.config.tenants_file import TenantTable
from daemon.supervision import Tasks
from daemon.tenants import Tenant, Tenants, hash_of, new_key
from tests.kit import until
from tests.kit.http import Reply, connected, conversing

SHORT = Timeouts(headers=0.3, body=0.3, write=0.3)
HOST = b"host: localhost\r\n"
GET, POST = b"GET /a HTTP/1.1\r\n" + HOST, b"POST /echo HTTP/1.1\r\n" + HOST
PATIENCE_S = 20.0


@dataclass
class Bench:
    """Routes that say what came: ``/echo`` the body, ``/path`` the path; the rest wait for ``release``."""

    server: HttpServer
    release: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[str] = field(default_factory=list)
    """Requests that reached a route, and those whose client was gone."""

    @property
    def port(self) -> int:
        return self.server.port


class Stream(Response):
    """Headers at once, and a body after ``release``."""

    def __init__(self, bench: Bench, body: bytes = b"late") -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._bench, self._rest = bench, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._bench.release.wait()
        await send({"type": "http.response.body", "body": self._rest, "more_body": False})


async def serving(timeouts: Timeouts | None = None, access: Access | None = None, **more: Any) -> Bench:
    async def echo(request: Request) -> Response:
        body = await request.body()
        bench.seen.append(f"echo {len(body)}")
        return Response(body)

    async def path(request: Request) -> Response:
        bench.seen.append(request.url.path)
        return Response(request.scope["path"])

    async def slow(request: Request) -> Response:
        bench.seen.append("slow")
        await bench.release.wait()
        return Response("slow")

    async def unread(request: Request) -> Response:
        bench.seen.append("unread")
        return Response("unread", 413)

    async def stream(request: Request) -> Response:
        return Stream(bench)

    async def headlike(request: Request) -> Response:
        return Response(b"HTTP/1.1 200 OK\r\n\r\n")

    async def converse(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_json({"type": "first"})
        await websocket.send_json({"got": (await websocket.receive_json())["say"], "type": "second"})
        await websocket.close()

    routes: list[BaseRoute] = [
        Route("/echo", echo, methods=["POST"]),
        Route("/slow", slow),
        Route("/unread", unread, methods=["POST"]),
        Route("/stream", stream),
        Route("/headlike", headlike),
        WebSocketRoute("/v1/ws", converse),
        Route("/{rest:path}", path, methods=["GET", "OPTIONS"]),
    ]
    bench = Bench(
        HttpServer(
            lambda names: b"", list, more=routes, timeouts=timeouts, max_listeners=4, access=access, **more
        )
    )
    await bench.server.start(Tasks())
    return bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = await serving()
    yield made
    made.release.set()
    await made.server.stop()


@pytest.fixture
async def hasty() -> AsyncIterator[Bench]:
    made = await serving(SHORT)
    yield made
    made.release.set()
    await made.server.stop()


async def answer(reader: asyncio.StreamReader, *, head_only: bool = False) -> Reply:
    """One response, whose body has a length."""
    async with asyncio.timeout(PATIENCE_S):
        top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = top.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = 0 if head_only else int(headers.get("content-length", 0))
        return Reply(int(first.split()[1]), headers, await reader.readexactly(size))


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the connection is closed."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def refused(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends with an error, which a client that still writes may not get to see."""
    last = await rest(reader)
    return not last or last.startswith(b"HTTP/1.1 400")


async def told(bench: Bench, sent: bytes) -> Reply:
    """The response to ``sent``."""
    async with connected(bench.port) as (reader, writer):
        writer.write(sent)
        return await answer(reader)


def long_head(size: int) -> bytes:
    """A whole request of this many bytes of names and values, and its first line's path."""
    fixed = len("/a") + len("host") + len("localhost") + len("x-long")
    return b"GET /a HTTP/1.1\r\n" + HOST + b"x-long: " + b"x" * (size - fixed) + b"\r\n\r\n"


async def test_whole_headers_that_are_too_long_are_refused(bench: Bench) -> None:
    assert (await told(bench, long_head(HEADER_BYTES))).status == 200
    bench.seen.clear()
    for sent in (
        long_head(HEADER_BYTES + 1),
        long_head(200_000),
        b"GET /a HTTP/1.1\r\n" + HOST + b"".join(b"x-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET /" + b"a" * (HEADER_BYTES + 1) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    ):
        async with connected(bench.port) as (reader, writer):
            writer.write(sent)
            assert (await answer(reader)).status == 400
            assert await rest(reader) == b""  # and the connection is closed
    assert bench.seen == []


async def test_long_headers_in_many_pieces_are_refused_before_their_end(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\n" + HOST)
        with contextlib.suppress(ConnectionError):
            for n in range(HEADER_BYTES // 64):
                writer.write(b"x-%06d: %s\r\n" % (n, b"y" * 54))
                await writer.drain()
                await asyncio.sleep(0)
        assert await refused(reader)
    assert bench.seen == []


async def test_headers_in_pieces_of_a_byte_are_read(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        _nodelay(writer)
        for byte in b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n\r\nabcd":
            writer.write(bytes((byte,)))
            await asyncio.sleep(0.001)
        assert (await answer(reader)).body == b"abcd"


async def test_long_headers_behind_another_request_are_refused(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /first HTTP/1.1\r\n" + HOST + b"\r\nGET /second HTTP/1.1\r\n")
        assert (await answer(reader)).body == b"/first"
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(b"x: " + b"y" * 1000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
        assert await refused(reader)
    assert bench.seen == ["/first"]


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (b"", 403),
        (b"host: localhost\r\nhost: evil.example\r\n", 403),
        (b"host: evil.example\r\nhost: localhost\r\n", 403),
        (b"host: localhost\r\nHost: localhost\r\n", 403),
        (b"host: localhost, evil.example\r\n", 403),
        (b"host: localhost:1\r\n", 200),
        (b"HOST: LOCALHOST\r\n", 200),
    ],
)
async def test_a_request_names_one_host(bench: Bench, hosts: bytes, status: int) -> None:
    assert (await told(bench, b"GET /a HTTP/1.1\r\n" + hosts + b"\r\n")).status == status


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
        POST + b"content-length: -4\r\n\r\nabcd",
        POST + b"content-length: +4\r\n\r\nabcd",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        GET + b"x: a\x00b\r\n\r\n",
        GET + b"x: a\x01b\r\n\r\n",
        GET + b"x y: a\r\n\r\n",
        GET + b"x : a\r\n\r\n",
        GET + b"x: a\r\n folded\r\n\r\n",
        b"GET /a HTTP/1.1\nhost: localhost\n\n",
        b"no request at all\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:24]) + repr(sent[-24:]),
)
async def test_what_is_no_request_is_refused_and_the_connection_closed(bench: Bench, sent: bytes) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(sent)
        found = await answer(reader)
        assert (found.status, found.headers["content-type"]) == (400, "application/json")
        assert b'"code":"bad_request"' in found.body
        assert await rest(reader) == b""
    assert [each for each in bench.seen if each != "echo 0"] == []


async def test_pipelined_requests_are_replied_to_in_their_order(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        get, post = b"GET /%s HTTP/1.1\r\n" + HOST + b"\r\n", b"POST /echo HTTP/1.1\r\n" + HOST
        writer.write(get % b"slow" + post + b"content-length: 3\r\n\r\nabc" + get % b"a" + get % b"b")
        await until(lambda: bench.seen == ["slow"])
        bench.release.set()
        assert [(await answer(reader)).body for _ in range(4)] == [b"slow", b"abc", b"/a", b"/b"]


async def test_so_many_requests_wait_on_one_connection(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        get = b"GET /%s HTTP/1.1\r\n" + HOST + b"\r\n"
        writer.write(get % b"slow" + get % b"a" * (MAX_PIPELINED + 1))
        assert await rest(reader) == b""
    assert bench.seen == ["slow"]


@pytest.mark.parametrize("bad", [b"no request\r\n\r\n", b"GET /a HTTP/1.1\r\nx: a\x00\r\n\r\n"])
async def test_an_error_is_never_the_reply_to_an_earlier_request(bench: Bench, bad: bytes) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n" + bad)
        assert await rest(reader) == b""


async def test_headers_that_are_too_long_are_refused_in_their_turn(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n" + long_head(20_000))
        await until(lambda: bench.seen == ["slow"])
        bench.release.set()
        assert [(await answer(reader)).status for _ in range(2)] == [200, 400]
        assert await rest(reader) == b""


async def test_a_body_in_many_pieces_is_read_whole(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        _nodelay(writer)
        body = bytes(range(256)) * 1000
        writer.write(b"POST /echo HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 7919):
            writer.write(body[start : start + 7919])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await answer(reader)).body == body
        writer.write(b"POST /echo HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(50):
            writer.write(b"3\r\nabc\r\n")
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        assert (await answer(reader)).body == b"abc" * 50


async def test_a_client_that_asks_first_is_told_to_go_on(bench: Bench) -> None:
    top = HOST + b"content-length: 4\r\nexpect: 100-continue\r\n\r\n"
    async with connected(bench.port) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\n" + top)
        assert (await answer(reader)).status == 100
        writer.write(b"abcd")
        assert (await answer(reader)).body == b"abcd"
        # who does not want the body says so instead
        writer.write(b"POST /unread HTTP/1.1\r\n" + top)
        assert (await answer(reader)).status == 413


async def test_http_1_0_is_served_and_closed(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /a HTTP/1.0\r\n" + HOST + b"\r\n")
        found = await answer(reader)
        assert (found.status, found.body, found.headers["connection"]) == (200, b"/a", "close")
        assert await rest(reader) == b""


async def test_head_has_the_length_and_no_body(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        for method in (b"HEAD", b"GET", b"HEAD"):
            writer.write(method + b" /abc HTTP/1.1\r\n" + HOST + b"\r\n")
            found = await answer(reader, head_only=method == b"HEAD")
            assert (found.status, found.headers["content-length"]) == (200, "4")


async def test_the_server_as_a_whole_has_no_options(bench: Bench) -> None:
    assert (await told(bench, b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n")).status == 404


async def test_a_whole_url_is_its_path(bench: Bench) -> None:
    for url in (b"http://localhost/a/b?c", b"http://evil.example/a/b"):
        found = await told(bench, b"GET " + url + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (found.status, found.body) == (200, b"/a/b")


async def test_an_upgrade_that_is_not_offered_is_an_ordinary_request(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(
            b"GET /a HTTP/1.1\r\n" + HOST + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
            b"http2-settings: AAMAAABk\r\n\r\n"
        )
        assert (await answer(reader)).body == b"/a"
        writer.write(b"GET /b HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await answer(reader)).body == b"/b"


async def test_a_connection_goes_on_after_an_error(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        for sent, status in (
            (b"DELETE /a HTTP/1.1\r\n" + HOST + b"\r\n", 405),
            (b"GET /a HTTP/1.1\r\nhost: evil.example\r\n\r\n", 403),
            (b"POST /unread HTTP/1.1\r\n" + HOST + b"content-length: 100000\r\n\r\n" + b"x" * 100_000, 413),
            (b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        ):
            writer.write(sent)
            assert (await answer(reader)).status == status


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /a HTTP/1.1\r\n", b"x: y\r\n"),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n", b"\r\n"),
        (b"\r\n", b"\r\n"),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nGET /b HTTP/1.1\r\n", b"x: y\r\n"),
        (b"POST /echo HTTP/1.1\r\n" + HOST + b"content-length: 9999\r\n\r\n", b"x"),
        (b"POST /echo HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["headers", "nothing but line ends", "line ends alone", "the next headers", "body", "chunks"],
)
async def test_a_request_in_ever_more_pieces_is_cut_off(hasty: Bench, pieces: tuple[bytes, bytes]) -> None:
    first, more = pieces
    async with connected(hasty.port) as (reader, writer):
        writer.write(first)
        closed = asyncio.ensure_future(rest(reader))
        while not closed.done():
            writer.write(more)
            await asyncio.wait({closed}, timeout=0.05)
    assert [each for each in hasty.seen if each.startswith("echo")] == []


async def test_each_request_of_a_connection_has_its_own_time(bench: Bench) -> None:
    assert bench.server._server is not None
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\n")
        await until(lambda: bool(bench.server._server.server_state.connections))  # type: ignore[union-attr]  # as above
        (connection,) = bench.server._server.server_state.connections
        assert isinstance(connection, HttpConnection)
        await until(lambda: connection.headers is not None)
        first = connection._timer
        # the end of this request and the beginning of the next one arrive together
        writer.write(HOST + b"\r\nGET /b HTTP/1.1\r\n")
        assert (await answer(reader)).body == b"/a"
        second = connection._timer
        assert first is not None
        assert second is not None
        assert first.cancelled()
        assert second.when() > first.when()


async def test_the_headers_of_a_stream_do_not_wait_for_its_first_event(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        writer.write(b"GET /stream HTTP/1.1\r\n" + HOST + b"\r\n")
        found = await answer(reader)
        assert (found.status, found.headers["transfer-encoding"]) == (200, "chunked")
        bench.release.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\nlate\r\n0\r\n\r\n"


async def test_a_body_that_looks_like_headers_stays_a_body(bench: Bench) -> None:
    async with connected(bench.port) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /headlike HTTP/1.1\r\n" + HOST + b"\r\n")
            assert (await answer(reader)).body == b"HTTP/1.1 200 OK\r\n\r\n"


async def test_an_upgraded_connection_sends_and_receives_at_once(bench: Bench) -> None:
    async with conversing(bench.port) as sock:
        assert (await sock.next())["type"] == "first"
        assert (await sock.ask(say="hi"))["got"] == "hi"
        with pytest.raises(EOFError, match="1000"):
            await sock.next()


class Wire(asyncio.Transport):
    """A transport that keeps each write; ``state``: what else was asked of it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.writes: list[bytes] = []
        self.state = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"

    def is_closing(self) -> bool:
        return bool(self.state)


async def test_headers_and_the_first_of_a_body_are_one_write() -> None:
    wire = Wire()
    joining = Joining(wire)
    joining.write(b"HTTP/1.1 200 OK\r\n\r\n")
    joining.write(b"abc")
    joining.write(b"def")
    assert wire.writes == [b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"]
    wire.writes.clear()
    joining.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await asyncio.sleep(0)
    assert wire.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    joining.write(b"HTTP/1.1 200 OK\r\n\r\n")
    joining.close()
    assert (wire.writes[1:], wire.state) == ([b"HTTP/1.1 200 OK\r\n\r\n"], "closed")


async def test_nothing_is_written_after_an_abort() -> None:
    wire = Wire()
    joining = Joining(wire)
    joining.write(b"HTTP/1.1 200 OK\r\n\r\n")
    joining.abort()
    await asyncio.sleep(0)
    assert (wire.writes, wire.state) == ([], "aborted")


# How many there are.


DESK, RISK = new_key(), new_key()
TABLES = (TenantTable("desk", api_keys=(hash_of(DESK),)), TenantTable("risk", api_keys=(hash_of(RISK),)))


@asynccontextmanager
async def asking(bench: Bench, path: str = "/slow", key: str = "") -> AsyncIterator[asyncio.StreamReader]:
    """A connection with a request on it."""
    async with connected(bench.port) as (reader, writer):
        own = f"x-api-key: {key}\r\n".encode() if key else b""
        writer.write(f"GET {path} HTTP/1.1\r\n".encode() + HOST + own + b"\r\n")
        yield reader


async def test_a_tenant_has_half_of_the_connections() -> None:
    bench = await serving(access=Access(Tenants(TABLES)), max_others=4)
    async with AsyncExitStack() as held:
        for n in range(4):
            await held.enter_async_context(asking(bench, key=DESK))
            await until(lambda n=n: len(bench.seen) == n + 1)  # type: ignore[misc]  # a lambda's default
        async with asking(bench, key=DESK) as fifth:
            refused = await answer(fifth)
            assert (refused.status, refused.headers["connection"]) == (429, "close")
            assert int(refused.headers["retry-after"]) > 0
            assert await rest(fifth) == b""
        protocols = {"sec-websocket-protocol": f"foretick, foretick-key.{DESK}"}
        async with conversing(bench.port, **protocols) as socket:
            assert (socket.accepted, socket.status) == (False, 429)
        async with asking(bench, "/a", RISK) as theirs, asking(bench, "/healthz") as health:
            assert (await answer(theirs)).status == 200
            assert (await answer(health)).status == 200
    # each of them that is gone makes room
    bench.release.set()
    await until(lambda: not bench.server._connections._owners)
    async with asking(bench, "/a", DESK) as again:
        assert (await answer(again)).status == 200
    await bench.server.stop()


def test_a_connection_counts_for_who_asked_last() -> None:
    connections = Connections(4)
    desk, risk = Tenant("desk"), Tenant("risk", max_listeners=3)
    peers = [("::1", n) for n in range(6)]
    for peer in peers:
        connections.opened(peer)
    for peer in peers[:2]:
        with pytest.raises(QueryError, match="4 connections"):
            connections.claim(peer, desk)
        connections.closed(peer)
    for peer in peers[2:4]:
        connections.claim(peer, desk)
    with pytest.raises(QueryError, match="2 connections"):
        connections.claim(peers[4], desk)
    connections.claim(peers[2], risk)
    connections.claim(peers[4], desk)
    connections.claim(peers[5], risk)
    for peer in peers:
        connections.closed(peer)
    assert (connections._owners, len(connections._share)) == ({}, 0)


async def test_whoever_fills_the_port_health_is_told() -> None:
    bench = await serving(max_others=4)
    async with AsyncExitStack() as held:
        for n in range(8):
            await held.enter_async_context(asking(bench))
            await until(lambda n=n: len(bench.seen) == n + 1)  # type: ignore[misc]  # a lambda's default
        for _ in range(3):
            async with asking(bench, "/a") as more, asking(bench, "/healthz") as health:
                refused = await answer(more)
                assert (refused.status, b'"busy"' in refused.body) == (429, True)
                assert (await answer(health)).status == 200
    bench.release.set()
    await bench.server.stop()


def _nodelay(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
