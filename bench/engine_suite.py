"""One run of `foretick bench engine`: part after part, the machine's rates in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from bench import engine_batches, engine_bookkeeping, engine_refresh, engine_window, machine, questions
from bench.engine_floor import Shape
from bench.engine_limits import LimitsProbe
from bench.engine_result import EngineReport
from bench.scenario import Size
from engine.model.loading import LoadedModel


@dataclass(frozen=True)
class Plan:
    """All parts' sizes for one model."""

    questions: questions.Plan
    batches: engine_batches.Plan
    window: engine_window.Plan
    refresh: engine_refresh.Plan
    bookkeeping: engine_bookkeeping.Plan


_DENSE_ROUNDS = (0, 6, 14)
"""Rounds of the scenario at about 2k, 8k and 16k tokens: the dense reference runs there, once each."""

FULL = Plan(
    replace(questions.EIGHTY, dense_rounds=_DENSE_ROUNDS),
    engine_batches.Plan(),
    engine_window.Plan(),
    engine_refresh.Plan(),
    engine_bookkeeping.Plan(),
)
QUICK = Plan(
    replace(questions.EMBEDDED, size=Size(20, 3, 11), repeats=3, dense_rounds=(0, 2)),
    engine_batches.Plan(3, 12, (2, 4), 30, 3, 2, 12, repeats=2),
    engine_window.Plan(12, updates=6, bars=5, frame_limit=400, repeats=2, dense=1),
    engine_refresh.Plan(20, 5, 4),
    engine_bookkeeping.Plan((208, 2_000), 20),
)


def measure(
    command: str,
    started: str,
    threads: int,
    parts: Collection[str],
    *,
    quick: bool,
    say: Callable[[str], None],
    keep: Callable[[EngineReport], None],
) -> EngineReport:
    """Run ``parts``; ``say`` tells what is under way, ``keep`` gets what there is after each.

    Raises Disagreement.
    """
    torch.set_num_threads(threads)
    plan = QUICK if quick else FULL
    described = machine.describe()
    loaded, plain = questions.load(plan.questions.shape)
    probe = LimitsProbe(256, 1 << 20) if quick else LimitsProbe()
    report = EngineReport(
        command, started, threads, described, shape_of(plan.questions.name, loaded), probe.look()
    )
    for name, work in _works(plan, loaded, plain):
        if name in parts:
            say(f"{name} ...")
            found = {name: work()}
            report = msgspec.structs.replace(
                report, limits=probe.look(), load_at_end=os.getloadavg()[0], **found
            )
            keep(report)
    return report


def _works(plan: Plan, loaded: LoadedModel, plain: Any) -> Sequence[tuple[str, Callable[[], Any]]]:
    return (
        ("questions", lambda: questions.race(plan.questions, loaded, plain)),
        ("sessions", lambda: engine_batches.sessions(plan.batches, loaded, plain)),
        ("window", lambda: engine_window.run(plan.window, loaded, plain)),
        ("standing", lambda: engine_batches.standing(plan.batches, loaded)),
        ("prefix", lambda: engine_batches.prefix(plan.batches, loaded)),
        ("refresh", lambda: engine_refresh.measure(plan.refresh, loaded)),
        ("bookkeeping", lambda: engine_bookkeeping.run(plan.bookkeeping)),
    )


def shape_of(name: str, loaded: LoadedModel) -> Shape:
    """Of a loaded dense decoder whose layers are alike, for its floors."""
    head = loaded.model.get_output_embeddings()
    matrices = [m.weight for m in loaded.model.modules() if isinstance(m, nn.Linear) and m is not head]
    return Shape(
        model=name,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        linear_parameters=sum(weight.numel() for weight in matrices),
        layers=len(loaded.layers),
        q_heads=loaded.model.config.num_attention_heads,
        kv_heads=loaded.layers[0].kv_heads,
        head_dim=loaded.layers[0].key_dim,
        value_bytes=loaded.dtype.itemsize,
    )
