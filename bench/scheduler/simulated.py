"""*Stream2LLM*'s workloads in simulated time: all policies by request rate, then under memory pressure.

`vLLM-NS` gets each prompt when it is complete, the others get it piece by piece. Runs are independent of one
another and of the machine, so they are spread over processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, groupby, product
from operator import attrgetter, truediv
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import msgspec

from bench.figures import Figure, Goal, Setting, over_better, quantiles
from bench.run import SuiteRun, spread
from bench.scheduler import paper
from lab.simulation.published import PROGRAM, Rules, simulate_published
from lab.simulation.run import Result, Setup, paper_limits, simulate
from lab.simulation.workload import ANNS as ANNS_SHAPE
from lab.simulation.workload import CRAWLER as CRAWLER_SHAPE
from lab.simulation.workload import Load, Retrieval, anns, crawler, whole
from scheduler.costs import CostModel, load
from scheduler.curves import CostCurve
from scheduler.policies import Ordering

POOL_TOKENS = 1_600_000
"""Llama-3.1-8B on two H200 as in section 6.1: 0.8 of 2 x 141 GB less 16 GB of weights, 128 KiB a token."""
SCHEDULERS = {"vLLM-NS": "vllm", "vLLM-S": "vllm"} | {p: p for p in ("fcfs", "lcas", "lcas-fair", "mcps")}
"""Row names, and the policy each runs under."""
PUBLISHED = ("vLLM-S", "fcfs", "lcas", "mcps")
"""Streaming schedulers of the paper."""
_THEIRS = {"lcas-fair": "lcas"}
"""The paper's policy next to a changed one."""
_JUDGED = ("fcfs", "lcas", "lcas-fair")
"""Policies that must never be slower than vLLM-NS."""
_TITLES = {"crawler": "Crawler (append mode)", "anns": "ANNS (update mode)"}
_AT = {"P50": 0.5, "P95": 0.95, "P99": 0.99}
"""Quantiles of TTFT, by their names in tables."""
_CLOSE = Goal(1.25, "within")
"""Of what the paper has a number for."""


@dataclass(frozen=True)
class Workload:
    """One of the paper's workloads: its rates, requests per run, its memory pressure, and a run per seed."""

    name: str
    shape: Retrieval
    qps: Sequence[float]
    requests: int
    batch_tokens: int
    pressed_qps: float
    delay: float
    seeds: Sequence[int]


CRAWLER = Workload("crawler", CRAWLER_SHAPE, (0.5, 1.0, 2.0, 4.0), 4322, 2048, 4.0, 10.0, (0, 1, 2))
ANNS = Workload("anns", ANNS_SHAPE, (0.25, 0.5, 1.0, 2.0), 500, 8192, 2.0, 30.0, tuple(range(8)))
_GENERATORS = {"crawler": crawler, "anns": anns}

_FEW = partial(replace, seeds=(0,))
QUICK = _FEW(CRAWLER, qps=(4.0,), requests=80), _FEW(ANNS, qps=(2.0,), requests=40)


@dataclass(frozen=True)
class SimulatedCase:
    """A workload under one scheduler; ``rules``: the paper's program instead of our scheduler.

    ``reply_s``: time from the end of a pass until the client has its token. ``assumption``: what differs from
    the other cases.
    """

    workload: Workload
    qps: float
    delay: float
    scheduler: str
    eviction: str
    rules: Rules | None = None
    profile: str = "h200-unloaded"
    reply_s: float = 0.015
    assumption: str = ""
    slower: float = 1.0
    """Factor on all times of the profile."""
    pool: float = 1.0
    """Of the paper's pool."""
    answer: int = 1
    burst: float = 1.0
    """See `Load`."""

    @property
    def published(self) -> str:
        """The scheduler's name in the paper."""
        return _THEIRS.get(self.scheduler, self.scheduler)

    @property
    def label(self) -> str:
        """The scheduler's name in the tables."""
        return f"{self.scheduler}, program" if self.rules else self.scheduler


@dataclass(frozen=True)
class SimulatedRow:
    """One case; ``ttft_s``: P50, P95 and P99 of each seed.

    ``busy``: share of the time in passes. ``swaps``, ``recomputes``: preemptions of each seed.
    """

    case: SimulatedCase
    requests: int
    failed: int
    ttft_s: Sequence[Sequence[float]]
    busy: float
    pool_tokens: int
    swaps: Sequence[int]
    recomputes: Sequence[int]

    def at(self, quantile: str) -> list[float]:
        """A quantile of TTFT, of each seed."""
        return [each[list(_AT).index(quantile)] for each in self.ttft_s]


Change = Mapping[str, Any]
"""Fields of a case, or of its workload, that differ."""
_OF_WORKLOAD = ("batch_tokens", "shape")
_EARLY: Change = {"shape": replace(ANNS_SHAPE, late=False)}
_SLOWER: Mapping[str, Change] = {
    "a device 3 % slower": {"slower": 1.03},
    "a device 6 % slower": {"slower": 1.06},
}
_BOTH: Mapping[str, Change] = {
    "bursts of arrivals": {"burst": 4.0},
    "our scheduler": {"rules": None},
    "our scheduler, which decodes 64 tokens": {"rules": None, "answer": 64},
}
ALONE: Mapping[str, Mapping[str, Change]] = {
    "crawler": {
        **_SLOWER,
        "profile h200-saturation": {"profile": "h200-saturation"},
        "8,192 tokens a pass": {"batch_tokens": 8192},
        "no time for the reply": {"reply_s": 0.0},
        **_BOTH,
    },
    "anns": {
        **_SLOWER,
        "2,048 tokens a pass": {"batch_tokens": 2048},
        "no time for the reply": {"reply_s": 0.0},
        "the last list comes early": _EARLY,
        **_BOTH,
    },
}
"""At the highest rate, by the paper's program: one assumption changed at a time."""
_RULES: Mapping[str, Change] = {
    "victims in the policy's order": {"rules": Rules(idle_first=False)},
    "victims wait for their input": {"rules": Rules(eager=False)},
    "evicted at the victim's price": {"rules": Rules(by_chunk=False)},
    "newest chunk first": {"rules": Rules(oldest_first=False)},
}
PRESSED: Mapping[str, Mapping[str, Change]] = {
    "crawler": {
        **_RULES,
        **_SLOWER,
        "profile h200-saturation": {"profile": "h200-saturation"},
        "8,192 tokens a pass": {"batch_tokens": 8192},
        "tokens independent of pages": {"shape": replace(CRAWLER_SHAPE, grows=False)},
        "half the pool": {"pool": 0.5},
        **_BOTH,
    },
    "anns": {
        **_RULES,
        "profile h200-saturation": {"profile": "h200-saturation"},
        "2,048 tokens a pass": {"batch_tokens": 2048},
        "2,048 tokens a pass, a device 6 % slower": {"batch_tokens": 2048, "slower": 1.06},
        "the last list comes early": _EARLY,
        "half the pool": {"pool": 0.5},
        **_BOTH,
    },
}
"""The same under memory pressure, choosing the eviction by cost."""


def measure(run: SuiteRun) -> Iterator[Figure]:
    """*Stream2LLM*'s workloads by their published distributions ([simulation](../simulation.md)), on
    `h200-unloaded` ([profiles](../profiles.md)). TTFT from the last chunk to the first token. Medians, least
    and greatest of the seeds, each of which is a run as long as the paper's. vLLM-NS is FIFO over complete
    prompts. `lcas` is the policy of the paper's text, `lcas-fair` the changed one
    ([scheduling](../scheduling.md)); *program* follows the rules of the paper's public program instead of our
    scheduler's. *Speed-up*: over vLLM-NS at the same quantile, or over vLLM-S where it says so, of each seed.
    *Spread of policies*: P95 of the slowest of the streaming policies over that of the fastest.
    *Assumption*: the one thing that differs.
    """
    pool_tokens, processes = run.sized((POOL_TOKENS, run.threads), (120_000, 0))
    evictions = run.sized(paper.EVICTIONS, ("recompute", "cost"))
    workloads = run.sized((CRAWLER, ANNS), QUICK)
    rates = [case for each in workloads for case in _rates(each)]
    pressed = [case for each in workloads for case in _pressed(each, evictions)]
    alone = [case for each in workloads for case in _varied(_highest(each), ALONE[each.name])]
    varied = [case for each in workloads for case in _varied(_heavy(each), PRESSED[each.name])]
    found = iter(spread(partial(_run, pool_tokens), [*rates, *pressed, *alone, *varied], processes))
    by_rates, by_eviction, by_itself, under = (
        [next(found) for _ in s] for s in (rates, pressed, alone, varied)
    )
    yield from orders(by_rates)
    yield from choices([row for row in by_eviction if not row.case.rules])
    for (name, _), rows in groupby(by_rates, attrgetter("case.workload.name", "case.qps")):
        yield from by_rate(list(rows), f"{_TITLES[name]} by rate")
    for name, rows in groupby(by_eviction, attrgetter("case.workload.name")):
        yield from under_pressure(list(rows), f"{_TITLES[name]} under memory pressure")
    for (name, _), rows in groupby(by_itself, attrgetter("case.workload.name", "case.assumption")):
        yield from by_rate(list(rows), f"{_TITLES[name]}, one assumption changed")
    for (name, _), rows in groupby(under, attrgetter("case.workload.name", "case.assumption")):
        yield from under_pressure(
            list(rows), f"{_TITLES[name]} under memory pressure, one assumption changed"
        )


def by_rate(rows: Sequence[SimulatedRow], table: str) -> Iterator[Figure]:
    """All schedulers at one rate."""
    base, streaming = (_named(rows, name) for name in ("vLLM-NS", "vLLM-S"))
    for row in rows:
        case, rate = row.case, (row.case.workload.name, row.case.qps)
        figure = partial(Figure, table=table, setting=_setting(row, {"QPS": case.qps}))
        yield from _seconds(row, figure)
        yield figure("busy", row.busy, "share")
        if row is base:
            continue
        theirs = {at: v for (*key, at), v in paper.SPEED_UPS.items() if key == [*rate, case.published]}
        judged = case.scheduler in _JUDGED and not case.assumption
        yield from _speed_ups(row, base, figure, theirs, Goal(1.0, "at least", "ours") if judged else None)
        over = paper.OVER_STREAMING.get(rate, {}).get(case.published)
        yield _compared(figure, "P95 over vLLM-S", _ratios(streaming, row, "P95"), over, case)


def orders(rates: Sequence[SimulatedRow]) -> Iterator[Figure]:
    """For each rate: the spread of policies at P95, and how many pairs are in the paper's order.

    Of the paper's lcas, that of its program counts.
    """
    for (workload, qps), rows in groupby(rates, attrgetter("case.workload.name", "case.qps")):
        named = {row.case.label: median(row.at("P95")) for row in rows if row.case.scheduler != "vLLM-NS"}
        ours = named | ({"lcas": named["lcas, program"]} if "lcas, program" in named else {})
        theirs = paper.order(workload, qps)
        pairs = list(combinations([name for name in theirs if name in ours], 2))
        setting: Setting = {"workload": workload, "QPS": qps}
        figure = partial(Figure, table="Order of policies at P95", setting=setting)
        apart = max(theirs.values()) / min(theirs.values()) if theirs else None
        found = max(ours.values()) / min(ours.values())
        yield figure("spread of policies", found, against="paper" if apart else "", reference=apart)
        if pairs:
            agreeing = sum((ours[a] < ours[b]) == (theirs[a] > theirs[b]) for a, b in pairs)
            goal, of = Goal(1.0, "at least"), "pairs the paper orders"
            yield figure("pairs in the paper's order", agreeing, against=of, reference=len(pairs), goal=goal)


def choices(pressed: Sequence[SimulatedRow]) -> Iterator[Figure]:
    """P99 of the choice by cost over that of the better pure eviction."""

    key = attrgetter("case.workload.name", "case.scheduler")
    for (workload, scheduler), rows in groupby(sorted(pressed, key=key), key):
        same = {row.case.eviction: row.at("P99") for row in rows}
        chosen = same.pop("cost", [])
        if scheduler == "vLLM-NS" or not same or not chosen:
            continue
        setting: Setting = {"workload": workload, "scheduler": scheduler}
        figure = partial(Figure, table="Choosing the eviction by cost", setting=setting)
        over, low, high = over_better(chosen, list(same.values()))
        goal, n = Goal(1.0, of="ours") if scheduler in _JUDGED else None, len(chosen)
        yield figure("P99 over the better pure eviction", over, goal=goal, n=n, low=low, high=high)


def under_pressure(rows: Sequence[SimulatedRow], table: str) -> Iterator[Figure]:
    """All schedulers and evictions of one workload."""
    base = _named(rows, "vLLM-NS")
    for row in rows:
        case = row.case
        setting = _setting(row, {"QPS": case.qps, "times the delays": case.delay})
        figure = partial(
            Figure, table=table, setting=setting | {"eviction": "" if row is base else case.eviction}
        )
        theirs = dict(zip(("P50", "P99"), paper.PRESSED_BASE[case.workload.name], strict=True))
        yield from _seconds(row, figure, theirs if row is base else {})
        if row is base:
            continue
        at = paper.EVICTIONS.index(case.eviction)
        p50, p99, preemptions = (each[at] for each in paper.PRESSED[case.workload.name, case.published])
        yield from _speed_ups(row, base, figure, {"P50": p50, "P99": p99})
        every = [a + b for a, b in zip(row.swaps, row.recomputes, strict=True)]
        yield _compared(figure, "preemptions", every, preemptions, case)
        if case.eviction == "cost" and any(every):
            swapped, reference = sum(row.swaps) / sum(every), paper.SWAPPED[case.workload.name]
            yield figure("victims swapped", swapped, "share", against="paper", reference=reference)
        yield figure("failed", row.failed)


def _setting(row: SimulatedRow, load: Setting) -> Setting:
    case = row.case
    requests = case.workload.requests * len(case.workload.seeds)
    varied: Setting = {"assumption": case.assumption} if case.assumption else {}
    return {"requests": requests, "pool": row.pool_tokens, **load, **varied, "scheduler": case.label}


def _seconds(
    row: SimulatedRow, figure: Callable[..., Figure], theirs: Mapping[str, float] = MappingProxyType({})
) -> Iterator[Figure]:
    of_all = partial(figure, unit="s", n=row.requests)
    for name in _AT:
        yield _compared(of_all, f"TTFT {name}", row.at(name), theirs.get(name), row.case)


def _speed_ups(
    row: SimulatedRow,
    base: SimulatedRow,
    figure: Callable[..., Figure],
    theirs: Mapping[str, float | paper.Range],
    p99_goal: Goal | None = None,
) -> Iterator[Figure]:
    for name in _AT:
        found = _compared(figure, f"{name} speed-up", _ratios(base, row, name), theirs.get(name), row.case)
        goal = p99_goal if name == "P99" and found.goal is None else found.goal
        yield msgspec.structs.replace(found, goal=goal)


def _compared(
    figure: Callable[..., Figure],
    name: str,
    values: Sequence[float],
    reference: float | paper.Range | None,
    case: SimulatedCase,
) -> Figure:
    """The median of the seeds next to the paper's.

    Under memory pressure the program's rules are judged, and no row that shows what an assumption does.
    """
    if reference is None:
        return _spread(figure, name, values)
    judged = not case.assumption and (case.rules is not None or case.delay == 1)
    goal = _CLOSE if judged else None
    return _spread(figure, name, values, against="paper", reference=reference, goal=goal)


def _spread(figure: Callable[..., Figure], name: str, values: Sequence[float], **more: object) -> Figure:
    return figure(name, median(values), low=min(values), high=max(values), samples=list(values), **more)


def _ratios(base: SimulatedRow, row: SimulatedRow, quantile: str) -> list[float]:
    return list(map(truediv, base.at(quantile), row.at(quantile)))


def _named(rows: Sequence[SimulatedRow], scheduler: str) -> SimulatedRow:
    return next(row for row in rows if row.case.scheduler == scheduler)


def _highest(workload: Workload) -> SimulatedCase:
    return SimulatedCase(workload, workload.qps[-1], 1.0, "vLLM-NS", "cost", PROGRAM)


def _heavy(workload: Workload) -> SimulatedCase:
    return replace(_highest(workload), qps=workload.pressed_qps, delay=workload.delay)


def _rates(workload: Workload) -> Iterator[SimulatedCase]:
    for qps in workload.qps:
        for scheduler in SCHEDULERS:
            yield SimulatedCase(workload, qps, 1.0, scheduler, "cost")
        yield SimulatedCase(workload, qps, 1.0, "lcas", "cost", PROGRAM)


def _pressed(workload: Workload, evictions: Sequence[str]) -> Iterator[SimulatedCase]:
    base = replace(_heavy(workload), rules=None)
    yield base
    for scheduler, eviction in product(list(SCHEDULERS)[1:], evictions):
        yield replace(base, scheduler=scheduler, eviction=eviction)
    for scheduler, eviction in product(PUBLISHED, evictions):
        yield replace(base, scheduler=scheduler, eviction=eviction, rules=PROGRAM)


def _varied(base: SimulatedCase, assumptions: Mapping[str, Change]) -> Iterator[SimulatedCase]:
    """One in two of the seeds is enough to show what an assumption does."""
    seeds = base.workload.seeds
    for name, change in assumptions.items():
        of_workload = {key: value for key, value in change.items() if key in _OF_WORKLOAD}
        of_case = {key: value for key, value in change.items() if key not in _OF_WORKLOAD}
        workload = replace(base.workload, seeds=seeds[: -(-len(seeds) // 2)], **of_workload)
        for scheduler in ("vLLM-NS", *PUBLISHED):
            yield replace(base, workload=workload, scheduler=scheduler, assumption=name, **of_case)


def _run(pool_tokens: int, case: SimulatedCase) -> SimulatedRow:
    results = [_simulated(pool_tokens, case, seed) for seed in case.workload.seeds]
    swaps, recomputes = (
        [int(result.columns[name].sum()) for result in results] for name in ("swaps", "recomputes")
    )
    return SimulatedRow(
        case,
        requests=sum(len(result.answered) for result in results),
        failed=sum(int((~result.answered).sum()) for result in results),
        ttft_s=[quantiles(result.ttft_ns / 1e9 + case.reply_s, *_AT.values()) for result in results],
        busy=fmean(result.busy_ns / result.ended_ns for result in results),
        pool_tokens=int(case.pool * pool_tokens),
        swaps=swaps,
        recomputes=recomputes,
    )


def _simulated(pool_tokens: int, case: SimulatedCase, seed: int) -> Result:
    workload, pool_tokens = case.workload, int(case.pool * pool_tokens)
    load_of = Load(case.qps, workload.requests, case.delay, seed, case.answer, case.burst)
    inputs = _GENERATORS[workload.name](load_of, workload.shape)
    if case.scheduler == "vLLM-NS":
        inputs = whole(inputs)
    tokens = workload.batch_tokens
    limits = paper_limits(eviction=case.eviction, max_batch_tokens=tokens, chunk_min=tokens, chunk_max=tokens)
    ordering, costs = Ordering(SCHEDULERS[case.scheduler]), _slowed(load(case.profile), case.slower)
    setup = Setup(pool_tokens, host_tokens=pool_tokens, ordering=ordering, limits=limits)
    if case.rules is not None:
        return simulate_published(inputs, setup, costs, case.rules)
    return simulate(inputs, setup, costs)


def _slowed(costs: CostModel, factor: float) -> CostModel:
    """A device that takes ``factor`` times as long for each pass and each copy."""

    def slowed(curve: CostCurve) -> CostCurve:
        return CostCurve(curve.x, tuple(factor * y for y in curve.y))

    curves = {name: slowed(getattr(costs, name)) for name in ("recompute", "swap_out", "swap_in")}
    return msgspec.structs.replace(
        costs, pass_s=factor * costs.pass_s, floor_s=factor * costs.floor_s, **curves
    )
