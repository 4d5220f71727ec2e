"""The client of the flash-hit measurement, in its own process: asks, and times every round trip."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import zmq

from bench.run import timed
from daemon.api.client import QueryClient
from flash.questions import PAPER_SIX

_PAUSE_S = 0.001
_QUESTION = PAPER_SIX[0]

T = TypeVar("T")


class HitSamples(NamedTuple):
    """Round trips in ns: asks answered from the cache and not, requests for the latest answer, echoes."""

    hits: list[int]
    computed: list[int]
    latest: list[int]
    echoes: list[int]


def watch(query: str, echo: str, session: str, seconds: float, pipe: Connection) -> None:
    """Ask, fetch the latest answer and echo, in turn, for so long; sends "ready", then `HitSamples`."""
    seen = HitSamples([], [], [], [])
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(echo)

    def echoed() -> bytes:
        socket.send(b"echo")
        return socket.recv()

    try:
        with QueryClient(query) as client:
            pipe.send("ready")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                reply, ns = _timed(lambda: client.ask(session, _QUESTION.text, 1, _QUESTION.choices or ()))
                (seen.hits if reply.cached else seen.computed).append(ns)
                seen.latest.append(_timed(lambda: client.answers(session, _QUESTION.name))[1])
                seen.echoes.append(_timed(echoed)[1])
    finally:
        socket.close()
        context.term()
    pipe.send(seen)


def _timed(request: Callable[[], T]) -> tuple[T, int]:
    """The reply to a request made after a pause, and the ns it took."""
    time.sleep(_PAUSE_S)
    return timed(request)
