"""The HTTP endpoints over a real socket, and the server's life inside the daemon's loop."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Collection

import pytest

from daemon.api.http_server import NAME, HttpServer
from daemon.supervision import Tasks
from tests.kit.http import Reply, connected, request


class Daemon:
    def __init__(self) -> None:
        self.missing: list[str] = ["model"]
        self.text = b"foretick_engine_up 1.0\n"

    def metrics(self, names: Collection[str]) -> bytes:
        return b" ".join(name.encode() for name in names) or self.text


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
async def server(daemon) -> AsyncIterator[HttpServer]:
    made = HttpServer(daemon.metrics, lambda: daemon.missing)
    await made.start(Tasks())
    yield made
    await made.stop()


async def get(server: HttpServer, path: str) -> Reply:
    return await request(server.port, "GET", path)


async def test_metrics_are_rendered_at_each_scrape(server, daemon):
    found = await get(server, "/metrics")
    assert (found.status, found.body) == (200, daemon.text)
    assert found.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    daemon.text = b"foretick_engine_up 0.0\n"
    assert (await get(server, "/metrics")).body == daemon.text


async def test_metrics_are_chosen_by_name(server):
    assert (await get(server, "/metrics?name[]=b&other=c&name%5B%5D=a")).body == b"b a"


async def test_readiness_names_what_is_missing_and_liveness_does_not_care(server, daemon):
    waiting = await get(server, "/readyz")
    assert (waiting.status, waiting.json) == (503, {"status": "waiting", "reasons": ["model"]})
    assert (await get(server, "/healthz")).status == 200
    daemon.missing = []
    ready = await get(server, "/readyz")
    assert (ready.status, ready.json) == (200, {"status": "ready", "reasons": []})


async def test_liveness_says_when_only_a_restart_helps(daemon):
    stuck = [True]
    server = HttpServer(daemon.metrics, lambda: [], is_stuck=lambda: stuck[0])
    await server.start(Tasks())
    found = await get(server, "/healthz")
    assert (found.status, found.json) == (503, {"status": "stuck"})
    stuck[0] = False
    found = await get(server, "/healthz")
    assert (found.status, found.json) == (200, {"status": "alive"})
    await server.stop()


async def test_nothing_else_is_served(server):
    assert (await get(server, "/")).status == 404
    assert (await request(server.port, "POST", "/metrics")).status == 405


async def test_the_port_is_closed_after_stop_and_the_daemons_signal_handlers_stay(daemon):
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, stop.set)
    before = signal.getsignal(signal.SIGTERM)
    server = HttpServer(daemon.metrics, lambda: [])
    await server.start(Tasks())
    assert signal.getsignal(signal.SIGTERM) is before
    signal.raise_signal(signal.SIGUSR1)
    await asyncio.wait_for(stop.wait(), 60)
    assert (await get(server, "/healthz")).status == 200
    await server.stop()
    await server.stop()
    loop.remove_signal_handler(signal.SIGUSR1)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), 1):
        pass


async def test_a_taken_port_is_an_error_that_names_it(server, daemon):
    second = HttpServer(daemon.metrics, lambda: [], port=server.port)
    with pytest.raises(OSError, match=rf"cannot bind HTTP to 127\.0\.0\.1:{server.port}"):
        await second.start(Tasks())


async def test_ipv6_loopback(daemon):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    server = HttpServer(daemon.metrics, lambda: [], host="::1")
    try:
        await server.start(Tasks())
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address")
    with socket.create_connection(("::1", server.port), 1):
        pass
    await server.stop()


async def test_stop_closes_connections_of_a_server_that_was_killed(daemon):
    tasks = Tasks()
    server = HttpServer(daemon.metrics, lambda: [])
    await server.start(tasks)
    async with connected(server.port) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: foretick\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        [task] = [each for each in asyncio.all_tasks() if each.get_name() == NAME]
        task.cancel()
        await asyncio.wait([task])
        await server.stop()
        assert (await asyncio.wait_for(reader.read(), 60)).endswith(b'{"status":"alive"}')
