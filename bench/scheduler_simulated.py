"""The workloads of *Stream2LLM* in simulated time: all policies by request rate, then under memory pressure.

The same requests go through every scheduler. `vLLM-NS` gets each prompt when it is complete, the others
piece by piece; TTFT counts from the last piece in every case. Runs are independent of one another and of
the machine, so they are spread over processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.scheduler_result import Simulated, Streamed
from scheduler.costs import load
from scheduler.policies import Ordering
from scheduler.simulation.run import Result, Setup, paper_limits, simulate
from scheduler.simulation.workload import WORKLOADS, Load, whole

POOL_TOKENS = 1_600_000
"""Llama-3.1-8B on two H200 as in section 6.1: 0.8 of 2 x 141 GB less 16 GB of weights, 128 KiB a token."""
SCHEDULERS = {"vLLM-NS": "vllm", "vLLM-S": "vllm", "fcfs": "fcfs", "lcas": "lcas", "mcps": "mcps"}
"""What stands in the tables, and the policy it runs under."""
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


def run(sizes: Sizes) -> Simulated:
    """Every case of both experiments."""
    rates = list(_rates(sizes))
    cases = [*rates, *_pressed(sizes)]
    work = partial(_run, sizes.pool_tokens)
    if sizes.processes:
        with ProcessPoolExecutor(sizes.processes, multiprocessing.get_context("spawn")) as pool:
            rows = list(pool.map(work, cases))
    else:
        rows = [work(case) for case in cases]
    return Simulated(sizes.pool_tokens, rows[: len(rates)], rows[len(rates) :])


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


def _run(pool_tokens: int, case: Case) -> Streamed:
    results = [_simulated(pool_tokens, case, seed) for seed in case.workload.seeds]
    ttft = _joined(result.ttft_ns for result in results) / 1e9
    invalidated = _joined(result.columns["invalidated_tokens"] for result in results)
    p50, p95, p99 = np.quantile(ttft, (0.5, 0.95, 0.99), method="inverted_cdf")
    return Streamed(
        workload=case.workload.name,
        profile=case.profile,
        qps=case.qps,
        delay=case.delay,
        scheduler=case.scheduler,
        eviction=case.eviction,
        requests=sum(len(result.answered) for result in results),
        failed=sum(int((~result.answered).sum()) for result in results),
        mean_s=float(ttft.mean()),
        p50_s=float(p50),
        p95_s=float(p95),
        p99_s=float(p99),
        p99_seeds_s=[float(np.quantile(result.ttft_ns / 1e9, 0.99)) for result in results],
        completion_s=float(np.mean([result.ended_ns / 1e9 for result in results])),
        busy=float(np.mean([result.busy_ns / result.ended_ns for result in results])),
        swaps=_mean(results, "swaps"),
        recomputes=_mean(results, "recomputes"),
        many_invalidated=float((invalidated > _MANY).mean()),
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
