"""The workloads of *Stream2LLM* in simulated time: all policies by request rate, then under memory pressure.

The same requests go through every scheduler. `vLLM-NS` gets each prompt when it is complete, the others
piece by piece; TTFT counts from the last piece in every case. Runs are independent of one another and of
the machine, so they are spread over processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from bench.figures import Figure, Goal, Setting, over_better, quantiles
from bench.run import Run, spread
from bench.scheduler import paper
from scheduler.costs import load
from scheduler.policies import NAMES, Ordering
from scheduler.simulation.run import Result, Setup, paper_limits, simulate
from scheduler.simulation.workload import WORKLOADS, Load, whole

POOL_TOKENS = 1_600_000
"""Llama-3.1-8B on two H200 as in section 6.1: 0.8 of 2 x 141 GB less 16 GB of weights, 128 KiB a token."""
SCHEDULERS: dict[str, str] = {
    "vLLM-NS": "vllm",
    "vLLM-S": "vllm",
    **{policy: policy for policy in ("fcfs", "lcas", "lcas-fair", "mcps") if policy in NAMES},
}
"""What stands in the tables, and the policy it runs under."""
PUBLISHED = {"lcas-fair": "lcas"}
"""The paper's policy that a changed one stands beside."""
_JUDGED = ("fcfs", "lcas", "lcas-fair")
"""Those that must never be slower than vLLM-NS."""
_TITLES = {"crawler": "Crawler (append mode)", "anns": "ANNS (update mode)"}
_AT = (0.5, 0.95, 0.99)
_MANY = 10_000
"""Invalidated tokens of a request that count as many (section 6.5)."""


@dataclass(frozen=True)
class Workload:
    """One of the paper's: its rates, requests of a run, its memory pressure, and a run for each seed."""

    name: str
    qps: Sequence[float]
    requests: int
    pressed_qps: float
    delay: float
    seeds: Sequence[int]


CRAWLER = Workload("crawler", (0.5, 1.0, 2.0, 4.0), 2000, 4.0, 10.0, (0, 1, 2))
ANNS = Workload("anns", (0.25, 0.5, 1.0, 2.0), 500, 2.0, 30.0, tuple(range(8)))


@dataclass(frozen=True)
class Sizes:
    """``processes``: 0 runs all in this one."""

    workloads: Sequence[Workload] = (CRAWLER, ANNS)
    profiles: Sequence[str] = ("h200-saturation", "h200-paper")
    evictions: Sequence[str] = ("recompute", "swap", "cost")
    pool_tokens: int = POOL_TOKENS
    processes: int = 2


@dataclass(frozen=True)
class Case:
    """One row: a workload under one scheduler."""

    workload: Workload
    qps: float
    delay: float
    scheduler: str
    eviction: str
    profile: str


QUICK = Sizes(
    workloads=(replace(CRAWLER, qps=(4.0,), requests=24), replace(ANNS, qps=(2.0,), requests=12, seeds=(0,))),
    profiles=("h200-saturation",),
    evictions=("recompute", "cost"),
    pool_tokens=60_000,
    processes=0,
)


@dataclass(frozen=True)
class Row:
    """All seeds of one case; ``ttft_s``: P50, P95 and P99 of all their requests together.

    ``p99_s``: of each seed's. ``busy``: part of the time in passes. ``swaps``, ``recomputes``: preemptions
    of a run. ``many``: part of the requests of which more than 10,000 tokens were invalidated.
    """

    workload: str
    profile: str
    qps: float
    delay: float
    scheduler: str
    eviction: str
    requests: int
    failed: int
    mean_s: float
    ttft_s: Sequence[float]
    p99_s: Sequence[float]
    completion_s: float
    busy: float
    swaps: float
    recomputes: float
    many: float


def measure(run: Run) -> Iterator[Figure]:
    """*Stream2LLM*'s workloads by their published distributions ([simulation](../simulation.md),
    [profiles](../profiles.md)). TTFT from the last chunk to the first token. vLLM-NS is FIFO over prompts
    that are complete. `lcas` is the policy as published, `lcas-fair` the changed one
    ([scheduling](../scheduling.md)); both stand beside the paper's `lcas`. *Speed-up*: over vLLM-NS at
    the same quantile, or over vLLM-S where it says so. *Spread of policies*: P95 of the slowest of the
    streaming policies over that of the fastest.
    """
    sizes = QUICK if run.quick else Sizes()
    rates = list(_rates(sizes))
    rows = spread(partial(_run, sizes.pool_tokens), [*rates, *_pressed(sizes)], sizes.processes)
    yield from figures(rows[: len(rates)], rows[len(rates) :], sizes.pool_tokens)


def figures(rates: Sequence[Row], pressed: Sequence[Row], pool_tokens: int) -> Iterator[Figure]:
    """By rate and under pressure, with what the paper has of each."""
    yield from orders(rates)
    yield from choices(pressed)
    for (workload, profile), rows in groupby(rates, lambda row: (row.workload, row.profile)):
        for _, same in groupby(rows, lambda row: row.qps):
            yield from by_rate(list(same), f"{_TITLES[workload]} by rate, {profile}", pool_tokens)
    for (workload, profile), rows in groupby(pressed, lambda row: (row.workload, row.profile)):
        yield from under_pressure(list(rows), f"{_TITLES[workload]} under memory pressure, {profile}")


def by_rate(rows: Sequence[Row], table: str, pool_tokens: int) -> Iterator[Figure]:
    """All schedulers at one rate."""
    base, streaming = (_named(rows, name) for name in ("vLLM-NS", "vLLM-S"))
    for row in rows:
        setting: Setting = {
            "requests": row.requests, "pool": pool_tokens, "QPS": row.qps, "scheduler": row.scheduler,
        }  # fmt: skip
        yield from _seconds(row, table, setting)
        yield Figure("busy", row.busy, "share", table, setting)
        if row is not base:
            of = {
                at: g
                for (*key, at), g in paper.SPEED_UPS.items()
                if key == [row.workload, row.qps, _published(row)]
            }
            goal = Goal(1.0, "at least", "ours") if row.scheduler in _JUDGED else None
            yield from _speed_ups(row, base, table, setting, of, goal)
            over = paper.OVER_STREAMING.get((row.workload, row.qps, _published(row)))
            ours = streaming.ttft_s[1] / row.ttft_s[1]
            yield Figure("P95 over vLLM-S", ours, "", table, setting, "paper" if over else "", over)


def orders(rates: Sequence[Row]) -> Iterator[Figure]:
    """At each rate: how far the policies are apart at P95, and how many pairs are in the paper's order."""
    for (workload, profile, qps), rows in groupby(rates, lambda row: (row.workload, row.profile, row.qps)):
        p95 = {row.scheduler: row.ttft_s[1] for row in rows if row.scheduler != "vLLM-NS"}
        published = {PUBLISHED.get(name, name): value for name, value in p95.items()} | p95
        theirs = paper.order(workload, qps)
        pairs = list(combinations([name for name in theirs if name in published], 2))
        setting: Setting = {"workload": workload, "profile": profile, "QPS": qps}
        spread = max(theirs.values()) / min(theirs.values()) if theirs else None
        name, table = "spread of policies", "Order of policies at P95"
        ours = max(p95.values()) / min(p95.values())
        yield Figure(name, ours, "", table, setting, "paper" if spread else "", spread)
        if pairs:
            agreeing = sum((published[a] < published[b]) == (theirs[a] > theirs[b]) for a, b in pairs)
            goal, of = Goal(1.0, "at least"), "pairs the paper orders"
            yield Figure(
                "pairs in the paper's order", agreeing, "", table, setting, of, len(pairs), goal=goal
            )


def choices(pressed: Sequence[Row]) -> Iterator[Figure]:
    """P99 of the choice by cost over that of the better pure eviction, and the share it swaps."""
    key = attrgetter("profile", "workload", "scheduler")
    for (profile, workload, scheduler), rows in groupby(sorted(pressed, key=key), key):
        same = {row.eviction: row for row in rows}
        setting: Setting = {
            "workload": workload, "profile": profile, "scheduler": scheduler,
        }  # fmt: skip
        pure = [row.p99_s for name, row in same.items() if name != "cost"]
        table = "Choosing the eviction by cost"
        if scheduler == "vLLM-NS" or not pure or "cost" not in same:
            continue
        chosen = same["cost"]
        over, low, high = over_better(chosen.p99_s, pure)
        goal = Goal(1.0, of="ours") if scheduler in _JUDGED else None
        name, n = "P99 over the better pure eviction", len(chosen.p99_s)
        yield Figure(name, over, "", table, setting, goal=goal, n=n, low=low, high=high)
        if victims := chosen.swaps + chosen.recomputes:
            share = chosen.swaps / victims
            yield Figure("victims swapped", share, "share", table, setting, "paper", paper.SWAPPED[workload])


def under_pressure(rows: Sequence[Row], table: str) -> Iterator[Figure]:
    """All schedulers and evictions of one workload."""
    base = _named(rows, "vLLM-NS")
    for row in rows:
        setting: Setting = {
            "QPS": row.qps, "times the delays": row.delay, "scheduler": row.scheduler,
            "eviction": "" if row is base else row.eviction,
        }  # fmt: skip
        yield from _seconds(row, table, setting)
        if row is base:
            for name, ours, theirs in zip(
                ("P50", "P99"), row.ttft_s[::2], paper.PRESSED_BASE[row.workload], strict=True
            ):
                yield Figure(f"TTFT {name}", ours, "s", table, setting, "paper", theirs)
            continue
        at, key = paper.EVICTIONS.index(row.eviction), (row.workload, _published(row))
        gains = {"P50": paper.PRESSED_P50[key][at], "P99": paper.PRESSED_P99[key][at]}
        yield from _speed_ups(row, base, table, setting, gains)
        yield Figure("swapped", row.swaps, "", table, setting)
        yield Figure("recomputed", row.recomputes, "", table, setting)
        preemptions = row.swaps + row.recomputes
        yield Figure("preemptions", preemptions, "", table, setting, "paper", paper.PREEMPTIONS[key][at])
        yield Figure("over 10,000 invalidated", row.many, "share", table, setting)
        yield Figure("failed", row.failed, "", table, setting)


def _seconds(row: Row, table: str, setting: Setting) -> Iterator[Figure]:
    yield Figure("TTFT mean", row.mean_s, "s", table, setting)
    for name, value in zip(("P50", "P95", "P99"), row.ttft_s, strict=True):
        samples = list(row.p99_s) if name == "P99" else []
        yield Figure(f"TTFT {name}", value, "s", table, setting, n=row.requests, samples=samples)
    yield Figure("completion", row.completion_s, "s", table, setting)


def _speed_ups(
    row: Row,
    base: Row,
    table: str,
    setting: Setting,
    theirs: Mapping[str, float | paper.Range],
    goal: Goal | None = None,
) -> Iterator[Figure]:
    for name, ours, other in zip(("P50", "P95", "P99"), row.ttft_s, base.ttft_s, strict=True):
        reference = theirs.get(name)
        against = "paper" if reference else ""
        mine = goal if name == "P99" else None
        yield Figure(f"{name} speed-up", other / ours, "", table, setting, against, reference, goal=mine)


def _published(row: Row) -> str:
    return PUBLISHED.get(row.scheduler, row.scheduler)


def _named(rows: Sequence[Row], scheduler: str) -> Row:
    return next(row for row in rows if row.scheduler == scheduler)


def _rates(sizes: Sizes) -> Iterator[Case]:
    for profile in sizes.profiles:
        for workload in sizes.workloads:
            for qps in workload.qps:
                for scheduler in SCHEDULERS:
                    yield Case(workload, qps, 1.0, scheduler, "cost", profile)


def _pressed(sizes: Sizes) -> Iterator[Case]:
    for profile in sizes.profiles:
        for workload in sizes.workloads:
            base = Case(workload, workload.pressed_qps, workload.delay, "vLLM-NS", "cost", profile)
            yield base
            for scheduler in list(SCHEDULERS)[1:]:
                for eviction in sizes.evictions:
                    yield replace(base, scheduler=scheduler, eviction=eviction)


def _run(pool_tokens: int, case: Case) -> Row:
    results = [_simulated(pool_tokens, case, seed) for seed in case.workload.seeds]
    ttft = _joined(result.ttft_ns for result in results) / 1e9
    invalidated = _joined(result.columns["invalidated_tokens"] for result in results)
    return Row(
        workload=case.workload.name,
        profile=case.profile,
        qps=case.qps,
        delay=case.delay,
        scheduler=case.scheduler,
        eviction=case.eviction,
        requests=sum(len(result.answered) for result in results),
        failed=sum(int((~result.answered).sum()) for result in results),
        mean_s=float(ttft.mean()),
        ttft_s=quantiles(ttft.tolist(), *_AT),
        p99_s=[float(np.quantile(result.ttft_ns / 1e9, 0.99)) for result in results],
        completion_s=float(np.mean([result.ended_ns / 1e9 for result in results])),
        busy=float(np.mean([result.busy_ns / result.ended_ns for result in results])),
        swaps=_mean(results, "swaps"),
        recomputes=_mean(results, "recomputes"),
        many=float((invalidated > _MANY).mean()),
    )


def _simulated(pool_tokens: int, case: Case, seed: int) -> Result:
    inputs = WORKLOADS[case.workload.name](Load(case.qps, case.workload.requests, case.delay, seed))
    if case.scheduler == "vLLM-NS":
        inputs = whole(inputs)
    setup = Setup(
        pool_tokens,
        host_tokens=pool_tokens,
        ordering=Ordering(SCHEDULERS[case.scheduler]),
        limits=paper_limits(eviction=case.eviction),
    )
    return simulate(inputs, setup, load(case.profile))


def _joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(list(parts))


def _mean(results: Sequence[Result], column: str) -> float:
    """Sum over a run's requests, the mean of the runs."""
    return float(np.mean([result.columns[column].sum() for result in results]))
