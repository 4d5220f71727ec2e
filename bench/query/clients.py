"""Clients in processes of their own: one request after the other."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import zmq

from bench.run import timed
from daemon.api.client import QueryClient
from daemon.api.messages import Ask, AskReply, decode_reply, encode
from flash.question import PAPER_SIX

BARE = "/bare"
_QUESTION = PAPER_SIX[0]


class Ends(NamedTuple):
    """Where the daemon and the bare servers in its loop listen."""

    query: str
    echo: str
    http: int
    bare: int


def _in_turn(
    ways: Mapping[str, Callable[[], object]], seconds: float, pause_s: float
) -> dict[str, list[int]]:
    """ns of all ways in turn, ``pause_s`` apart, for so long; of a way that returns False, as "computed"."""
    seen = defaultdict[str, list[int]](list)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for name, way in ways.items():
            time.sleep(pause_s)
            reply, ns = timed(way)
            seen["computed" if reply is False else name].append(ns)
    return dict(seen)


def trips(ends: Ends, session: str, seconds: float, pipe: Connection) -> None:
    """Asks and bare requests over ZeroMQ and HTTP; sends "ready", then the ns of each, by name."""
    asked = Ask(1, session, _QUESTION.text, 1, _QUESTION.choices or ())
    members = msgspec.to_builtins(asked)
    names = ("session", "question", "max_tokens", "choices")
    payload, body = encode(asked), msgspec.json.encode({name: members[name] for name in names})
    with _dealer(ends.query) as query, _dealer(ends.echo) as echo:
        http, bare = _Http(ends.http, "/v1/ask", body), _Http(ends.bare, BARE, body)
        pipe.send("ready")
        seen = _in_turn(
            {
                "zeromq": lambda: _is_cached(_trip(query, payload)),
                "echo": lambda: _trip(echo, payload),
                "http": lambda: b'"cached":true' in http.trip(),
                "bare": bare.trip,
            },
            seconds,
            0.0003,
        )
    pipe.send(seen)


def decide(daemon: int, bare: int, body: bytes, pipe: Connection) -> None:
    """Typed questions to the daemon's port for each 0 in the pipe, the same bytes to the bare server for 1.

    Sends "ready", then the ns of each, and how many of its answers were there before it; ends at None.
    """
    ways = _Http(daemon, "/v1/systemone", body), _Http(bare, BARE, body)
    pipe.send("ready")
    while (which := pipe.recv()) is not None:
        reply, ns = timed(ways[which].trip)
        pipe.send((ns, reply.count(b'"x_cached":true')))


def decide_fresh(
    daemon: int, peer: int, path: str, bodies: Sequence[tuple[bytes, bytes, bytes]], pipe: Connection
) -> None:
    """Each pair of bodies, to the daemon and to ``path`` of the peer, first the one and then the other; then
    a third one, unless it is empty, to the peer.

    Sends "ready", then the replies to each three, with their ns.
    """
    pipe.send("ready")
    for number, (ours, theirs, further) in enumerate(bodies):
        ends = (daemon, "/v1/systemone", ours), (peer, path, theirs), (peer, path, further)
        order = (0, 1) if number % 2 == 0 else (1, 0)
        # connected in its turn: the daemon cuts a connection that sends nothing for ten seconds
        found = {which: timed(_Http(*ends[which]).trip) for which in (*order, *([2] if further else []))}
        pipe.send((found[0], found[1], found.get(2, (b"", 0))))


def ask(ends: Ends, session: str, seconds: float, pipe: Connection) -> None:
    """Ask, fetch the latest answer and echo; sends "ready", then the ns of each, by name."""
    text, choices = _QUESTION.text, _QUESTION.choices or ()
    with _dealer(ends.echo) as echo, QueryClient(ends.query) as client:
        pipe.send("ready")
        seen = _in_turn(
            {
                "hit": lambda: client.ask(session, text, 1, choices).cached,
                "latest answer": lambda: client.answers(session, _QUESTION.name),
                "echo": lambda: _trip(echo, b"echo"),
            },
            seconds,
            0.001,
        )
    pipe.send(seen)


@contextmanager
def _dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(endpoint)
        yield client


class _Http:
    """One connection of HTTP/1.1 that is kept, and a request."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def trip(self) -> bytes:
        """The body of the reply. Raises RuntimeError for another status than 200."""
        self._socket.sendall(self._request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._some()
        head, _, body = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
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


def _trip(client: zmq.Socket[bytes], payload: bytes) -> bytes:
    client.send(payload)
    return client.recv()


def _is_cached(payload: bytes) -> bool:
    reply = decode_reply(payload)
    if not isinstance(reply, AskReply):
        raise RuntimeError(f"an ask was refused: {reply}")
    return reply.cached
