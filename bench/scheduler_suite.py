"""One run of `foretick bench scheduler`: what is timed first, the simulated parts last."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from bench import (
    machine,
    questions,
    scheduler_cost,
    scheduler_engine,
    scheduler_flood,
    scheduler_prefix,
    scheduler_simulated,
)
from bench.scheduler_result import SchedulerReport
from engine.device import in_own_thread
from engine.model.loading import LoadedModel


@dataclass(frozen=True)
class Plan:
    """All parts' sizes."""

    cost: scheduler_cost.Plan
    flood: scheduler_flood.Sizes
    engine: scheduler_engine.Sizes
    prefix: scheduler_prefix.Sizes
    simulated: scheduler_simulated.Sizes


FULL = Plan(
    scheduler_cost.Plan(),
    scheduler_flood.Sizes(),
    scheduler_engine.Sizes(),
    scheduler_prefix.Sizes(),
    scheduler_simulated.Sizes(),
)
QUICK = Plan(
    scheduler_cost.Plan(live=(40,), policies=("fcfs", "klpm"), steps=10, warm=2, naive=5),
    scheduler_flood.Sizes(
        records=12, questions=3, backlog=12, prompts=3, prompt_tokens=64, answer=2, batch_tokens=128
    ),
    scheduler_engine.Sizes(
        requests=8, load=20.0, scale=128, batch_tokens=64, quick_profile=True, schedulers=("vLLM-NS", "fcfs")
    ),
    scheduler_prefix.Sizes(
        rates=(1.2,),
        requests=24,
        seeds=(0,),
        processes=0,
        real_rates=(50.0,),
        real_requests=4,
        real_seeds=(0,),
        batch_tokens=64,
        quick_profile=True,
    ),
    scheduler_simulated.Sizes(
        workloads=(
            replace(scheduler_simulated.CRAWLER, qps=(4.0,), requests=24),
            replace(scheduler_simulated.ANNS, qps=(2.0,), requests=12, seeds=(0,)),
        ),
        profiles=("h200-saturation",),
        evictions=("recompute", "cost"),
        pool_tokens=60_000,
        processes=0,
    ),
)


def measure(
    command: str,
    started: str,
    threads: int,
    parts: Collection[str],
    *,
    quick: bool,
    say: Callable[[str], None],
    keep: Callable[[SchedulerReport], None],
) -> SchedulerReport:
    """Run ``parts``; ``say`` tells what is under way, ``keep`` gets what there is after each."""
    torch.set_num_threads(threads)
    plan = QUICK if quick else FULL
    report = SchedulerReport(command, started, threads, machine.describe())
    loaded, _ = in_own_thread(lambda: questions.load(questions.EMBEDDED.shape))
    for name, work in _works(plan, loaded, say):
        if name in parts:
            say(f"{name} ...")
            found = {name: work()}
            report = msgspec.structs.replace(report, load_at_end=os.getloadavg()[0], **found)
            keep(report)
    return report


def _works(
    plan: Plan, loaded: LoadedModel, say: Callable[[str], None]
) -> Sequence[tuple[str, Callable[[], Any]]]:
    return (
        ("cost", lambda: scheduler_cost.run(plan.cost)),
        ("flood", lambda: scheduler_flood.run(plan.flood, loaded)),
        ("engine", lambda: scheduler_engine.run(plan.engine, loaded, say)),
        ("prefix", lambda: scheduler_prefix.run(plan.prefix, loaded, say)),
        ("simulated", lambda: scheduler_simulated.run(plan.simulated)),
    )
