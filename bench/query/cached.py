"""Answers from the cache, over ZeroMQ and HTTP, beside bare servers in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import uvloop
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.figures import Figure, Goal, Setting, latency
from bench.query.bare import bare_server
from bench.query.clients import BARE, Ends, Trips, ask_of, body_of, flood_http, flood_zeromq, post, trips
from bench.run import SuiteRun
from bench.stream.flood import FloodSource, instruments, payloads
from bench.stream.processes import child
from bench.stream.serving import config, echoing, rest, serving, session_of
from daemon.api.messages import encode
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from flash.question import PAPER_SIX

_MARKETS = 3
_FIRST = 400
"""Records of the idle session."""
_RING = 4096
"""Records: soon full in a flood."""
_BATCH = 2000
_QUESTION = PAPER_SIX[0]
_AT = (0.5, 0.99, 0.999)
_ECHO, _ROUTE = "bare pyzmq echo", "bare Starlette route"


async def _returned(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


@dataclass(frozen=True)
class CachedPlan:
    """``seconds`` of round trips in each condition, ``pause_s`` between them; ``rounds`` of ``requests``
    requests by each server, with ``window`` of them in flight. ``fill_s``: of flood, until the ring is full.
    """

    seconds: float = 20.0
    pause_s: float = 0.0003
    fill_s: float = 1.0
    records: int = 2_500_000
    rounds: int = 7
    requests: int = 6400
    window: int = 32


QUICK = CachedPlan(seconds=0.4, fill_s=0.1, records=120_000, rounds=2, requests=320)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Round trips at a client in a process of its own, while the engine, in a second process, is idle or
    flooded with bars of other sessions by a source that always has more. *Cached*: a standing question's
    ready answer. The references are in the daemon's own event loop, asked in turn, with the same request: a
    ROUTER socket that echoes it, and a route that returns it.
    """
    plan = run.sized(CachedPlan(), QUICK)
    still, *flooded = instruments(_MARKETS, 4)
    source = FloodSource(payloads([still], _FIRST), payloads(flooded, plan.records), _BATCH)
    yield from uvloop.run(_round_trips(plan, source))


def rates(run: SuiteRun) -> Iterator[Figure]:
    """Requests for a cached answer, divided by the CPU time that the serving process spent on them, all its
    threads together; many are in flight at a time, from a client in a process of its own. The references are
    servers in the same event loop, in turn with the daemon's own.
    """
    plan = run.sized(CachedPlan(), QUICK)
    (still,) = instruments(1, 4)
    yield from uvloop.run(_rates(plan, FloodSource(payloads([still], _FIRST), [], _BATCH)))


@contextlib.asynccontextmanager
async def _daemon(source: FloodSource, markets: int) -> AsyncIterator[tuple[Gateway, Ends, str]]:
    """A daemon with an answer in its cache, bare servers in its loop, and the session's name."""
    settings = config(schema.ModelConfig(threads=1), map(session_of, instruments(markets, 4)))
    settings = replace(settings, source=schema.SourceConfig(ring_capacity=_RING))
    route = Route(BARE, _returned, methods=["POST"])
    async with serving(settings, source) as gateway, echoing() as echo, bare_server(route) as bare:
        await rest(gateway)
        assert gateway.query is not None  # configured
        yield gateway, Ends(gateway.query.endpoint, echo, gateway.http.port, bare), settings.sessions[0].name


async def _round_trips(plan: CachedPlan, source: FloodSource) -> list[Figure]:
    async with _daemon(source, _MARKETS) as (_, ends, session):
        seen = partial(_in_child, trips, ends, session, _QUESTION, plan.seconds, plan.pause_s)
        found = _trip_figures("engine idle", *await asyncio.to_thread(seen))
        source.open()
        await asyncio.sleep(plan.fill_s)
        found += _trip_figures("other sessions flooded", *await asyncio.to_thread(seen))
        if source.dry:
            raise RuntimeError(f"{plan.records} records were not enough to flood the engine throughout")
    return found


def _trip_figures(condition: str, seen: Trips, computed: int) -> list[Figure]:
    goals = {0.99: Goal(1.5)}
    found: list[Figure] = []
    for name, ours, against, reference in (
        ("ZeroMQ", seen.zeromq, _ECHO, seen.echo),
        ("HTTP", seen.http, _ROUTE, seen.bare),
    ):
        setting: Setting = {"over": name, "condition": condition}
        found += latency("cached", ours, setting, "", against, reference, at=_AT, paired=False, goals=goals)
    return [*found, Figure("computed", computed, "asks", setting={"condition": condition})]


async def _rates(plan: CachedPlan, source: FloodSource) -> list[Figure]:
    async with _daemon(source, 1) as (_, ends, session):
        asked = ask_of(session, _QUESTION)
        payload, body = encode(asked), body_of(asked)
        sizes = (plan.requests, plan.window)
        found = []
        for over, ours, against, reference in (
            ("ZeroMQ", partial(child, flood_zeromq, ends.query, payload, *sizes),
             _ECHO, partial(child, flood_zeromq, ends.echo, payload, *sizes)),
            ("HTTP", partial(child, flood_http, ends.http, post("/v1/ask", body), *sizes),
             _ROUTE, partial(child, flood_http, ends.bare, post(BARE, body), *sizes)),
        ):  # fmt: skip
            mine, other = await asyncio.to_thread(_in_turn, plan, ours, reference)
            found.append(
                Figure(
                    "cached answers", float(np.median(mine)), "a CPU second", setting={"over": over},
                    against=against, reference=float(np.median(other)), goal=Goal(0.5, "at least"),
                    paired=float(np.median(np.divide(mine, other))), n=len(mine),
                    low=min(mine), high=max(mine), samples=mine,
                )
            )  # fmt: skip
    return found


def _in_turn(
    plan: CachedPlan, *clients: Callable[[], contextlib.AbstractContextManager[object]]
) -> list[list[float]]:
    """Requests a CPU second of this process, by client and round."""
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(each()) for each in clients]
        found: list[list[float]] = [[] for _ in pipes]
        for round_ in range(plan.rounds + 1):
            for pipe, rates_ in zip(pipes, found, strict=True):
                before = time.process_time()
                pipe.send(True)  # type: ignore[attr-defined]  # a Connection
                pipe.recv()  # type: ignore[attr-defined]  # a Connection
                if round_:  # the first one warms up
                    rates_.append(plan.requests / (time.process_time() - before))
        for pipe in pipes:
            pipe.send(False)  # type: ignore[attr-defined]  # a Connection
    return found


def _in_child(*arguments: object) -> tuple[Trips, int]:
    work, *rest_ = arguments
    with child(work, *rest_) as pipe:  # type: ignore[arg-type]  # a function
        seen: tuple[Trips, int] = pipe.recv()
        return seen
