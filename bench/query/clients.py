"""Clients in processes of their own: one request after the other, and as many as a server takes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import uvloop
import zmq

from bench.run import timed
from daemon.api.messages import Ask, AskReply, decode_reply, encode
from flash.question import Question

BARE = "/bare"


class Trips(NamedTuple):
    """Round trips in ns: asks answered from the cache and bare ones, over ZeroMQ and HTTP."""

    zeromq: list[int]
    echo: list[int]
    http: list[int]
    bare: list[int]


class Ends(NamedTuple):
    """Where the daemon and the bare servers in its loop listen."""

    query: str
    echo: str
    http: int
    bare: int


def trips(
    ends: Ends, session: str, question: Question, seconds: float, pause_s: float, pipe: Connection
) -> None:
    """All four in turn, ``pause_s`` apart, for so long; sends "ready", then `Trips` and the asks computed."""
    seen, computed = Trips([], [], [], []), 0
    asked = ask_of(session, question)
    with zmq.Context() as context, context.socket(zmq.DEALER) as query, context.socket(zmq.DEALER) as echo:
        for each, endpoint in ((query, ends.query), (echo, ends.echo)):
            each.linger = 0
            each.connect(endpoint)
        http, bare = Keeping(ends.http), Keeping(ends.bare)
        payload, body = encode(asked), body_of(asked)
        posted, posted_bare = post("/v1/ask", body), post(BARE, body)
        ways: list[tuple[list[int], Callable[[], bytes], Callable[[bytes], bool]]] = [
            (seen.zeromq, lambda: _trip(query, payload), _is_cached),
            (seen.echo, lambda: _trip(echo, payload), bool),
            (seen.http, lambda: http.request(posted), lambda reply: b'"cached":true' in reply),
            (seen.bare, lambda: bare.request(posted_bare), bool),
        ]
        pipe.send("ready")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for samples, way, is_cached in ways:
                time.sleep(pause_s)
                reply, ns = timed(way)
                if is_cached(reply):
                    samples.append(ns)
                else:
                    computed += 1
    pipe.send((seen, computed))


def flood_zeromq(endpoint: str, payload: bytes, requests: int, window: int, pipe: Connection) -> None:
    """``window`` requests in flight at a time; sends "ready" and, when told, the seconds they took."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(endpoint)
        _trip(client, payload)
        pipe.send("ready")
        while pipe.recv():
            started = time.monotonic()
            for _ in range(window):
                client.send(payload)
            for left in range(requests, 0, -1):
                client.recv()
                if left > window:
                    client.send(payload)
            pipe.send(time.monotonic() - started)


def flood_http(port: int, request: bytes, requests: int, connections: int, pipe: Connection) -> None:
    """The same over new connections, each with one request in flight."""
    uvloop.run(_flood_http(port, request, requests, connections, pipe))


async def _flood_http(port: int, request: bytes, requests: int, connections: int, pipe: Connection) -> None:
    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests // connections):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_length(head))
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(body.decode(errors="replace"))
        writer.close()

    pipe.send("ready")
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, pipe.recv):
        started = time.monotonic()
        await asyncio.gather(*(one() for _ in range(connections)))
        pipe.send(time.monotonic() - started)


class Keeping:
    """One connection of HTTP/1.1 that is kept."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request(self, request: bytes) -> bytes:
        """The body of the reply. Raises RuntimeError for another status than 200."""
        self._socket.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._some()
        head, _, body = received.partition(b"\r\n\r\n")
        length = _length(head)
        while len(body) < length:
            body += self._some()
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(body.decode(errors="replace"))
        return body

    def _some(self) -> bytes:
        some = self._socket.recv(1 << 16)
        if not some:
            raise RuntimeError("the server closed the connection")
        return some


def post(path: str, body: bytes, key: str = "") -> bytes:
    """A request. ``key``: of the tenant that sends it."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"x-api-key: {key}\r\n" if key else ""
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def ask_of(session: str, question: Question) -> Ask:
    """The ask for a standing question."""
    return Ask(1, session, question.text, 1, question.choices or ())


def body_of(asked: Ask) -> bytes:
    """The same over HTTP."""
    members = msgspec.to_builtins(asked)
    return msgspec.json.encode(
        {name: members[name] for name in ("session", "question", "max_tokens", "choices")}
    )


def _length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0])


def _trip(client: zmq.Socket[bytes], payload: bytes) -> bytes:
    client.send(payload)
    return client.recv()


def _is_cached(payload: bytes) -> bool:
    reply = decode_reply(payload)
    if not isinstance(reply, AskReply):
        raise RuntimeError(f"an ask was refused: {reply}")
    return reply.cached
