"""The client of the flash-hit measurement, a process of its own: asks, and times every round trip.

Run as ``python -m bench.stream.hit_client QUERY_ENDPOINT ECHO_ENDPOINT SESSION SECONDS``; prints a `Seen`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from daemon.api.client import QueryClient
from flash.questions import PAPER_SIX

PAUSE_S = 0.001
QUESTION = PAPER_SIX[0]

T = TypeVar("T")


class Seen(msgspec.Struct, frozen=True):
    """Round trips in ns: asks answered from the cache and not, requests for the latest answer, echoes."""

    hits: list[int]
    computed: list[int]
    latest: list[int]
    echoes: list[int]


def watch(query: str, echo: str, session: str, seconds: float) -> Seen:
    """Ask, fetch the latest answer and echo, in turn, for so long."""
    seen = Seen([], [], [], [])
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(echo)
    try:
        with QueryClient(query) as client:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                reply, ns = timed(lambda: client.ask(session, QUESTION.text, 1, QUESTION.choices or ()))
                (seen.hits if reply.cached else seen.computed).append(ns)
                seen.latest.append(timed(lambda: client.answers(session, QUESTION.name))[1])
                seen.echoes.append(timed(lambda: _echo(socket))[1])
    finally:
        socket.close()
        context.term()
    return seen


def timed(request: Callable[[], T]) -> tuple[T, int]:
    """The reply to a request made after a pause, and the ns it took."""
    time.sleep(PAUSE_S)
    began = time.perf_counter_ns()
    reply = request()
    return reply, time.perf_counter_ns() - began


def _echo(socket: zmq.Socket[bytes]) -> bytes:
    socket.send(b"echo")
    return socket.recv()


if __name__ == "__main__":
    query_endpoint, echo_endpoint, session_name, duration = sys.argv[1:]
    sys.stdout.buffer.write(
        msgspec.json.encode(watch(query_endpoint, echo_endpoint, session_name, float(duration)))
    )
