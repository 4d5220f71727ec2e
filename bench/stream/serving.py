"""A daemon on synthetic markets: the engine in a process of its own, answers to a socket without readers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from msgspec.structs import replace

from bench.run import MeasurementFailed
from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, ClientRequest, QueryError, Reply
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.connectors.zeromq import ZmqSinkConnector
from feeds.durations import Duration
from feeds.source import Source
from feeds.synthetic import Instrument

_LOOK_S, _STILL = 0.1, 10
_REST_S = 120.0
"""Longest wait for the first answers."""
_AGAIN_S = 0.01
_PATIENCE_S = 1.0
"""A request to a process that is gone is given up after this time."""


def config(model: schema.ModelConfig, sessions: Iterable[schema.SessionConfig]) -> schema.Config:
    """The demo's settings otherwise, on free ports. A flood need not be answered to its end.

    Nothing is kept for a restart, and none is prepared for.
    """
    return schema.Config(
        model=model,
        sessions=tuple(sessions),
        sink=schema.SinkConfig(zeromq=ZmqSinkConnector("tcp://127.0.0.1:*")),
        query=schema.QueryConfig("tcp://127.0.0.1:*"),
        http=schema.HttpConfig(port=0),
        process=schema.ProcessConfig(drain=Duration(1_000_000_000), spare_engine=False),
        recovery=schema.RecoveryConfig(interval=schema.OFF),
    )


def session_of(market: Instrument) -> schema.SessionConfig:
    """A session of one market."""
    return schema.SessionConfig(name=market.symbol.lower(), symbol=market.key)


def windowed(market: Instrument, window: int) -> schema.SessionConfig:
    """A session with a window in bars, whatever a bar's tokens."""
    return replace(
        session_of(market), retention_tokens=2048, retention_records=window, divergence_every=schema.OFF
    )


@contextlib.asynccontextmanager
async def serving(
    settings: schema.Config,
    source: Source | None = None,
    routes: Sequence[SinkRoute] | None = None,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """The gateway of a running daemon. All but ``settings`` goes to `make_gateway`."""
    gateway = make_gateway(settings, source=source, routes=routes, **options)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """A bare ROUTER socket of this loop that echoes its input; its endpoint."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind("tcp://127.0.0.1:*")

    async def serve() -> None:
        while True:
            await socket.send_multipart(await socket.recv_multipart())

    task = asyncio.create_task(serve())
    try:
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.close()
        context.term()


async def rest(gateway: Gateway) -> None:
    """Wait until the first records are answered and the engine has been idle for a second.

    Raises MeasurementFailed when it is not in time.
    """
    deadline = time.monotonic() + _REST_S
    still, before = 0, 0.0
    while still < _STILL:
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"the engine was not idle within {_REST_S:.0f} s")
        batches = gateway.store.value("foretick_batches_total")
        still = still + 1 if batches == before > 0 else 0
        before = batches
        await asyncio.sleep(_LOOK_S)


def total(gateway: Gateway, counter: str) -> float:
    """A counter by session, summed over all sessions."""
    return sum(gateway.store.value(counter, session=each.name) for each in gateway.config.sessions)


async def all_live(endpoint: str, sessions: Sequence[str], since: int) -> None:
    """Wait until every session has an answer read from a trade made after ``since``, ns."""

    def is_live(reply: Reply) -> bool:
        found = reply.answers if isinstance(reply, AnswersReply) else ()
        return any(answer.as_of >= since for answer in found)

    for name in sessions:
        await until(endpoint, Answers(0, name), is_live)


async def until(endpoint: str, request: ClientRequest, done: Callable[[Reply], bool]) -> None:
    """Repeat a request until it is ``done``. A daemon that is started again is another connection."""
    is_done = False
    while not is_done:
        with contextlib.suppress(QueryError):
            async with AsyncQueryClient(endpoint, _PATIENCE_S) as client:
                # the daemon does not tell when an answer would be another
                while not (is_done := done(await client.request(request))):  # noqa: ASYNC110
                    await asyncio.sleep(_AGAIN_S)
