"""A daemon on synthetic markets: the engine in a process of its own, answers to a socket without readers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable

import zmq
import zmq.asyncio

from bench.run import MeasurementFailed
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connectors.zeromq import ZmqSinkConnector
from feeds.durations import Duration
from feeds.source import Source
from feeds.synthetic import Instrument

_LOOK_S, _STILL = 0.1, 10
_REST_S = 120.0
"""Longest wait for the first answers."""


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


@contextlib.asynccontextmanager
async def serving(settings: schema.Config, source: Source) -> AsyncIterator[Gateway]:
    """The front of a running daemon."""
    gateway = make_gateway(settings, source=source)
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
