"""Flash hits through the query socket, with the engine idle and with the engine flooded.

Three conditions: nothing to do; the *other* sessions flooded, the asked one still; the asked session flooded
itself. In the last one an answer is seldom of the newest version, since the next update is committed before
the last one is answered, so there the latest answer (request ``answers``) is what a cache can give.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import uvloop
import zmq
import zmq.asyncio

from bench.figures import Latency, latency
from bench.flood import FloodSource
from bench.hit_client import Seen
from bench.trades import instruments, payloads
from daemon.config.schema import (
    Config,
    HttpConfig,
    ModelConfig,
    QueryConfig,
    SessionConfig,
    SinkConfig,
    SourceConfig,
)
from daemon.front.server import Front
from daemon.front.wiring import make_front
from feeds.connectors.zeromq import ZmqSinkConnector

_MARKETS = 3
_FIRST = 400
"""Records of the still session."""
_PRELOAD_S = 60.0
"""Longest wait for the first answers."""
_FILL_S = 1.0
"""How long a flood runs before it is measured: the ring is full by then."""


@dataclass(frozen=True)
class Plan:
    """``threads``: of the engine, one front each. ``batch``: records the source hands over at a time."""

    threads: tuple[int, ...] = (1, 2)
    seconds: float = 6.0
    records: int = 400_000
    batch: int = 2000


class Condition(msgspec.Struct, frozen=True):
    """One condition: what the client saw, and how busy the engine was meanwhile.

    ``hits`` and ``computed``: asks answered from the cache and by the engine, None where there were none;
    ``hit_share``: part of them that were hits. ``latest``: requests for the newest answer there is.
    ``forward_share``: part of the time spent in forward passes.
    """

    name: str
    engine_threads: int
    hits: Latency | None
    computed: Latency | None
    latest: Latency
    echo: Latency
    hit_share: float
    forward_share: float
    versions_per_second: float
    records_per_second: float


class Hits(msgspec.Struct, frozen=True):
    """All conditions."""

    batch: int
    conditions: list[Condition]


def run(plan: Plan) -> Hits:
    """Measure every condition; each engine is a process of its own."""
    still, *flooded = instruments(_MARKETS, 4)
    first, records = payloads([still], _FIRST), payloads(flooded, plan.records)
    conditions: list[Condition] = []
    for threads in plan.threads:
        conditions += uvloop.run(_measure(plan, threads, lambda: FloodSource(first, records, plan.batch)))
    return Hits(plan.batch, conditions)


def config(threads: int) -> Config:
    """The daemon as the demo configures it, answers to a ZeroMQ socket that nobody reads."""
    return Config(
        model=ModelConfig(threads=threads),
        sessions=tuple(
            SessionConfig(name=market.symbol.lower(), symbol=f"{market.venue}:{market.symbol}")
            for market in instruments(_MARKETS, 4)
        ),
        source=SourceConfig(ring_capacity=4096),
        sink=SinkConfig(zeromq=ZmqSinkConnector("tcp://127.0.0.1:*")),
        query=QueryConfig("tcp://127.0.0.1:*"),
        http=HttpConfig(port=0),
    )


async def _measure(plan: Plan, threads: int, make: Callable[[], FloodSource]) -> list[Condition]:
    source = make()
    front = make_front(config(threads), source=source)
    still, moving = (session.name for session in front.config.sessions[:2])
    try:
        await front.start()
        async with _echo() as echo:
            await _rest(front)
            measure = partial(_condition, front, source, echo, plan.seconds, threads)
            conditions = [await measure("engine idle", still)]
            source.open()
            await asyncio.sleep(_FILL_S)
            conditions.append(await measure("other sessions flooded", still))
            conditions.append(await measure("this session flooded", moving))
        if source.dry:
            raise RuntimeError(f"{plan.records} records were not enough to flood the engine throughout")
    finally:
        await front.stop()
    return conditions


async def _rest(front: Front) -> None:
    """Wait until the first records are answered and the engine has nothing left to do."""
    deadline = time.monotonic() + _PRELOAD_S
    batches = -1.0
    while batches != front.store.value("foretick_batches_total") or not batches:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not come to rest within {_PRELOAD_S:.0f} s")
        batches = front.store.value("foretick_batches_total")
        await asyncio.sleep(0.5)


async def _condition(
    front: Front, source: FloodSource, echo: str, seconds: float, threads: int, name: str, session: str
) -> Condition:
    assert front.query is not None  # configured above
    sessions = [session.name for session in front.config.sessions]

    def progress() -> tuple[float, float, float, float]:
        store = front.store
        return (
            time.monotonic(),
            store.total_seconds("foretick_stage_seconds", stage="forward"),
            sum(store.value("foretick_versions_total", session=name) for name in sessions),
            source.given,
        )

    before = progress()
    seen = await _client(front.query.endpoint, echo, session, seconds)
    wall, forward, versions, given = (b - a for a, b in zip(before, progress(), strict=True))
    return Condition(
        name,
        threads,
        latency(seen.hits) if seen.hits else None,
        latency(seen.computed) if seen.computed else None,
        latency(seen.latest),
        latency(seen.echoes),
        len(seen.hits) / (len(seen.hits) + len(seen.computed)),
        forward / wall,
        versions / wall,
        given / wall,
    )


async def _client(query: str, echo: str, session: str, seconds: float) -> Seen:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.hit_client", query, echo, session, str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with status {process.returncode}")
    return msgspec.json.decode(output, type=Seen)


@contextlib.asynccontextmanager
async def _echo() -> AsyncIterator[str]:
    """A socket of this loop that sends back what it gets; its endpoint."""
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
