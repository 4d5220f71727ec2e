"""CPU time of a daemon that waits, of the gateway and the engine process each."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.figures import Figure, Setting
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments, payloads
from bench.stream.processes import child
from bench.stream.serving import config, rest, serving
from bench.stream.sessions import TRADES, RoundSource, answers_of, bench_session
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from flash.question import PAPER_SIX

_ENGINE = b"daemon.engine.process"


@dataclass(frozen=True)
class IdlePlan:
    """``sessions``, of which one gets bars; ``window``: its bars before; ``seconds`` of each condition."""

    sessions: int = 4
    window: int = 64
    seconds: int = 20


QUICK = IdlePlan(sessions=2, window=4, seconds=2)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Two processes, the embedded model, six standing questions a session. CPU time of each process by its
    own clock, as a share of one core: first nothing arrives, then one session gets a bar a second. The
    reference is another process of the same run whose event loop (uvloop) does nothing. *CPU time a bar* is
    what the engine spends more than in the first condition, next to the time of its forward passes: passes
    use up to as many cores as the engine has threads, and threads that wait for the next one may spin.
    """
    return figures(run.sized(IdlePlan(), QUICK), run.threads)


def figures(plan: IdlePlan, threads: int) -> Iterator[Figure]:
    """Both conditions."""
    nothing, bars = uvloop.run(_measure(plan, threads))
    with child(_idle_loop, float(plan.seconds)) as pipe:
        loop: float = pipe.recv()
    setting: Setting = {"sessions": plan.sessions, "engine threads": threads}
    for condition, spent in (("nothing arrives", nothing), ("a bar a second", bars)):
        for process, cpu_s in (("gateway", spent.gateway), ("engine", spent.engine)):
            yield Figure(
                f"CPU of the {process}",
                100 * cpu_s / spent.wall,
                "% of a core",
                setting={**setting, "condition": condition},
                against="idle event loop",
                reference=100 * loop,
            )
    yield Figure(
        "CPU time a bar",
        1e3 * (bars.engine - nothing.engine * bars.wall / nothing.wall) / plan.seconds,
        "ms",
        setting={**setting, "condition": "a bar a second"},
        against="forward passes",
        reference=1e3 * bars.forward / plan.seconds,
        n=plan.seconds,
    )


class Spent(NamedTuple):
    """Seconds: of CPU by process, of forward passes, and by the clock on the wall."""

    gateway: float
    engine: float
    forward: float
    wall: float


def cpu_s(pid: int) -> float:
    """CPU time of a process, seconds, ended threads included. Raises OSError for a process that is gone."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3): the scheduler's clock of a process


def engine_of(gateway: int) -> int:
    """Process id of the engine that the process ``gateway`` started. Raises MeasurementFailed without one."""
    for task in Path(f"/proc/{gateway}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if _ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise MeasurementFailed("the engine has no process of its own")


async def _measure(plan: IdlePlan, threads: int) -> tuple[Spent, Spent]:
    markets = instruments(plan.sessions, TRADES)
    records = payloads(markets[:1], (plan.window + plan.seconds) * TRADES)
    source = RoundSource()
    sessions = (bench_session(market, plan.window) for market in markets)
    settings = config(schema.ModelConfig(threads=threads), sessions)

    async def nothing() -> None:
        await asyncio.sleep(plan.seconds)

    async def bars() -> None:
        for number in range(plan.window, plan.window + plan.seconds):
            source.round(records[number * TRADES : (number + 1) * TRADES])
            await asyncio.sleep(1.0)

    async with serving(settings, source) as gateway:
        source.round(records[: plan.window * TRADES])
        await rest(gateway)
        waiting = await _spent(gateway, nothing())
        before, due = answers_of(gateway), plan.seconds * len(PAPER_SIX)
        busy = await _spent(gateway, bars())
        if (answered := answers_of(gateway) - before) < due:
            raise MeasurementFailed(f"{answered} of {due} answers")
    return waiting, busy


async def _spent(gateway: Gateway, work: Coroutine[None, None, None]) -> Spent:
    """What ``work`` takes; the gateway is this process."""
    ours, engine = os.getpid(), engine_of(os.getpid())

    def now() -> tuple[float, float, float, float]:
        forward = gateway.store.total_seconds("foretick_stage_seconds", stage="forward")
        return cpu_s(ours), cpu_s(engine), forward, time.monotonic()

    before = now()
    await work
    return Spent(*(b - a for a, b in zip(before, now(), strict=True)))


def _idle_loop(seconds: float, pipe: Connection) -> None:
    """Sends "ready", then the share of a core that an event loop takes with nothing to do."""
    pipe.send("ready")
    before = time.process_time(), time.monotonic()
    uvloop.run(asyncio.sleep(seconds))
    pipe.send((time.process_time() - before[0]) / (time.monotonic() - before[1]))
