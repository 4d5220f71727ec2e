"""Answers from the cache, over ZeroMQ and HTTP, beside bare servers in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import uvloop
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.figures import Figure, Goal, Setting, latency
from bench.query.bare import bare_server
from bench.query.clients import BARE, Ends, trips
from bench.run import SuiteRun
from bench.stream.flood import FloodSource, instruments, payloads
from bench.stream.processes import in_child
from bench.stream.serving import config, echoing, rest, serving, session_of
from daemon.config import schema

_MARKETS = 3
_FIRST = 400
"""Records of the idle session."""
_RING = 4096
"""Records: soon full in a flood."""
_BATCH = 2000
_AT = (0.5, 0.99, 0.999)


@dataclass(frozen=True)
class CachedPlan:
    """``seconds`` of round trips in each condition, ``pause_s`` between them. ``fill_s``: of flood, until the
    ring is full.
    """

    seconds: float = 20.0
    pause_s: float = 0.0003
    fill_s: float = 1.0
    records: int = 2_500_000


_QUICK = CachedPlan(seconds=0.4, fill_s=0.1, records=120_000)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Round trips at a client in a process of its own, while the engine, in a second process, is idle or
    flooded with bars of other sessions by a source that always has more. *Cached*: a standing question's
    ready answer. The references are in the daemon's own event loop, asked in turn, with the same request: a
    ROUTER socket that echoes it, and a route that returns it.
    """
    plan = run.sized(CachedPlan(), _QUICK)
    still, *flooded = instruments(_MARKETS, 4)
    source = FloodSource(payloads([still], _FIRST), payloads(flooded, plan.records), _BATCH)
    yield from uvloop.run(_measure(plan, source))


async def _measure(plan: CachedPlan, source: FloodSource) -> list[Figure]:
    settings = config(schema.ModelConfig(threads=1), map(session_of, instruments(_MARKETS, 4)))
    settings = replace(settings, source=schema.SourceConfig(ring_capacity=_RING))
    route = Route(BARE, _returned, methods=["POST"])
    async with serving(settings, source) as gateway, echoing() as echo, bare_server(route) as bare:
        await rest(gateway)
        assert gateway.query is not None  # configured
        ends = Ends(gateway.query.endpoint, echo, gateway.http.port, bare)
        arguments = trips, ends, settings.sessions[0].name, plan.seconds, plan.pause_s
        seen = partial(asyncio.to_thread, in_child, *arguments)
        found = _figures("engine idle", await seen())
        source.open()
        await asyncio.sleep(plan.fill_s)
        found += _figures("other sessions flooded", await seen())
        if source.dry:
            raise RuntimeError(f"{plan.records} records were not enough to flood the engine throughout")
    return found


async def _returned(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def _figures(condition: str, seen: Mapping[str, list[int]]) -> list[Figure]:
    goals = {0.99: Goal(1.5)}
    found: list[Figure] = []
    for name, against, reference in (
        ("ZeroMQ", "bare pyzmq echo", "echo"),
        ("HTTP", "bare Starlette route", "bare"),
    ):
        setting: Setting = {"over": name, "condition": condition}
        ours, other = seen[name.lower()], seen[reference]
        found += latency("cached", ours, setting, "", against, other, at=_AT, paired=False, goals=goals)
    computed = len(seen.get("computed", ()))
    return [*found, Figure("computed", computed, "asks", setting={"condition": condition})]
