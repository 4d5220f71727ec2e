"""Clients that listen for events over HTTP: what an idle one costs, and when the last one has an event."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bench.figures import Figure, Goal, Setting, quantiles
from bench.query.bare import bare_server
from bench.run import SuiteRun
from bench.stream.processes import child
from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.connections import allow_connections
from daemon.api.events import Events, sse
from daemon.api.health import health_of
from daemon.api.http_api import api_routes
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.pushes import Pushes
from daemon.supervision import Tasks
from daemon.tenants import Client
from feeds.codec import encode
from feeds.market_data import FlashReady
from metrics.store import MetricStore

_AT_ONCE = 64
"""Connections that are opened at the same time."""
_PATIENCE_S = 120.0
_BARE = "bare Starlette streams"
_WITHIN = 1.5
_GOALS = ("memory", "delivery P99", "delivery to the last client P99")
_PING, _PONG = 9, 10
"""Kinds of a WebSocket's frames."""
_MARK = b'"answers":'
"""Stands once in every event."""


@dataclass(frozen=True)
class EventsPlan:
    """``clients`` that listen, ``events`` that each of them gets, ``every_s`` seconds apart."""

    clients: tuple[int, ...] = (100, 2000)
    events: int = 60
    every_s: float = 0.5
    idle_s: float = 20.0


QUICK = EventsPlan(clients=(20,), events=5, every_s=0.05, idle_s=0.2)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The daemon's HTTP server in a process of its own, and clients in another; none of them asks for
    anything, and each listens to all sessions. *Memory*: what the server's process grows by, a client. *CPU
    time, idle*: of the server, with its pings. *Delivery*: from the publication of an event to its arrival
    at each client, read from both processes' monotonic clock; the clients' process is busy with the other
    clients as well. The reference of SSE is a bare Starlette application with a queue and a streamed response
    for each client, without limits, filters, pings or ids.
    """
    plan = run.sized(EventsPlan(), QUICK)
    for transport in ("SSE", "WebSocket"):
        for clients in plan.clients:
            bare = _measure(plan, transport, clients, serve_bare) if transport == "SSE" else None
            yield from _figures(transport, clients, _measure(plan, transport, clients, serve), bare)


@dataclass(frozen=True)
class _Found:
    bytes_each: float
    idle_cpu: float
    delivery_ns: list[int]
    last_ns: list[int]


def _figures(transport: str, clients: int, found: _Found, bare: _Found | None) -> Iterator[Figure]:
    setting: Setting = {"transport": transport, "clients": clients}
    against = "" if bare is None else _BARE

    def figure(name: str, unit: str, value: Callable[[_Found], float], n: int = 1) -> Figure:
        reference = None if bare is None else value(bare)
        goal = Goal(_WITHIN) if bare is not None and name in _GOALS else None
        return Figure(name, value(found), unit, "", setting, against, reference, goal=goal, n=n)

    yield figure("memory", "KiB a client", lambda each: each.bytes_each / 1024)
    yield figure("CPU time, idle", "share of a core", lambda each: each.idle_cpu)
    for at in (0.5, 0.99):
        name, n = f"delivery P{at * 100:.0f}", len(found.delivery_ns)
        yield figure(name, "ms", lambda each, at=at: quantiles(each.delivery_ns, at)[0] / 1e6, n)  # type: ignore[misc]
        name, n = f"delivery to the last client P{at * 100:.0f}", len(found.last_ns)
        yield figure(name, "ms", lambda each, at=at: quantiles(each.last_ns, at)[0] / 1e6, n)  # type: ignore[misc]


def _measure(plan: EventsPlan, transport: str, clients: int, serving: Callable[..., None]) -> _Found:
    with child(serving, clients) as server:
        port = server.recv()
        with child(listen, port, transport, clients, plan.events) as listeners:
            server.send("size")
            before = server.recv()
            listeners.send("connect")
            listeners.recv()
            time.sleep(plan.idle_s / 4)
            server.send("size")
            after = server.recv()
            started = time.monotonic()
            time.sleep(plan.idle_s)
            server.send("size")
            idle = (server.recv()[1] - after[1]) / (time.monotonic() - started)
            server.send((plan.events, plan.every_s))
            sent: list[int] = server.recv()
            arrived: list[list[int]] = listeners.recv()
        server.send(None)
    took = [[each[n] - sent[n] for each in arrived] for n in range(plan.events)]
    return _Found(
        (after[0] - before[0]) / clients,
        idle,
        [ns for each in took for ns in each],
        [max(each) for each in took],
    )


def serve(clients: int, pipe: Connection) -> None:
    """A server; sends "ready" and its port, then follows commands until None."""
    uvloop.run(_serve(clients, pipe))


async def _serve(clients: int, pipe: Connection) -> None:
    store = MetricStore.local({})
    events = Events(time.time_ns(), store, max_clients=clients)

    def answer(request: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
        return messages.ErrorReply(request.id, "unknown_session", "there are none")

    access, pushes = Access(), Pushes({}, store, 1 << 20)
    routes = api_routes(Requests(answer), events, pushes, lambda client: health_of([], [], ""), access)
    server = HttpServer(
        lambda: b"", list, more=routes, closing=events.close, max_listeners=clients, access=access
    )
    await server.start(Tasks())
    pipe.send("ready")
    pipe.send(server.port)
    await _told(pipe, events.publish)
    await server.stop()


def serve_bare(clients: int, pipe: Connection) -> None:
    """As `serve`, with the least that can stream events."""
    uvloop.run(_serve_bare(clients, pipe))


async def _serve_bare(clients: int, pipe: Connection) -> None:
    queues: list[asyncio.Queue[bytes]] = []

    async def stream(_: Request) -> Response:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queues.append(queue)

        async def events() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            while True:
                yield await queue.get()

        return StreamingResponse(events(), media_type="text/event-stream")

    def publish(message: FlashReady) -> None:
        event = sse("flash_ready", encode(message))
        for queue in queues:
            queue.put_nowait(event)

    allow_connections(clients)
    async with bare_server(Route("/v1/events", stream)) as port:
        pipe.send("ready")
        pipe.send(port)
        await _told(pipe, publish)


async def _told(pipe: Connection, publish: Callable[[FlashReady], None]) -> None:
    """Do as the pipe says, until None."""
    loop = asyncio.get_running_loop()
    while (told := await loop.run_in_executor(None, pipe.recv)) is not None:
        if told == "size":
            pipe.send((_resident(), _cpu_s()))
            continue
        number, every_s = told
        sent = []
        for n in range(number):
            await asyncio.sleep(every_s)
            sent.append(time.monotonic_ns())
            publish(FlashReady(session="bench", data_version=n, as_of=0, answers=6))
        pipe.send(sent)


def listen(port: int, transport: str, clients: int, events: int, pipe: Connection) -> None:
    """Clients; sends "ready", then when all listen, then by client the monotonic ns of each event."""
    allow_connections(clients)
    pipe.send("ready")
    pipe.recv()
    uvloop.run(_listen(port, transport, clients, events, pipe))


async def _listen(port: int, transport: str, clients: int, events: int, pipe: Connection) -> None:
    connecting, connected = asyncio.Semaphore(_AT_ONCE), asyncio.Event()
    left = clients

    async def one() -> list[int]:
        nonlocal left
        async with connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 14)
            await (_begin_socket if transport == "WebSocket" else _begin_stream)(port, reader, writer)
        left -= 1
        if not left:
            connected.set()
        arrived: list[int] = []
        rest = b""
        while len(arrived) < events:
            if transport == "WebSocket":
                text = await _message(reader, writer)
            else:
                text = rest + await reader.read(1 << 14)
                if len(text) == len(rest):
                    raise EOFError("the server has closed a stream")
                rest = text[1 - len(_MARK) :]
            arrived += [time.monotonic_ns()] * text.count(_MARK)
        writer.close()
        return arrived

    async with asyncio.timeout(_PATIENCE_S + events):
        tasks = [asyncio.ensure_future(one()) for _ in range(clients)]
        await connected.wait()
        pipe.send("connected")
        pipe.send(await asyncio.gather(*tasks))


async def _begin_stream(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v1/events HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n\r\n" % port)
    await reader.readuntil(b"retry: 1000\n\n\r\n")


async def _begin_socket(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"GET /v1/ws HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n" % port
    )
    await reader.readuntil(b"\r\n\r\n")
    text = b'{"type":"subscribe","id":1}'
    # one masked text frame; the mask is zero
    writer.write(b"\x81" + bytes([0x80 | len(text)]) + bytes(4) + text)
    await reader.readuntil(b"}")


async def _message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The next message of a WebSocket; pings are answered. Raises IncompleteReadError at its end."""
    while True:
        kind, size = await reader.readexactly(2)
        if size == 126:
            size = int.from_bytes(await reader.readexactly(2))
        payload = await reader.readexactly(size)
        if kind & 0xF != _PING:
            return payload
        # a masked pong with the same payload; the mask is zero
        writer.write(bytes([0x80 | _PONG, 0x80 | size]) + bytes(4) + payload)


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
