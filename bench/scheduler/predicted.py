"""A plan beside the daemon it is for: predicted and measured times from a tick to its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import uvloop
from msgspec.structs import replace

from bench.figures import Figure, Goal, Setting
from bench.run import SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config as serving_config
from bench.stream.serving import rest, serving, windowed
from daemon.config import schema
from feeds.connector import SinkRoute
from feeds.durations import parse_duration
from feeds.source import Incoming
from lab.plan.arrivals import Arrival, arrivals
from lab.plan.host_probe import CountingSink, with_host
from lab.plan.load import Load
from lab.plan.messages import trade
from lab.plan.plan import simulate, symbol_intervals
from lab.plan.sources import Sources, sources_of
from lab.profile.device_profile import profile
from lab.queued_source import QueuedSource
from metrics.histogram import Words, quantile
from metrics.store import MetricStore
from scheduler.costs import CostModel
from scheduler.costs import load as load_profile

_STAGES = ("close_to_answer", "end_to_end")
_SECONDS = "foretick_stage_seconds"
_PRICE = 200_000
"""In ticks."""
_LEAD = 3
"""Intervals of ticks after the pause and before the measurement."""
_PROCESS = schema.ProcessConfig(mode="two", spare_engine=False)
_SETTLE_S = 1.0
"""From the last tick to the last answer."""


@dataclass(frozen=True)
class PredictedPlan:
    """``loads``: sessions, length of a bar, ticks a second of each symbol. ``seconds``: of each."""

    loads: tuple[tuple[int, str, float], ...] = (
        (1, "1s", 10),
        (4, "1s", 10),
        (4, "250ms", 40),
        (16, "1s", 10),
        (16, "500ms", 40),
        (48, "1s", 10),
        (100, "1s", 10),
    )
    window: int = 64
    seconds: float = 20.0


_QUICK = PredictedPlan(((1, "250ms", 20),), window=4, seconds=1.0)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The embedded model, six standing questions a session, a full window, the daemon in two processes, ticks
    as a Poisson process. Ours is what `foretick plan` predicts for the same configuration, rate and arrivals
    on a profile that is measured first, in the same run; the reference is what the daemon then measures
    itself (`foretick_stage_seconds`). The goals: a median error of at most 25 %, and a utilisation within 1.5
    times the measured one.
    """
    sizes = run.sized(PredictedPlan(), _QUICK)
    model = schema.ModelConfig(threads=run.threads)
    costs = profiled(replace(serving_config(model, ()), process=_PROCESS), quick=run.quick)
    off: list[float] = []
    for sessions, bar, ticks in sizes.loads:
        markets = instruments(sessions, 1)
        config = replace(
            serving_config(model, (windowed(market, sizes.window) for market in markets)),
            bars=schema.BarsConfig(interval=parse_duration(bar)),
            source=schema.SourceConfig(backlog_policy="skip"),
            process=_PROCESS,
        )
        sources, load = sources_of(config, costs), Load(ticks=ticks * sessions, seconds=sizes.seconds)
        predicted = simulate(sources, load)
        measured = uvloop.run(_measured(sources, load, sizes.window))
        setting: Setting = {"sessions": sessions, "bar": bar, "ticks a second": load.ticks}
        for stage in _STAGES:
            ours = getattr(predicted, f"{stage}_s")
            for name, q in (("p50", 0.5), ("p99", 0.99)):
                found = quantile(measured.counts[stage], q) / 1e6
                ahead = getattr(ours, name) * 1e3 if ours else 0.0
                yield Figure(
                    f"{stage} {name}", ahead, "ms", setting=setting, against="measured", reference=found,
                    n=int(measured.counts[stage].sum()),
                )  # fmt: skip
                if name == "p50" and found and ours:
                    off.append(abs(ahead / found - 1))
        busy, measured_busy = 100 * predicted.utilisation_ratio, 100 * measured.forward_s
        within = Goal(1.5, "within")
        yield Figure("utilisation", busy, "%", "", setting, "measured", measured_busy, goal=within)
    error, goal = 100 * median(off), Goal(25.0, of="ours")
    name, loads = "median error of the predicted p50", {"loads": len(sizes.loads)}
    yield Figure(name, error, "%", setting={**loads}, goal=goal, n=len(off))


def profiled(config: schema.Config, *, quick: bool) -> CostModel:
    """A profile of this machine with the embedded model, as `foretick profile` measures it."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "profile.json"
        profile(config, path, quick=quick)
        costs = load_profile(path)
        return with_host(costs, config, rounds=5) if quick else costs


async def _measured(sources: Sources, load: Load, warm: int) -> Measured:
    """What the daemon measures over the time of the load."""
    interval = sources.intervals[0]
    lead, every = (
        arrivals(load, symbol_intervals(sources), 1, seconds)
        for seconds in (_LEAD * interval * 1e-9, load.seconds)
    )
    source = PacedSource(list(sources.symbols), interval)
    async with serving(sources.config, source, [SinkRoute(CountingSink(), "answers")]) as gateway:
        source.warm(warm)
        await rest(gateway)
        await source.play(lead)
        before = _read(gateway.store)
        await source.play(every)
        await asyncio.sleep(_SETTLE_S)
        after = _read(gateway.store)
    counts = {stage: after.counts[stage] - before.counts[stage] for stage in _STAGES}
    return Measured(counts, (after.forward_s - before.forward_s) / load.seconds)


class Measured(NamedTuple):
    """Histograms by stage, and the forward passes' seconds: so far, or of each second."""

    counts: dict[str, Words]
    forward_s: float


def _read(store: MetricStore) -> Measured:
    counts = {stage: store.buckets(_SECONDS, stage=stage).copy() for stage in _STAGES}
    return Measured(counts, store.total_seconds(_SECONDS, stage="forward"))


class PacedSource(QueuedSource):
    """Trades of ``symbols``: `warm` sends some bars at once, `play` the others at their times."""

    def __init__(self, symbols: Sequence[str], interval: int) -> None:
        super().__init__("paced", "dropping")
        self._symbols, self._interval = symbols, interval
        self._offset = 0

    def warm(self, bars: int) -> None:
        """Send a tick of each symbol for ``bars`` intervals, the last of which has begun."""
        newest = time.time_ns() // self._interval * self._interval
        for number in range(bars):
            at = newest - (bars - 1 - number) * self._interval
            self.put([self._trade(at, of) for of in range(len(self._symbols))])

    async def play(self, ticks: Sequence[Arrival]) -> None:
        """Send the ticks at their times, from the next but one interval on; those due together at once."""
        begin = (time.time_ns() // self._interval + 2) * self._interval
        due: list[Incoming] = []
        for at, _, of in ticks:
            wait = begin + at - time.time_ns()
            if wait > 0:
                if due:
                    self.put(due)
                due = []
                await asyncio.sleep(wait * 1e-9)
            due.append(self._trade(begin + at, of))
        if due:
            self.put(due)

    def _trade(self, at: int, of: int) -> Incoming:
        self._offset += 1
        payload = trade(self._symbols[of], at, _PRICE + self._offset % 7)
        return Incoming("paced", 0, self._offset, None, payload, ts_recv_ns=time.time_ns())
