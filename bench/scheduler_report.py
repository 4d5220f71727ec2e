"""The tables of `foretick bench scheduler`, each beside what the papers report and with its goal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import exp, log, sqrt
from statistics import fmean, median, stdev
from typing import Any, TypeVar

from msgspec import Struct

from bench import scheduler_paper as paper
from bench.scheduler_result import (
    Cost,
    Flood,
    Measured,
    Prefix,
    PrefixRow,
    SchedulerReport,
    Simulated,
    Streamed,
)
from bench.tables import head, ms, table

Row = TypeVar("Row", bound=Struct)

_TITLES = {"crawler": "Crawler (append mode)", "anns": "ANNS (update mode)"}
_NS, _STREAMING = "vLLM-NS", "vLLM-S"
_OURS = ("fcfs", "lcas")
"""The policies of which the goals speak."""
_GOAL_US = {500: 150, 10_000: 1500}


def render(report: SchedulerReport) -> str:
    """All tables."""
    parts = [head(report.command, report.started, report.machine, report.threads, report.load_at_end)]
    if report.simulated is not None:
        parts += [_rates(report.simulated), _pressed(report.simulated)]
    if report.engine is not None:
        parts.append(_engine(report.engine))
    if report.prefix is not None:
        parts.append(_prefix(report.prefix))
    if report.flood is not None:
        parts.append(_flood(report.flood))
    if report.cost:
        parts.append(_cost(report.cost))
    return "\n\n".join(parts) + "\n"


def _rates(found: Simulated) -> str:
    """Figures 8 and 9."""
    tables, worst = [], []
    for (profile, workload), rows in _by(found.rates, "profile", "workload"):
        cells = []
        for _, same in _by(rows, "qps"):
            base, streaming = _named(same, _NS), _named(same, _STREAMING)
            for row in same:
                over = paper.OVER_STREAMING.get((workload, row.qps, row.scheduler))
                cells.append(
                    (
                        f"{row.qps:g}",
                        row.scheduler,
                        *_seconds(row),
                        *_gains(base, row),
                        paper.RATES.get((workload, row.qps, row.scheduler), ""),
                        f"{streaming.p95_s / row.p95_s:.2f}",
                        "" if over is None else f"{over:.2f}",
                        f"{row.busy:.0%}",
                    )
                )
                if row.scheduler in _OURS:
                    worst.append(
                        (base.p99_s / row.p99_s, f"{row.scheduler}, {workload} {row.qps:g}, {profile}")
                    )
        columns = (
            "QPS", "scheduler", "P50, s", "P95, s", "P99, s", "P50 gain", "P95 gain", "P99 gain",
            "paper's gain", "P95 over vLLM-S", "paper", "busy",
        )  # fmt: skip
        tables.append(
            f"{_TITLES[workload]}, {profile}, {rows[0].requests:,} requests:\n\n{table(columns, cells)}"
        )
    least, where = min(worst)
    return (
        "### Streaming prompts by request rate, simulated\n\nTTFT from the last chunk to the first token. "
        "*Gain*: vLLM-NS over it at the same quantile, beside the paper's where it gives any. The pool holds "
        f"{found.pool_tokens:,} tokens. Least gain of fcfs and lcas at P99: {least:.2f} ({where}); "
        "goal: never below 1.\n\n" + "\n\n".join(tables)
    )


def _pressed(found: Simulated) -> str:
    """Tables 3 and 4."""
    tables, verdicts = [], []
    for (profile, workload), rows in _by(found.pressed, "profile", "workload"):
        base = _named(rows, _NS)
        p50, p99 = paper.PRESSED_BASE[workload]
        cells = []
        for (scheduler,), same in _by([row for row in rows if row is not base], "scheduler"):
            for row in same:
                at = paper.EVICTIONS.index(row.eviction)
                key = (workload, scheduler)
                cells.append(
                    (
                        scheduler,
                        row.eviction,
                        f"{base.p50_s / row.p50_s:.2f}",
                        f"{paper.PRESSED_P50[key][at]:.2f}",
                        f"{base.p95_s / row.p95_s:.2f}",
                        f"{base.p99_s / row.p99_s:.2f}",
                        f"{paper.PRESSED_P99[key][at]:.2f}",
                        f"{row.swaps:,.0f} / {row.recomputes:,.0f}",
                        f"{paper.PREEMPTIONS[key][at]:,}",
                        f"{row.many_invalidated:.0%}",
                        str(row.failed),
                    )
                )
            pure = [row.p99_seeds_s for row in same if row.eviction != "cost"]
            ours = [row.p99_seeds_s for row in same if row.eviction == "cost"]
            if scheduler in _OURS and pure and ours:
                verdicts.append(f"{scheduler}, {workload}, {profile}: {over_better(ours[0], pure)}")
        columns = (
            "scheduler", "eviction", "P50 gain", "paper", "P95 gain", "P99 gain", "paper",
            "swapped / recomputed",
            "paper, preemptions", "over 10,000 invalidated", "failed",
        )  # fmt: skip
        tables.append(
            f"{_TITLES[workload]}, {base.qps:g} QPS, {base.delay:g} times the delays, {profile}. vLLM-NS: "
            f"P50 "
            f"{base.p50_s:.2f} s, P99 {base.p99_s:.2f} s (paper {p50} and {p99} "
            f"s).\n\n{table(columns, cells)}"
        )
    return (
        "### Under memory pressure, simulated\n\n*Gain*: vLLM-NS over it at the same quantile, all seeds "
        "together. P99 of the choice by cost over that of the better pure eviction, geometric mean over "
        "seeds and two standard errors to either side (goal: at most 1): "
        + "; ".join(verdicts)
        + ".\n\n"
        + "\n\n".join(tables)
    )


def _engine(found: Measured) -> str:
    columns = (
        "scheduler", "P50, s", "predicted", "P95, s", "predicted", "P99, s", "predicted", "median error",
        "repeat", "pace", "before", "preemptions", "predicted", "failed",
    )  # fmt: skip
    cells = [
        (
            row.scheduler,
            *(f"{value:.3f}" for pair in zip(row.measured_s, row.predicted_s, strict=True) for value in pair),
            f"{row.median_error:.0%}",
            f"{row.repeat_error:.0%}",
            f"{row.measured_pace:.2f}",
            f"{row.pace:.2f}",
            str(row.measured_preemptions),
            str(row.predicted_preemptions),
            str(row.failed),
        )
        for row in found.rows
    ]
    return (
        f"### The same scheduler on the engine\n\nThe crawler's shape with prompts of "
        f"{found.mean_tokens:.0f} tokens "
        f"(1/{found.scale}), {found.requests} requests at {found.qps:.1f} a second, a pool of "
        f"{found.pool_tokens:,} "
        f"tokens, on the embedded model, which computes {found.tokens_a_second:,.0f} tokens a second. The "
        "simulator runs the same trace under the profile measured in this run (median error on passes of "
        f"other shapes {found.profile_error:.0%}), times the pace of a run before on another trace: a "
        "daemon, too, corrects its profile by the passes it runs. *Pace*: what the scheduler's steps took "
        "over what the profile says of their passes, in the predicted run and in the one before. *Median "
        "error*: of single requests' TTFT; goal: below 20 %. *Repeat*: the same of a second measured run. "
        "Pairs of schedulers "
        f"whose predicted P99 lie well apart are in the predicted order when measured: {found.agreeing} of "
        f"{found.pairs}.\n\n" + table(columns, cells)
    )


def _prefix(found: Prefix) -> str:
    return (
        f"### k-LPM by request rate\n\nP99 TTFT in seconds, median over seeds; k = {found.k}. Rates are "
        f"parts of "
        "what the device computes without reuse. *k-LPM / better*: over the one of FCFS and LPM that is "
        "better at this rate, on the same requests: geometric mean over seeds, and two standard errors to "
        "either side; goal: at most 1. *Pace*: what the scheduler's steps took over what the profile says of "
        "their passes.\n\nSimulated, "
        f"{found.profile}:\n\n{_prefix_table(found.simulated)}"
        + _prefix_part("On the engine, embedded model", found.real)
        + _prefix_part("The engine's load, simulated under the profile measured in this run", found.foreseen)
    )


def _prefix_part(title: str, rows: Sequence[PrefixRow]) -> str:
    return f"\n\n{title}:\n\n{_prefix_table(rows)}" if rows else ""


def _prefix_table(rows: Sequence[PrefixRow]) -> str:
    columns = (
        "load", "rate", "a second", "FCFS", "LPM", "k-LPM", "adaptive", "k-LPM / better", "adaptive / better",
        "reused: FCFS", "LPM", "k-LPM", "pace: FCFS", "LPM", "k-LPM",
    )  # fmt: skip
    cells = []
    for (load, part), same in _by(rows, "load", "part"):
        by = {policy: {row.seed: row for row in some} for (policy,), some in _by(same, "policy")}
        fcfs, lpm, klpm, adaptive = (by[name] for name in ("fcfs", "lpm", "klpm", "klpm-adaptive"))
        cells.append(
            (
                load,
                f"{part:g}",
                f"{same[0].qps:.1f}",
                *(
                    f"{median(row.p99_s for row in each.values()):.2f}"
                    for each in (fcfs, lpm, klpm, adaptive)
                ),
                *(_over_better(each, fcfs, lpm) for each in (klpm, adaptive)),
                *(f"{median(row.reused for row in each.values()):.0%}" for each in (fcfs, lpm, klpm)),
                *(f"{median(row.pace for row in each.values()):.2f}" for each in (fcfs, lpm, klpm)),
            )
        )
    return table(columns, cells)


def _over_better(ours: dict[int, PrefixRow], *others: dict[int, PrefixRow]) -> str:
    return over_better(
        [row.p99_s for row in ours.values()],
        [[other[seed].p99_s for seed in ours] for other in others],
    )


def over_better(ours: Sequence[float], others: Sequence[Sequence[float]]) -> str:
    """What ours is of the one of ``others`` that is best on all seeds together; equal places, equal seeds.

    Geometric mean, and two standard errors to either side where there are several seeds.
    """
    logs = max(([log(a / b) for a, b in zip(ours, other, strict=True)] for other in others), key=fmean)
    middle, error = fmean(logs), 2 * stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    around = f" ({exp(middle - error):.2f} to {exp(middle + error):.2f})" if error else ""
    return f"{exp(middle):.2f}{around}"


def _flood(found: Flood) -> str:
    columns = ("", "idle p50", "idle p99", "flood p50", "flood p99", "bound", "flood p99 / bound")
    cells = [
        (
            each.cls,
            ms(each.idle.p50_ms),
            ms(each.idle.p99_ms),
            ms(each.flooded.p50_ms),
            ms(each.flooded.p99_ms),
            ms(each.bound_ms),
            f"{each.flooded.p99_ms / each.bound_ms:.2f}",
        )
        for each in found.asked
    ]
    rates = ", ".join(f"{cls} {rate:,.0f}" for cls, rate in found.tokens_a_second.items())
    return (
        f"### Questions in a flood\n\n{found.prompts} prompts and {found.backlog} bars always wait, in "
        f"passes of at "
        f"most {found.batch_tokens:,} tokens; {found.asked[0].flooded.n} questions of either class, ms. "
        f"Bound: 1.5 times "
        f"the idle p99 plus one batch, the p99 of {found.passes.n} passes without a question "
        f"({ms(found.passes.p99_ms)} ms). Computed meanwhile, tokens a second: {rates}.\n\n"
        + table(columns, cells)
    )


def _cost(found: Sequence[Cost]) -> str:
    columns = (
        "policy", "requests", "pool / wanted", "plan p50", "plan p99", "step p50", "step p99", "sorted anew",
        "sorted / plan",
    )  # fmt: skip
    cells = [
        (
            row.policy,
            f"{row.live:,}",
            f"{row.pool:g}",
            *(f"{us:,.0f}" for us in (row.plan_p50, row.plan_p99, row.step_p50, row.step_p99, row.sorted_us)),
            f"{row.sorted_us / row.plan_p50:.1f}",
        )
        for row in found
    ]
    worst = ", ".join(
        f"{max(row.plan_p50 for row in found if row.live == live):,.0f} us for {live:,} requests (goal "
        f"{goal:,})"
        for live, goal in _GOAL_US.items()
        if any(row.live == live for row in found)
    )
    return (
        "### What scheduling costs\n\nThread time in microseconds. *Plan*: phase 1, order and budgets, "
        "which the paper "
        f"gives as below {paper.SORTING_US[500]:.0f} at P99 for 500 requests. *Step*: everything but the "
        f"forward pass, "
        "over counting readers. *Sorted anew*: ordering all live requests at each step instead. Slowest "
        "policy, "
        f"median plan: {worst or 'not measured'}.\n\n" + table(columns, cells)
    )


def _seconds(row: Streamed) -> tuple[str, str, str]:
    return f"{row.p50_s:.2f}", f"{row.p95_s:.2f}", f"{row.p99_s:.2f}"


def _gains(base: Streamed, row: Streamed) -> tuple[str, str, str]:
    if base is row:
        return "", "", ""
    return (
        f"{base.p50_s / row.p50_s:.2f}",
        f"{base.p95_s / row.p95_s:.2f}",
        f"{base.p99_s / row.p99_s:.2f}",
    )


def _named(rows: Iterable[Streamed], scheduler: str) -> Streamed:
    return next(row for row in rows if row.scheduler == scheduler)


def _by(rows: Sequence[Row], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Rows that agree in these fields, wherever they stand; in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    yield from groups.items()
