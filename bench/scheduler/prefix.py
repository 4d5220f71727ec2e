"""k-LPM next to FCFS and LPM over request rates: simulated, and on a real engine with a tiny model.

Two loads. `sessions` is that of *k-LPM* section 5.1: four prompts share a user's history, in random order. In
`regulars` some users ask repeatedly and most ask once: under LPM those who ask once can starve, which the
paper's bound on k-LPM rules out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from math import inf
from operator import attrgetter
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.engine.contenders import embedded
from bench.figures import Figure, Goal, Setting, over_better, quantiles
from bench.run import SuiteRun, spread
from bench.scheduler.predicted import limits, profile, rate
from bench.scheduler.replay import Replayed, replay
from engine.model.loading import LoadedModel
from scheduler.costs import CostModel
from scheduler.costs import load as profile_named
from scheduler.policies import Ordering
from scheduler.simulation.inputs import Input, merged
from scheduler.simulation.run import Setup, paper_limits, simulate
from scheduler.simulation.tokens import Segments
from scheduler.simulation.workload import Library

POLICIES = ("fcfs", "lpm", "klpm", "klpm-adaptive")
_BLOCK = 16
_PER_USER = 4
_STEADY = 1.1
"""A run on the engine does not count if its pace exceeds the least pace so far by this factor."""
_REGULARS = 60
"""Users who ask repeatedly: more than the cache holds at a time."""
_OFTEN = 0.6
"""Share of the questions that are theirs."""


@dataclass(frozen=True)
class Shape:
    """Tokens of the base prompt, of a user's history, and of a document; the latter two as (least, most)."""

    base: int
    history: tuple[int, int]
    document: tuple[int, int]

    @property
    def mean(self) -> float:
        """Mean tokens of a prompt."""
        return self.base + (sum(self.history) + sum(self.document)) / 2


PAPER = Shape(256, (4096, 7168), (512, 1024))
TINY = Shape(16, (256, 448), (32, 64))


@dataclass(frozen=True)
class PrefixSizes:
    """Rates as shares of what the device computes without reuse; ``pool`` in prompts.

    ``real_...``: of the part on the engine, where a run disturbed by other processes, by its pace, is
    repeated, with up to ``tries`` in all. ``processes``: of the simulated part; 0 runs it in this one.
    """

    rates: Sequence[float] = (0.8, 1.0, 1.2, 1.5)
    requests: int = 1200
    seeds: Sequence[int] = tuple(range(16))
    pool: int = 30
    k: int = 2
    profile: str = "h200-saturation"
    processes: int = 2
    real_rates: Sequence[float] = (0.8, 1.2, 1.6)
    real_requests: int = 200
    real_seeds: Sequence[int] = (0, 1, 2, 3)
    tries: int = 2
    batch_tokens: int = 512
    quick_profile: bool = False


@dataclass(frozen=True)
class PrefixCase:
    """One run."""

    load: str
    shape: Shape
    part: float
    qps: float
    policy: str
    seed: int
    requests: int
    pool: int
    k: int
    batch_tokens: int | None = None  # the paper's

    @property
    def setup(self) -> Setup:
        """Of pool and scheduler."""
        pool = int(self.pool * self.shape.mean)
        return Setup(
            pool,
            block_size=_BLOCK,
            ordering=Ordering(self.policy, self.k),
            limits=limits(self.batch_tokens, pool) if self.batch_tokens else paper_limits(),
            prefix_cache=True,
            seed=self.seed,
        )


QUICK = PrefixSizes(
    rates=(1.2,), requests=24, seeds=(0,), processes=0, real_rates=(50.0,), real_requests=4,
    real_seeds=(0,), batch_tokens=64, quick_profile=True,
)  # fmt: skip


class PrefixRow(NamedTuple):
    """One run; TTFT in seconds. ``reused``: share of the prompts' tokens found in the prefix cache."""

    case: PrefixCase
    p50_s: float
    p99_s: float
    reused: float
    pace: float = 1.0


def measure(run: SuiteRun) -> Iterator[Figure]:
    """P99 TTFT, median over seeds. *sessions*: four prompts share a user's history (*k-LPM* section 5.1);
    *regulars*: 60 users ask six of ten questions, the others ask once. Rates are parts of what the device
    computes without reuse. *Over the better*: of FCFS and LPM, on the same requests, geometric mean over
    seeds and two standard errors to either side.
    """
    sizes, loaded = QUICK if run.quick else PrefixSizes(), embedded(run)
    costs = profile_named(sizes.profile)
    cases = _cases(sizes, PAPER, rate(costs, PAPER.mean), sizes.rates, sizes.seeds, sizes.requests)
    simulated = spread(partial(_foretold, costs), cases, sizes.processes)
    here = profile(loaded, sizes.batch_tokens, 1024, quick=sizes.quick_profile)
    tiny = partial(_cases, sizes, TINY, rate(here, TINY.mean), sizes.real_rates)
    cases = tiny(sizes.seeds, sizes.real_requests, sizes.batch_tokens)
    foreseen = spread(partial(_foretold, here), cases, sizes.processes)
    cases = tiny(sizes.real_seeds, sizes.real_requests, sizes.batch_tokens)
    real = _real(cases, sizes.tries, loaded, here, run.say)
    yield from figures(real, "On the engine, embedded model")
    yield from figures(simulated, f"Simulated, {sizes.profile}")
    yield from figures(foreseen, "The engine's load, simulated under the profile measured here")


def figures(rows: Sequence[PrefixRow], where: str) -> Iterator[Figure]:
    """By load and rate: P99 of each policy, and k-LPM's over the better of FCFS and LPM."""
    for (load, part, qps, k), same in groupby(sorted(rows, key=_rate), _rate):
        runs = sorted(same, key=lambda row: row.case.seed)
        by = {policy: [row for row in runs if row.case.policy == policy] for policy in POLICIES}
        setting: Setting = {"k": k, "load": load, "rate": part, "a second": round(qps, 1)}
        figure = partial(Figure, setting=setting, n=len(by["klpm"]))
        p99 = {policy: [row.p99_s for row in by[policy]] for policy in POLICIES}
        for policy in POLICIES:
            yield figure(f"{policy} P99", median(p99[policy]), "s", where, samples=p99[policy])
        for policy in ("klpm", "klpm-adaptive"):
            over, low, high = over_better(p99[policy], [p99["fcfs"], p99["lpm"]])
            goal = Goal(1.0, of="ours") if policy == "klpm" else None
            yield figure(f"{policy} over the better", over, table=where, goal=goal, low=low, high=high)
        also = f"{where}: medians, reuse and pace"
        for policy in POLICIES:
            p50, reused, pace = zip(*((row.p50_s, row.reused, row.pace) for row in by[policy]), strict=True)
            yield figure(f"{policy} P50", median(p50), "s", also, samples=list(p50))
            yield figure(f"{policy} reused", median(reused), "share", also)
            if set(pace) != {1.0}:  # simulated time has no pace
                yield figure(f"{policy} pace", median(pace), "", also)


def _rate(row: PrefixRow) -> tuple[str, float, float, int]:
    return row.case.load, row.case.part, row.case.qps, row.case.k


def _real(
    cases: Sequence[PrefixCase], tries: int, loaded: LoadedModel, costs: CostModel, say: Callable[[str], None]
) -> list[PrefixRow]:
    """Runs on the engine. Runs that are compared alternate: the machine's speed changes within minutes."""
    rows: list[PrefixRow] = []
    least = inf
    requests = attrgetter("load", "part", "seed")  # everything but the policy determines a run's requests
    for (load, part, seed), same in groupby(sorted(cases, key=requests), requests):
        policies = list(same)
        first = seed % len(policies)  # alternating, so that the same conditions hold for each
        for case in policies[first:] + policies[:first]:
            say(f"engine, {load} at {part:g}, {case.policy}, seed {seed} ...")
            found = steady(lambda: replay(inputs(case), case.setup, loaded, costs), least, tries)  # noqa: B023
            least = min(least, found.pace)
            rows.append(_row(case, found.ttft_ns, found.reused, found.pace))
    return rows


def steady(run: Callable[[], Replayed], least: float, tries: int) -> Replayed:
    """A run on an undisturbed machine, judged by the pace of its passes, not by its TTFT."""
    found = run()
    for _ in range(tries - 1):
        if found.pace <= _STEADY * least:
            break
        found = min(found, run(), key=lambda each: each.pace)
    return found


def inputs(case: PrefixCase) -> Iterator[Input]:
    """The prompts of a run, equal for every policy."""
    rng, library = Random(case.seed), Library()
    base = library.document(case.shape.base)
    if case.load == "sessions":  # each user equally often, shuffled
        order = [number // _PER_USER for number in range(case.requests)]
        rng.shuffle(order)
    else:  # one of the regulars, or a new user
        users = range(_REGULARS, _REGULARS + case.requests)
        order = [rng.randrange(_REGULARS) if rng.random() < _OFTEN else user for user in users]
    histories = {user: library.document(rng.randint(*case.shape.history)) for user in sorted(set(order))}

    def arrivals() -> Iterator[list[Input]]:
        now = 0.0
        for number, user in enumerate(order):
            now += rng.expovariate(case.qps)
            document = library.document(rng.randint(*case.shape.document))
            prompt = Segments([base, histories[user], document])
            yield [Input(round(now * 1e9), number, "open", prompt, True)]

    return merged(arrivals())


def _cases(
    sizes: PrefixSizes,
    shape: Shape,
    qps: float,
    rates: Sequence[float],
    seeds: Sequence[int],
    requests: int,
    batch_tokens: int | None = None,
) -> list[PrefixCase]:
    return [
        PrefixCase(load, shape, part, part * qps, policy, seed, requests, sizes.pool, sizes.k, batch_tokens)
        for load, part, policy, seed in product(("sessions", "regulars"), rates, POLICIES, seeds)
    ]


def _foretold(costs: CostModel, case: PrefixCase) -> PrefixRow:
    result = simulate(inputs(case), case.setup, costs)
    if result.failures:
        raise RuntimeError(f"{case.policy}: requests failed: {result.failures}")
    columns = result.columns
    return _row(case, result.ttft_ns, float(columns["reused_tokens"].sum() / columns["prompt_tokens"].sum()))


def _row(case: PrefixCase, ttft_ns: NDArray[np.int64], reused: float, pace: float = 1.0) -> PrefixRow:
    p50, p99 = quantiles(ttft_ns / 1e9, 0.5, 0.99)
    return PrefixRow(case, p50, p99, reused, pace)
