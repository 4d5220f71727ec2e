"""From the end of an engine, a gateway or a whole daemon to answers again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import uvloop

from bench.data.broker import TOPIC, trading
from bench.figures import Figure, Goal, Setting
from bench.recovery.daemon import Daemon
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import all_live, until
from daemon.api.messages import Ask, AskReply, Reply
from feeds.synthetic import Instrument

_QUESTION = "volatility"
"""Not a standing one, so its answer is computed."""
Kept = Literal["on disk", "in memory", "none"]
"""Where snapshots are; with none the log alone is read again."""
_PLACES: dict[Kept, str] = {"none": "/var/tmp", "in memory": "/dev/shm", "on disk": "/var/tmp"}
End = Literal["engine killed", "gateway killed", "both killed", "stopped"]
_ENDS: tuple[End, ...] = ("engine killed", "gateway killed", "both killed", "stopped")
_NAMES = ("first answer to a client", "answer from the whole window", "live answers of every session")


@dataclass(frozen=True)
class RestartPlan:
    """``bars``: of one second in each window. ``rounds``: of the row with a goal, and ``repeats`` of the
    others. ``session_s``: the group's session timeout. ``spare_s``: until a spare engine is ready.
    """

    markets: int = 4
    bars: int = 64
    rounds: int = 10
    repeats: int = 3
    session_s: int = 6
    settle_s: float = 4.0
    spare_s: float = 25.0
    longest_s: float = 180.0


_QUICK = RestartPlan(markets=1, bars=4, rounds=1, repeats=1, settle_s=2.0, spare_s=18.0)


class Took(NamedTuple):
    """Seconds to the first answer, to the first one from a whole window, and to live answers of all."""

    first: float
    whole: float
    live: float


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model reads live trades from the embedded broker, four sessions
    with full windows and six questions each. Its engine is killed (`kill -9`), its gateway, or both at once,
    or the daemon is stopped (SIGTERM). It is started again at that moment, or once it has stopped; an engine
    is replaced by the daemon, with a spare one or without. The time runs from the signal to the first answer
    to a client that asks again and again, to the first one that no bar is read again for any more (without
    the flag `warm_up`), and to the moment when every session has an answer read from a trade made since, for
    which a bar of a second must begin and end. Snapshots, once a second, are on a disk or on a tmpfs; the
    reference has neither snapshots nor a spare, and reads the windows again from the log. Killed members stay
    in the consumer group for the session timeout, which bounds the live answers.
    """
    plan = run.sized(RestartPlan(), _QUICK)
    found = {
        (kept, spare): uvloop.run(_measure(plan, run.threads, kept, spare=spare))
        for spare in (False, True)
        for kept in _PLACES
    }
    for (kept, spare), took in found.items():
        for end, ours in took.items():
            reference = found["none", False][end]
            if ours is reference:
                continue
            setting: Setting = {
                "sessions": plan.markets, "bars in a window": plan.bars, "what ends": end,
                "spare": "yes" if spare else "no", "snapshots": kept,
            }  # fmt: skip
            goal = Goal(2.0, of="ours") if _has_goal(kept, spare=spare) else None
            yield from figures_of(ours, reference, setting, goal)


def figures_of(
    took: Sequence[Took], reference: Sequence[Took], setting: Setting, goal: Goal | None
) -> Iterator[Figure]:
    """Medians beside those of the reference, with the slowest and the fastest; a goal for the first."""
    for name, ours, theirs in zip(_NAMES, zip(*took, strict=True), zip(*reference, strict=True), strict=True):
        yield Figure(
            name, median(ours), "s", setting=setting, against="from the log alone, no spare",
            reference=median(theirs), goal=goal if name == _NAMES[0] else None, n=len(ours),
            low=max(ours), high=min(ours), samples=list(ours),
        )  # fmt: skip


def _has_goal(kept: Kept, *, spare: bool) -> bool:
    return spare and kept == "on disk"


async def _measure(plan: RestartPlan, threads: int, kept: Kept, *, spare: bool) -> dict[End, list[Took]]:
    """Of each end; with a spare, of the engine's alone."""
    markets, ends = instruments(plan.markets, plan.bars), _ENDS[: 1 if spare else None]
    names = [market.symbol.lower() for market in markets]
    took: dict[End, list[Took]] = {end: [] for end in ends}
    repeats = plan.rounds if _has_goal(kept, spare=spare) else plan.repeats
    with TemporaryDirectory(prefix="foretick-bench-", dir=_PLACES[kept]) as folder:
        async with trading(markets, plan.bars) as (bootstrap, began):
            interval = "0s" if kept == "none" else "1s"
            text = _config(plan, bootstrap, markets, threads)
            text += f'[recovery]\ninterval = "{interval}"\ndirectory = "{folder}/snapshots"\n'
            daemon = Daemon(Path(folder), f"{text}[process]\nspare_engine = {str(spare).lower()}")
            try:
                async with asyncio.timeout(plan.longest_s):
                    await daemon.ready()
                    await all_live(daemon.endpoint, names, began)
                for end in ends * repeats:
                    await asyncio.sleep(plan.spare_s if spare else plan.settle_s)
                    async with asyncio.timeout(plan.longest_s):
                        took[end].append(await _ended(daemon, names, end))
                        await daemon.ready()
            except TimeoutError:
                why = f"no live answers within {plan.longest_s:.0f} s\n{daemon.log}"
                raise MeasurementFailed(why) from None
            finally:
                daemon.end()
    return took


async def _ended(daemon: Daemon, names: Sequence[str], end: End) -> Took:
    """End it, start it again and wait until all is back."""
    engine, since = daemon.engine, time.time_ns()
    if end == "engine killed":
        os.kill(engine, signal.SIGKILL)
        took = await _back(daemon.endpoint, names, since)
        # every kill as the first one: engines that live for less than a minute wait longer
        daemon.send(signal.SIGTERM)
        await daemon.start_again()
        return took
    daemon.send(signal.SIGTERM if end == "stopped" else signal.SIGKILL)
    if end == "both killed":
        with suppress(ProcessLookupError):  # it has noticed the end of its gateway
            os.kill(engine, signal.SIGKILL)
    await daemon.start_again()
    return await _back(daemon.endpoint, names, since)


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


def _config(plan: RestartPlan, bootstrap: str, markets: Sequence[Instrument], threads: int) -> str:
    """The configuration without its ports, snapshots and spare."""
    sessions = (
        f'[[sessions]]\nname = "{each.symbol.lower()}"\nsymbol = "{each.key}"\n'
        f"retention_records = {plan.bars}\n"
        for each in markets
    )
    return f"""{"".join(sessions)}
[model]
threads = {threads}
[source]
kind = "kafka"
backlog_policy = "wait"
[source.kafka]
bootstrap = "{bootstrap}"
topics = ["{TOPIC}"]
session_timeout = "{plan.session_s}s"
[sink.zeromq]
endpoint = "tcp://127.0.0.1:*"
"""
