"""Answers from the cache, beside bare servers in the same event loop, with the engine idle and flooded."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import uvloop
from msgspec.structs import replace

from bench.figures import Figure, Goal, Setting, latency
from bench.query.bare import bare_server, returning
from bench.query.clients import BARE, Ends, ask, trips
from bench.run import SuiteRun
from bench.stream.flood import FloodSource, Records, instruments, payloads
from bench.stream.processes import in_child
from bench.stream.serving import config, echoing, rest, serving, session_of
from daemon.config import schema

_MARKETS = instruments(3, 4)
_FLOODED = _MARKETS[1:]
_FIRST = 400
"""Records of the idle session."""
_RING = 4096
"""Records: soon full in a flood."""
_BATCH = 2000
_AT = (0.5, 0.99, 0.999)
_CONDITIONS = {"engine idle": 0, "other sessions flooded": 0, "this session flooded": 1}
"""And the market whose session is asked. In the last one the next update is committed before the last one is
answered, so an answer is seldom of the newest version: a hit is the newest ready one."""

Client = Callable[[Ends, str, float, Connection], None]


@dataclass(frozen=True)
class CachedPlan:
    """``seconds`` of round trips in each condition; ``records`` are enough for all.

    ``fill_s``: of flood, until the ring is full. ``threads``: of the engine, one daemon for each number.
    """

    seconds: float
    records: int
    fill_s: float = 1.0
    threads: tuple[int, ...] = (1,)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Round trips at a client in a process of its own, while the engine, in a second process, is idle or
    flooded with bars of other sessions by a source that always has more. *Cached*: a standing question's
    ready answer. The references are in the daemon's own event loop, asked in turn, with the same request: a
    ROUTER socket that echoes it, and a route that returns it.
    """
    plan = run.sized(CachedPlan(20.0, 2_500_000), CachedPlan(0.4, 120_000, 0.1))
    goals = {0.99: Goal(1.5)}
    for condition, seen in uvloop.run(
        _seen(plan, 1, payloads(_FLOODED, plan.records), trips, list(_CONDITIONS)[:2])
    ).items():
        for name, against, reference in (
            ("ZeroMQ", "bare pyzmq echo", "echo"),
            ("HTTP", "bare Starlette route", "bare"),
        ):
            setting: Setting = {"over": name, "condition": condition}
            ours, other = seen[name.lower()], seen[reference]
            yield from latency("cached", ours, setting, "", against, other, at=_AT, paired=False, goals=goals)
        computed = len(seen.get("computed", ()))
        yield Figure("computed", computed, "asks", setting={"condition": condition})


def hits(run: SuiteRun) -> Iterator[Figure]:
    """Round trips at a client in a process of its own, one millisecond apart, while the engine, in a
    second process, is idle or flooded by a source that always has more. *Hit*: a reply that says
    `cached`; *latest*: a request for the newest answer there is. The reference is a bare ZeroMQ echo in
    the gateway's own event loop, asked in turn. The client waits for each reply, so the counts of hits and
    of computed asks are not the shares that a client would see that asks at random times.
    """
    plan = run.sized(CachedPlan(6.0, 1_200_000, threads=(1, 2)), CachedPlan(0.5, 120_000, 0.1))
    flood = payloads(_FLOODED, plan.records)
    for threads in plan.threads:
        for condition, seen in uvloop.run(_seen(plan, threads, flood, ask, list(_CONDITIONS))).items():
            setting: Setting = {"condition": condition, "engine threads": threads}
            goals = {0.99: Goal(1.5)} if threads == 1 else {}  # one core for the gateway
            found, computed = seen.get("hit", []), seen.get("computed", [])
            beside = partial(latency, against="bare echo", reference_ns=seen["echo"], paired=False)
            yield from beside("hit", found, setting, goals=goals) if found else ()
            yield from beside("latest answer", seen["latest answer"], setting)
            yield from latency("computed ask", computed, setting) if computed else ()
            for name, ns in (("hits", found), ("computed asks", computed)):
                yield Figure(name, len(ns), setting=setting)


async def _seen(
    plan: CachedPlan, threads: int, flood: Records, client: Client, conditions: Sequence[str]
) -> dict[str, Mapping[str, list[int]]]:
    """ns by condition and name; the first condition is without a flood."""
    source = FloodSource(payloads(_MARKETS[:1], _FIRST), flood, _BATCH)
    settings = config(schema.ModelConfig(threads=threads), map(session_of, _MARKETS))
    settings = replace(settings, source=schema.SourceConfig(ring_capacity=_RING))
    route = returning(BARE)
    found: dict[str, Mapping[str, list[int]]] = {}
    async with serving(settings, source) as gateway, echoing() as echo, bare_server(route) as bare:
        await rest(gateway)
        assert gateway.query is not None  # configured
        ends = Ends(gateway.query.endpoint, echo, gateway.http.port, bare)
        for number, condition in enumerate(conditions):
            if number:
                source.open()
                await asyncio.sleep(plan.fill_s)
            session = settings.sessions[_CONDITIONS[condition]].name
            found[condition] = await asyncio.to_thread(in_child, client, ends, session, plan.seconds)
        if source.dry:
            raise RuntimeError(f"{plan.records} records were not enough to flood the engine throughout")
    return found
