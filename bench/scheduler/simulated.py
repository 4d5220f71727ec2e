"""*Stream2LLM*'s workloads in simulated time: all policies by request rate, then under memory pressure.

`vLLM-NS` gets each prompt when it is complete, the others get it piece by piece. Runs are independent of one
another and of the machine, so they are spread over processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, groupby, product
from operator import attrgetter

import numpy as np

from bench.figures import Figure, Goal, Setting, over_better, quantiles
from bench.run import SuiteRun, spread
from bench.scheduler import paper
from lab.simulation.run import Result, Setup, paper_limits, simulate
from lab.simulation.workload import WORKLOADS, Load, whole
from scheduler.costs import load
from scheduler.policies import Ordering

POOL_TOKENS = 1_600_000
"""Llama-3.1-8B on two H200 as in section 6.1: 0.8 of 2 x 141 GB less 16 GB of weights, 128 KiB a token."""
SCHEDULERS = {"vLLM-NS": "vllm", "vLLM-S": "vllm"} | {p: p for p in ("fcfs", "lcas", "lcas-fair", "mcps")}
"""Row names, and the policy each runs under."""
PUBLISHED = {"lcas-fair": "lcas"}
"""The paper's policy next to a changed one."""
_JUDGED = ("fcfs", "lcas", "lcas-fair")
"""Policies that must never be slower than vLLM-NS."""
_TITLES = {"crawler": "Crawler (append mode)", "anns": "ANNS (update mode)"}
_AT = {"P50": 0.5, "P95": 0.95, "P99": 0.99}
"""Quantiles of TTFT, by their names in tables."""


@dataclass(frozen=True)
class Workload:
    """One of the paper's workloads: its rates, requests per run, its memory pressure, and a run per seed."""

    name: str
    qps: Sequence[float]
    requests: int
    pressed_qps: float
    delay: float
    seeds: Sequence[int]


CRAWLER = Workload("crawler", (0.5, 1.0, 2.0, 4.0), 2000, 4.0, 10.0, (0, 1, 2))
ANNS = Workload("anns", (0.25, 0.5, 1.0, 2.0), 500, 2.0, 30.0, tuple(range(8)))


_FEW = partial(replace, seeds=(0,))
QUICK = _FEW(CRAWLER, qps=(4.0,), requests=24), _FEW(ANNS, qps=(2.0,), requests=12)


@dataclass(frozen=True)
class SimulatedCase:
    """A workload under one scheduler."""

    workload: Workload
    qps: float
    delay: float
    scheduler: str
    eviction: str
    profile: str

    @property
    def published(self) -> str:
        """The scheduler's name in the paper."""
        return PUBLISHED.get(self.scheduler, self.scheduler)


@dataclass(frozen=True)
class SimulatedRow:
    """All seeds of one case; ``ttft_s``: P50, P95 and P99 of all their requests together.

    ``p99_s``: of each seed's. ``busy``: share of the time in passes. ``swaps``, ``recomputes``: preemptions
    per run.
    """

    case: SimulatedCase
    requests: int
    failed: int
    ttft_s: Sequence[float]
    p99_s: Sequence[float]
    busy: float
    swaps: float
    recomputes: float


def measure(run: SuiteRun) -> Iterator[Figure]:
    """*Stream2LLM*'s workloads by their published distributions ([simulation](../simulation.md),
    [profiles](../profiles.md)). TTFT from the last chunk to the first token. vLLM-NS is FIFO over prompts
    that are complete. `lcas` is the policy as published, `lcas-fair` the changed one
    ([scheduling](../scheduling.md)); both are next to the paper's `lcas`. *Speed-up*: over vLLM-NS at
    the same quantile, or over vLLM-S where it says so. *Spread of policies*: P95 of the slowest of the
    streaming policies over that of the fastest.
    """
    pool_tokens, processes = run.sized((POOL_TOKENS, 2), (60_000, 0))
    evictions = run.sized(paper.EVICTIONS, ("recompute", "cost"))
    profiles = run.sized(("h200-saturation", "h200-paper"), ("h200-saturation",))
    each = list(product(profiles, run.sized((CRAWLER, ANNS), QUICK)))
    by_rates = [case for profile, workload in each for case in _rates(workload, profile)]
    cases = by_rates + [case for profile, workload in each for case in _pressed(workload, profile, evictions)]
    rows = spread(partial(_run, pool_tokens), cases, processes)
    rates, pressed = rows[: len(by_rates)], rows[len(by_rates) :]
    yield from orders(rates)
    yield from choices(pressed)
    for (workload, profile, _), same in groupby(rates, _rate):
        yield from by_rate(list(same), f"{_TITLES[workload]} by rate, {profile}", pool_tokens)
    for (workload, profile, _), same in groupby(pressed, _rate):
        yield from under_pressure(list(same), f"{_TITLES[workload]} under memory pressure, {profile}")


_rate = attrgetter("case.workload.name", "case.profile", "case.qps")


def by_rate(rows: Sequence[SimulatedRow], table: str, pool_tokens: int) -> Iterator[Figure]:
    """All schedulers at one rate."""
    base, streaming = (_named(rows, name) for name in ("vLLM-NS", "vLLM-S"))
    for row in rows:
        case, rate = row.case, (row.case.workload.name, row.case.qps)
        setting: Setting = {
            "requests": row.requests, "pool": pool_tokens, "QPS": case.qps, "scheduler": case.scheduler,
        }  # fmt: skip
        figure = partial(Figure, table=table, setting=setting)
        yield from _seconds(row, figure)
        yield figure("busy", row.busy, "share")
        if row is not base:
            theirs = {at: v for (*key, at), v in paper.SPEED_UPS.items() if key == [*rate, case.published]}
            goal = Goal(1.0, "at least", "ours") if case.scheduler in _JUDGED else None
            yield from _speed_ups(row, base, figure, theirs, goal)
            over = paper.OVER_STREAMING.get(rate, {}).get(case.published)
            ours = streaming.ttft_s[1] / row.ttft_s[1]
            yield figure("P95 over vLLM-S", ours, against="paper" if over else "", reference=over)


def orders(rates: Sequence[SimulatedRow]) -> Iterator[Figure]:
    """For each rate: the spread of policies at P95, and how many pairs are in the paper's order."""
    for (workload, profile, qps), rows in groupby(rates, _rate):
        p95 = {row.case.scheduler: row.ttft_s[1] for row in rows if row.case.scheduler != "vLLM-NS"}
        published = {PUBLISHED.get(name, name): value for name, value in p95.items()} | p95
        theirs = paper.order(workload, qps)
        pairs = list(combinations([name for name in theirs if name in published], 2))
        setting: Setting = {"workload": workload, "profile": profile, "QPS": qps}
        figure = partial(Figure, table="Order of policies at P95", setting=setting)
        spread = max(theirs.values()) / min(theirs.values()) if theirs else None
        ours = max(p95.values()) / min(p95.values())
        yield figure("spread of policies", ours, against="paper" if spread else "", reference=spread)
        if pairs:
            agreeing = sum((published[a] < published[b]) == (theirs[a] > theirs[b]) for a, b in pairs)
            goal, of = Goal(1.0, "at least"), "pairs the paper orders"
            yield figure("pairs in the paper's order", agreeing, against=of, reference=len(pairs), goal=goal)


def choices(pressed: Sequence[SimulatedRow]) -> Iterator[Figure]:
    """P99 of the choice by cost over that of the better pure eviction, and the share it swaps."""

    key = attrgetter("case.profile", "case.workload.name", "case.scheduler")
    for (profile, workload, scheduler), rows in groupby(sorted(pressed, key=key), key):
        same = {row.case.eviction: row for row in rows}
        pure = [row.p99_s for name, row in same.items() if name != "cost"]
        if scheduler == "vLLM-NS" or not pure or "cost" not in same:
            continue
        setting: Setting = {"workload": workload, "profile": profile, "scheduler": scheduler}
        figure = partial(Figure, table="Choosing the eviction by cost", setting=setting)
        chosen = same["cost"]
        over, low, high = over_better(chosen.p99_s, pure)
        goal = Goal(1.0, of="ours") if scheduler in _JUDGED else None
        n = len(chosen.p99_s)
        yield figure("P99 over the better pure eviction", over, goal=goal, n=n, low=low, high=high)
        if victims := chosen.swaps + chosen.recomputes:
            swapped, theirs = chosen.swaps / victims, paper.SWAPPED[workload]
            yield figure("victims swapped", swapped, "share", against="paper", reference=theirs)


def under_pressure(rows: Sequence[SimulatedRow], table: str) -> Iterator[Figure]:
    """All schedulers and evictions of one workload."""
    base = _named(rows, "vLLM-NS")
    for row in rows:
        case = row.case
        setting: Setting = {
            "QPS": case.qps, "times the delays": case.delay, "scheduler": case.scheduler,
            "eviction": "" if row is base else case.eviction,
        }  # fmt: skip
        figure = partial(Figure, table=table, setting=setting)
        yield from _seconds(row, figure)
        if row is base:
            theirs = paper.PRESSED_BASE[case.workload.name]
            for name, ours, reference in zip(("P50", "P99"), row.ttft_s[::2], theirs, strict=True):
                yield figure(f"TTFT {name}", ours, "s", against="paper", reference=reference)
            continue
        at = paper.EVICTIONS.index(case.eviction)
        p50, p99, preemptions = (each[at] for each in paper.PRESSED[case.workload.name, case.published])
        yield from _speed_ups(row, base, figure, {"P50": p50, "P99": p99})
        yield figure("swapped", row.swaps)
        yield figure("recomputed", row.recomputes)
        yield figure("preemptions", row.swaps + row.recomputes, against="paper", reference=preemptions)
        yield figure("failed", row.failed)


def _seconds(row: SimulatedRow, figure: Callable[..., Figure]) -> Iterator[Figure]:
    for name, value in zip(_AT, row.ttft_s, strict=True):
        samples = list(row.p99_s) if name == "P99" else []
        yield figure(f"TTFT {name}", value, "s", n=row.requests, samples=samples)


def _speed_ups(
    row: SimulatedRow,
    base: SimulatedRow,
    figure: Callable[..., Figure],
    theirs: Mapping[str, float | paper.Range],
    p99_goal: Goal | None = None,
) -> Iterator[Figure]:
    for name, ours, other in zip(_AT, row.ttft_s, base.ttft_s, strict=True):
        reference = theirs.get(name)
        against, goal = "paper" if reference else "", p99_goal if name == "P99" else None
        yield figure(f"{name} speed-up", other / ours, against=against, reference=reference, goal=goal)


def _named(rows: Sequence[SimulatedRow], scheduler: str) -> SimulatedRow:
    return next(row for row in rows if row.case.scheduler == scheduler)


def _rates(workload: Workload, profile: str) -> Iterator[SimulatedCase]:
    for qps, scheduler in product(workload.qps, SCHEDULERS):
        yield SimulatedCase(workload, qps, 1.0, scheduler, "cost", profile)


def _pressed(workload: Workload, profile: str, evictions: Sequence[str]) -> Iterator[SimulatedCase]:
    base = SimulatedCase(workload, workload.pressed_qps, workload.delay, "vLLM-NS", "cost", profile)
    yield base
    for scheduler, eviction in product(list(SCHEDULERS)[1:], evictions):
        yield replace(base, scheduler=scheduler, eviction=eviction)


def _run(pool_tokens: int, case: SimulatedCase) -> SimulatedRow:
    results = [_simulated(pool_tokens, case, seed) for seed in case.workload.seeds]
    ttft = np.concatenate([result.ttft_ns for result in results]) / 1e9
    swaps, recomputes = (
        sum(int(result.columns[name].sum()) for result in results) / len(results)
        for name in ("swaps", "recomputes")
    )
    return SimulatedRow(
        case,
        requests=sum(len(result.answered) for result in results),
        failed=sum(int((~result.answered).sum()) for result in results),
        ttft_s=quantiles(ttft, *_AT.values()),
        p99_s=[float(np.quantile(result.ttft_ns / 1e9, 0.99)) for result in results],
        busy=float(np.mean([result.busy_ns / result.ended_ns for result in results])),
        swaps=swaps,
        recomputes=recomputes,
    )


def _simulated(pool_tokens: int, case: SimulatedCase, seed: int) -> Result:
    inputs = WORKLOADS[case.workload.name](Load(case.qps, case.workload.requests, case.delay, seed))
    ordering, limits = Ordering(SCHEDULERS[case.scheduler]), paper_limits(eviction=case.eviction)
    setup = Setup(pool_tokens, host_tokens=pool_tokens, ordering=ordering, limits=limits)
    return simulate(whole(inputs) if case.scheduler == "vLLM-NS" else inputs, setup, load(case.profile))
