"""Flash hits through the query socket, with the engine idle and with the engine flooded.

Three conditions: no load; the *other* sessions flooded and the asked one idle; the asked session flooded. In
the last one the next update is committed before the last one is answered, so an answer is seldom of the
newest version: a hit is the newest ready one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import uvloop
import zmq
from msgspec.structs import replace

from bench.figures import Figure, Goal, Setting, latency
from bench.query.clients import in_turn
from bench.run import SuiteRun
from bench.stream.flood import FloodSource, instruments, payloads
from bench.stream.processes import in_child
from bench.stream.serving import config, echoing, rest, serving, session_of, total
from daemon.api.client import QueryClient
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from flash.question import PAPER_SIX

_MARKETS = 3
_FIRST = 400
"""Records of the idle session."""
_RING = 4096
"""Records: soon full in a flood."""
_PAUSE_S = 0.001


@dataclass(frozen=True)
class HitsPlan:
    """``threads``: of the engine, one gateway per number. ``batch``: records the source yields at a time.
    ``fill_s``: seconds of flood before measuring, so that the ring is full.
    """

    threads: tuple[int, ...] = (1, 2)
    seconds: float = 6.0
    fill_s: float = 1.0
    records: int = 1_200_000
    batch: int = 2000


_QUICK = HitsPlan(threads=(1,), seconds=0.5, fill_s=0.1, records=120_000)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Round trips at a client in a process of its own, one millisecond apart, while the engine, in a
    second process, is idle or flooded by a source that always has more. *Hit*: a reply that says
    `cached`; *latest*: a request for the newest answer there is. The reference is a bare ZeroMQ echo in
    the gateway's own event loop, asked in turn. The client waits for each reply, so the counts of hits and
    of computed asks are not the shares that a client would see that asks at random times.
    """
    plan = run.sized(HitsPlan(), _QUICK)
    still, *flooded = instruments(_MARKETS, 4)
    first, records = payloads([still], _FIRST), payloads(flooded, plan.records)
    for threads in plan.threads:
        yield from uvloop.run(_measure(plan, threads, FloodSource(first, records, plan.batch)))


async def _measure(plan: HitsPlan, threads: int, source: FloodSource) -> list[Figure]:
    settings = config(schema.ModelConfig(threads=threads), map(session_of, instruments(_MARKETS, 4)))
    settings = replace(settings, source=schema.SourceConfig(ring_capacity=_RING))
    still, moving = (each.name for each in settings.sessions[:2])
    async with serving(settings, source) as gateway, echoing() as echo:
        await rest(gateway)
        measure = partial(_condition, gateway, source, echo, plan, threads)
        found = await measure("engine idle", still)
        source.open()
        await asyncio.sleep(plan.fill_s)
        found += await measure("other sessions flooded", still)
        found += await measure("this session flooded", moving)
        if source.dry:
            raise RuntimeError(f"{plan.records} records were not enough to flood the engine throughout")
    return found


async def _condition(
    gateway: Gateway,
    source: FloodSource,
    echo: str,
    plan: HitsPlan,
    threads: int,
    condition: str,
    session: str,
) -> list[Figure]:
    assert gateway.query is not None  # configured above

    def progress() -> tuple[float, float, float, float]:
        forward = gateway.store.total_seconds("foretick_stage_seconds", stage="forward")
        return time.monotonic(), forward, total(gateway, "foretick_versions_total"), source.given

    before = progress()
    seen = await asyncio.to_thread(in_child, _ask, gateway.query.endpoint, echo, session, plan.seconds)
    wall, forward, versions, given = (b - a for a, b in zip(before, progress(), strict=True))
    setting: Setting = {"records at a time": plan.batch, "condition": condition, "engine threads": threads}
    goals = {0.99: Goal(1.0, of="ours")} if threads == 1 else {}  # one core for the gateway
    hits, computed = seen.get("hit", []), seen.get("computed", [])
    next_to_echo = partial(latency, against="bare echo", reference_ns=seen["echo"], paired=False)
    figure = partial(Figure, setting=setting)
    return [
        *(next_to_echo("hit", hits, setting, goals=goals) if hits else ()),
        *next_to_echo("latest answer", seen["latest answer"], setting),
        *(latency("computed ask", computed, setting) if computed else ()),
        figure("hits", len(hits)),
        figure("computed asks", len(computed)),
        figure("time in forward passes", forward / wall, "share"),
        figure("versions a second", versions / wall),
        figure("records a second", given / wall),
    ]


def _ask(query: str, echo: str, session: str, seconds: float, pipe: Connection) -> None:
    """Ask, fetch the latest answer and echo; sends "ready", then the ns of each, by name."""
    question = PAPER_SIX[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket, QueryClient(query) as client:
        socket.linger = 0
        socket.connect(echo)
        pipe.send("ready")
        seen = in_turn(
            {
                "hit": lambda: client.ask(session, question.text, 1, question.choices or ()).cached,
                "latest answer": lambda: client.answers(session, question.name),
                "echo": lambda: (socket.send(b"echo"), socket.recv()),
            },
            seconds,
            _PAUSE_S,
        )
    pipe.send(seen)
