"""From the engine's end to answers again: with a spare engine or without, from snapshots or the log alone."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import uvloop
from msgspec.structs import replace

from bench.data.broker import TOPIC, trading
from bench.figures import Figure, Goal, Setting
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import all_live, config, serving, session_of, until
from daemon.api.messages import Ask, AskReply, Reply
from daemon.config import schema
from daemon.gateway.engine_manager import RESTART_AFTER_S
from daemon.gateway.engine_processes import EngineProcesses
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.durations import Duration

_QUESTION = "volatility"
"""Not a standing one, so its answer is computed."""
_NAMES = ("first answer to a client", "answer from the whole window", "live answers of every session")
_GOAL = Goal(2.0, of="ours")


@dataclass(frozen=True)
class RestartPlan:
    """``bars``: of one second in each window. ``rounds``: of the row with a goal, and ``repeats`` of the
    others. ``spare_s``: until a spare engine is ready.
    """

    markets: int = 4
    bars: int = 64
    rounds: int = 10
    repeats: int = 3
    spare_s: float = 15.0
    longest_s: float = 120.0


_QUICK = RestartPlan(markets=1, bars=4, rounds=1, repeats=1, spare_s=8.0)


class Took(NamedTuple):
    """Seconds to the first answer, to the first one from a whole window, and to live answers of all."""

    first: float
    whole: float
    live: float


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model reads live trades from the embedded broker, four sessions
    with full windows and six questions each. Its engine is killed (`kill -9`). The time runs from there to
    the first answer to a client that asks again and again, to the first one that no bar is read again for any
    more (without the flag `warm_up`), and to the moment when every session has an answer read from a trade
    made since, for which a bar of a second must begin and end. Snapshots are written to a disk once a
    second, or not at all. The reference starts a new process and reads the windows again.
    """
    plan = run.sized(RestartPlan(), _QUICK)
    slow = uvloop.run(_measure(plan, run.threads, plan.repeats, spare=False, snapshots=False))
    for spare, snapshots in ((False, True), (True, False), (True, True)):
        goal, rounds = (_GOAL, plan.rounds) if spare and snapshots else (None, plan.repeats)
        found = uvloop.run(_measure(plan, run.threads, rounds, spare=spare, snapshots=snapshots))
        setting: Setting = {"sessions": plan.markets, "bars in a window": plan.bars}
        setting |= {"spare": "yes" if spare else "no", "snapshots": "yes" if snapshots else "no"}
        yield from figures_of(found, slow, setting, goal)


def figures_of(
    took: Sequence[Took], reference: Sequence[Took], setting: Setting, goal: Goal | None
) -> Iterator[Figure]:
    """Medians beside those of the reference, with the slowest and the fastest; a goal for the first."""
    for name, ours, theirs in zip(_NAMES, zip(*took, strict=True), zip(*reference, strict=True), strict=True):
        yield Figure(
            name, median(ours), "s", setting=setting, against="without either", reference=median(theirs),
            goal=goal if name == _NAMES[0] else None, n=len(ours), low=max(ours), high=min(ours),
            samples=list(ours),
        )  # fmt: skip


async def _measure(
    plan: RestartPlan, threads: int, rounds: int, *, spare: bool, snapshots: bool
) -> list[Took]:
    """Of each kill."""
    markets = instruments(plan.markets, plan.bars)
    sessions = [replace(session_of(market), retention_records=plan.bars) for market in markets]
    names = [session.name for session in sessions]
    settings = config(schema.ModelConfig(threads=threads), sessions)
    with TemporaryDirectory(prefix="foretick-bench-", dir="/var/tmp") as folder:
        async with trading(markets, plan.bars) as (bootstrap, began):
            kafka = KafkaSourceConnector(bootstrap, (TOPIC,))
            settings = replace(
                settings,
                process=replace(settings.process, spare_engine=spare),
                recovery=schema.RecoveryConfig(Duration(10**9) if snapshots else schema.OFF, folder),
                source=schema.SourceConfig(kind="kafka", backlog_policy="wait", kafka=kafka),
            )
            # every kill as the first one: engines that live for less than a minute wait longer
            pauses = RESTART_AFTER_S[:1]
            processes = EngineProcesses(settings, None, after_s=0.0)
            async with serving(settings, processes=processes, restart_after_s=pauses) as gateway:
                assert gateway.query is not None  # configured by `bench.stream.serving`
                found = list[Took]()
                try:
                    async with asyncio.timeout(plan.longest_s):
                        await all_live(gateway.query.endpoint, names, began)
                    for _ in range(rounds):
                        await asyncio.sleep(plan.spare_s)
                        since = time.time_ns()
                        os.kill(_engine(), signal.SIGKILL)
                        async with asyncio.timeout(plan.longest_s):
                            found.append(await _back(gateway.query.endpoint, names, since))
                except TimeoutError:
                    raise MeasurementFailed(f"no live answers within {plan.longest_s:.0f} s") from None
    return found


async def _back(endpoint: str, sessions: Sequence[str], since: int) -> Took:
    """Ask until all is back that ended at ``since``, wall clock, ns. Bound it by a timeout."""
    first = 0

    def is_whole(reply: Reply) -> bool:
        nonlocal first
        if not isinstance(reply, AskReply):
            return False
        first = first or time.time_ns()
        return "warm_up" not in reply.flags

    async def timed_whole() -> int:
        await until(endpoint, Ask(0, sessions[0], _QUESTION, 1), is_whole)
        return time.time_ns()

    async with asyncio.TaskGroup() as group:
        whole = group.create_task(timed_whole())
        group.create_task(all_live(endpoint, sessions, since))
    return Took(*((at - since) / 1e9 for at in (first, whole.result(), time.time_ns())))


def _engine() -> int:
    """Process id of this gateway's engine: the oldest process that it has started, or its fork."""
    tasks = Path("/proc/self/task").iterdir()
    children = [Path("/proc", child) for task in tasks for child in (task / "children").read_text().split()]
    engines = [child for child in children if "daemon.engine.process" in (child / "cmdline").read_text()]
    # by the time when it was started, in clock ticks since boot (proc(5))
    engine = min(engines, key=lambda it: int((it / "stat").read_text().rpartition(")")[2].split()[19]))
    forks = (engine / "task" / engine.name / "children").read_text().split()
    return int(forks[0] if forks else engine.name)
