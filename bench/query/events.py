"""Clients that listen for events over HTTP: what an idle one costs, and when the last one has an event."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bench.figures import Figure, Goal, Setting, latency
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
_GOAL = Goal(1.5)
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


@dataclass(frozen=True)
class _Found:
    bytes_each: float
    idle_cpu: float
    delivery_ns: list[int]
    last_ns: list[int]


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The daemon's HTTP server in a process of its own, and clients in another; none of them asks for
    anything, and each listens to all sessions (SSE). *Memory*: what the server's process grows by, a client.
    *CPU time, idle*: of the server, with its pings. *Delivery*: from the publication of an event to its
    arrival at each client, read from both processes' monotonic clock; the clients' process is busy with the
    other clients as well. The reference is a bare Starlette application with a queue and a streamed response
    for each client, without limits, filters, pings or ids.
    """
    plan = run.sized(EventsPlan(), QUICK)
    for clients in plan.clients:
        bare, ours = (_measure(plan, clients, serving) for serving in (_serve_bare, _serve))
        setting: Setting = {"transport": "SSE", "clients": clients}
        sizes = ours.bytes_each / 1024, "KiB a client", "", setting, _BARE, bare.bytes_each / 1024
        yield Figure("memory", *sizes, goal=_GOAL)
        idle = "CPU time, idle"
        yield Figure(idle, ours.idle_cpu, "share of a core", "", setting, _BARE, bare.idle_cpu)
        for name, took, other in (
            ("delivery", ours.delivery_ns, bare.delivery_ns),
            ("delivery to the last client", ours.last_ns, bare.last_ns),
        ):
            yield from latency(name, took, setting, "", _BARE, other, paired=False, goals={0.99: _GOAL})


def _measure(plan: EventsPlan, clients: int, serving: Callable[[int, Connection], None]) -> _Found:
    with child(serving, clients) as server:
        port = server.recv()
        with child(_listen, port, clients, plan.events) as listeners:
            before, _ = _size(server)
            listeners.send("connect")
            listeners.recv()
            time.sleep(plan.idle_s / 4)
            after, busy = _size(server)
            started = time.monotonic()
            time.sleep(plan.idle_s)
            idle = (_size(server)[1] - busy) / (time.monotonic() - started)
            server.send((plan.events, plan.every_s))
            sent: list[int] = server.recv()
            arrived: list[list[int]] = listeners.recv()
        server.send(None)
    took = [[each[n] - sent[n] for each in arrived] for n in range(plan.events)]
    delivery = [ns for each in took for ns in each]
    return _Found((after - before) / clients, idle, delivery, list(map(max, took)))


def _size(server: Connection) -> tuple[int, float]:
    """Bytes in memory, and seconds of CPU time."""
    server.send("size")
    size: tuple[int, float] = server.recv()
    return size


def _serve(clients: int, pipe: Connection) -> None:
    """A server; sends "ready" and its port, then follows commands until None."""

    async def serve() -> None:
        store = MetricStore.local({})
        events = Events(time.time_ns(), store, max_clients=clients)

        def answer(request: messages.ClientRequest, client: Client, since: int) -> messages.Reply:
            return messages.ErrorReply(request.id, "unknown_session", "there are none")

        access, pushes = Access(), Pushes({}, store, 1 << 20)
        routes = api_routes(
            Requests(answer), events, pushes, lambda client: health_of([], [], "", spare=False), access
        )
        server = HttpServer(
            lambda names: b"", list, more=routes, closing=events.close, max_listeners=clients, access=access
        )
        await server.start(Tasks())
        await _follow(pipe, server.port, events.publish)
        await server.stop()

    uvloop.run(serve())


def _serve_bare(clients: int, pipe: Connection) -> None:
    """As `_serve`, with the least that can stream events."""
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

    async def serve() -> None:
        async with bare_server(Route("/v1/events", stream)) as port:
            await _follow(pipe, port, publish)

    allow_connections(clients)
    uvloop.run(serve())


async def _follow(pipe: Connection, port: int, publish: Callable[[FlashReady], None]) -> None:
    """Do as the pipe says, until None."""
    pipe.send("ready")
    pipe.send(port)
    while (command := await asyncio.to_thread(pipe.recv)) is not None:
        if command == "size":
            pipe.send((_resident(), time.process_time()))
            continue
        number, every_s = command
        sent = []
        for n in range(number):
            await asyncio.sleep(every_s)
            sent.append(time.monotonic_ns())
            publish(FlashReady(session="bench", data_version=n, as_of=0, answers=6))
        pipe.send(sent)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _listen(port: int, clients: int, events: int, pipe: Connection) -> None:
    """Clients; sends "ready", then when all listen, then by client the monotonic ns of each event."""
    allow_connections(clients)
    pipe.send("ready")
    pipe.recv()
    uvloop.run(_listening(port, clients, events, pipe))


async def _listening(port: int, clients: int, events: int, pipe: Connection) -> None:
    connecting, connected = asyncio.Semaphore(_AT_ONCE), asyncio.Event()
    left = clients

    async def one() -> list[int]:
        nonlocal left
        async with connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 14)
            writer.write(b"GET /v1/events HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n\r\n" % port)
            await reader.readuntil(b"\n\n\r\n")
        left -= 1
        if not left:
            connected.set()
        arrived: list[int] = []
        rest = b""
        while len(arrived) < events:
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
