"""What snapshots cost the questions that are asked meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory

import uvloop
from msgspec.structs import replace

from bench.data.ticks import LiveSource
from bench.figures import Figure, Goal, Setting, latency
from bench.run import MeasurementFailed, SuiteRun, timed
from bench.stream.flood import instruments
from bench.stream.processes import child
from bench.stream.serving import config, rest, serving
from bench.stream.sessions import bench_session
from daemon.api.client import QueryClient
from daemon.config import schema
from feeds.durations import Duration

_S = 1_000_000_000
QUESTION = "volatility"
"""Not a standing one, so its answer is computed."""


@dataclass(frozen=True)
class SnapshotsPlan:
    """``rate``: ticks a second of all sessions. ``seconds``: of each turn."""

    sessions: tuple[int, ...] = (1, 10)
    window: int = 128
    rate: int = 1000
    seconds: float = 15.0
    turns: int = 2
    pause_s: float = 0.01


QUICK = SnapshotsPlan(sessions=(1,), window=4, seconds=2.0, turns=1)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model on live ticks, bars of a second, six standing questions a
    session. A client asks one session after the other a question that is computed, every 10 ms. Every session
    is written to a snapshot once a second, which is sixty times as often as by default; the reference writes
    none. Both take turns.
    """
    plan = run.sized(SnapshotsPlan(), QUICK)
    for sessions in plan.sessions:
        yield from figures(plan, sessions, run.threads)


def figures(plan: SnapshotsPlan, sessions: int, threads: int) -> Iterator[Figure]:
    """Of one number of sessions."""
    took: dict[bool, list[int]] = {True: [], False: []}
    written = 0.0
    for turn in range(plan.turns):
        for snapshots in (False, True)[:: -1 if turn % 2 else 1]:
            found, count = uvloop.run(_measure(plan, sessions, threads, snapshots=snapshots))
            took[snapshots] += found
            written += count
    setting: Setting = {"sessions": sessions, "bars in a window": plan.window}
    yield from latency(
        "question while snapshots are written", took[True], setting,
        against="none written", reference_ns=took[False], paired=False, goals={0.99: Goal(1.2)},
    )  # fmt: skip
    yield Figure("snapshots a second", written / (plan.turns * plan.seconds), setting=setting)


async def _measure(
    plan: SnapshotsPlan, sessions: int, threads: int, *, snapshots: bool
) -> tuple[list[int], float]:
    """ns of each question, and the snapshots written meanwhile."""
    markets = instruments(sessions, 1)
    source = LiveSource(markets, plan.rate, plan.window)
    with TemporaryDirectory() as folder:
        settings = replace(
            config(
                schema.ModelConfig(threads=threads),
                [bench_session(market, plan.window) for market in markets],
            ),
            recovery=schema.RecoveryConfig(Duration(_S) if snapshots else schema.OFF, folder),
        )
        async with serving(settings, source) as gateway:
            assert gateway.query is not None  # configured by `bench.stream.serving`
            await rest(gateway)
            source.live()
            await asyncio.sleep(2.0)

            def written() -> float:
                return sum(
                    gateway.store.value("foretick_snapshots_written_total", session=each.name)
                    for each in settings.sessions
                )

            before = written()
            names = [each.name for each in settings.sessions]
            took = await asyncio.to_thread(_asked, gateway.query.endpoint, names, plan.seconds, plan.pause_s)
            count = written() - before
    if not took or (snapshots and not count):
        raise MeasurementFailed("no question was answered, or no snapshot was written")
    return took, count


def _asked(*arguments: object) -> list[int]:
    with child(_ask, *arguments) as pipe:
        took: list[int] = pipe.recv()
        return took


def _ask(endpoint: str, sessions: list[str], seconds: float, pause_s: float, pipe: Connection) -> None:
    """Ask one session after the other for so long; sends "ready", then the ns of each question."""
    took = list[int]()
    with QueryClient(endpoint) as client:
        pipe.send("ready")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            session = sessions[len(took) % len(sessions)]
            took.append(timed(client.ask, session, QUESTION, 1)[1])
            time.sleep(pause_s)
    pipe.send(took)
