"""The scheduler on a real engine beside its simulation: one scaled crawler trace, a profile just measured.

Tokens are divided by a constant; rate and times between chunks follow from what the engine computes a
second, so that the load and the number of prompts under way are those of *Stream2LLM*'s crawler at 4
requests a second. The pool is short, as in its section 6.4, or the policies would hardly differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bench.figures import Figure, Goal, quantiles
from bench.run import Run
from bench.scheduler import models
from bench.scheduler.replay import replay
from bench.scheduler.simulated import SCHEDULERS
from daemon.cli.profile import ladder_for, model_of
from engine.apart import apart
from engine.engine import Engine
from engine.model.loading import LoadedModel
from engine.profile.timing import Ladder, measure
from scheduler.costs import CostModel
from scheduler.policies import Ordering
from scheduler.simulation.distributions import Quantiles
from scheduler.simulation.inputs import Input
from scheduler.simulation.run import NEVER, Setup, paper_limits, simulate
from scheduler.simulation.workload import CRAWLER, Load, Retrieval, crawler, whole
from scheduler.types import Limits

_BLOCK = 16
_AT = (0.5, 0.95, 0.99)
_LIVE = 40
"""Prompts under way: 9.9 s of retrieval at 4 requests a second."""


@dataclass(frozen=True)
class Sizes:
    """``seconds`` of arrivals, or so many ``requests``. ``scale``: tokens of the paper's for one here.

    ``load``: of what the engine computes of one prompt alone. ``rehearsal``: part of the requests of a run
    before, of another trace, by which the profile is corrected, as a daemon corrects it while it runs.

    ``pressure``: what the prompts under way hold on the average, over the pool. ``apart``: predicted P99 that
    differ by at least this part are expected to be in the same order when measured.
    """

    seconds: float = 25.0
    requests: int | None = None
    scale: int = 16
    load: float = 0.3
    rehearsal: float = 0.5
    pressure: float = 1.25
    batch_tokens: int = 512
    apart: float = 0.25
    quick_profile: bool = False
    schedulers: Sequence[str] = tuple(SCHEDULERS)


QUICK = Sizes(
    requests=8, load=20.0, scale=128, batch_tokens=64, quick_profile=True, schedulers=("vLLM-NS", "fcfs")
)


def profile(loaded: LoadedModel, batch_tokens: int, longest: int, *, quick: bool) -> CostModel:
    """The cost model of this engine, measured here and now, for prompts up to ``longest`` tokens."""
    return apart(lambda: _profile(loaded, ladder_for(longest, batch_tokens, quick=quick)))


def _profile(loaded: LoadedModel, ladder: Ladder) -> CostModel:
    engine = Engine(
        loaded, blocks=ladder.blocks(_BLOCK) + 8, block_size=_BLOCK, frame_limit=loaded.max_positions
    )
    return model_of(measure(engine, ladder), engine, ladder.chunk, "this machine", "foretick bench scheduler")


def rate(costs: CostModel, tokens: float) -> float:
    """Prompts of so many tokens that the engine can compute a second."""
    return 1e9 / costs.recompute_ns(round(tokens))


@dataclass(frozen=True)
class Predicted:
    """One scheduler simulated and measured on the same trace; TTFT P50, P95, P99 in seconds.

    ``median_error``: of the single requests, |predicted - measured| / measured. ``repeat_error``: the same
    for a second measured run in the prediction's place. ``pace``: time of the scheduler's steps over what
    the profile says of their passes, in the run before; ``measured_pace``: in the run that was predicted.
    ``failed``: requests that failed in either, left out of everything else.
    """

    scheduler: str
    predicted_s: Sequence[float]
    measured_s: Sequence[float]
    median_error: float
    repeat_error: float
    pace: float
    measured_pace: float
    predicted_preemptions: int
    measured_preemptions: int
    failed: int


def measure(run: Run) -> Iterator[Figure]:
    """Every scheduler, first simulated, then measured."""
    sizes, loaded = QUICK if run.quick else Sizes(), models.embedded(run)
    shape = scaled(CRAWLER, sizes.scale)
    longest = round(shape.tokens.at(1.0))
    costs = profile(loaded, sizes.batch_tokens, longest, quick=sizes.quick_profile)
    mean = shape.tokens.mean
    qps = sizes.load * rate(costs, mean)
    load = Load(qps, sizes.requests or max(8, round(qps * sizes.seconds)), delay=4.0 / qps, seed=1)
    # Half of a prompt is there on the average while it comes in; the pool holds the longest in any case.
    pool = max(round(_LIVE * mean / 2 / sizes.pressure), 2 * longest)
    rows = []
    before = replace(load, requests=max(4, round(sizes.rehearsal * load.requests)), seed=2)
    for name in sizes.schedulers:
        run.say(f"engine, {name} ...")
        setup = Setup(
            pool,
            block_size=_BLOCK,
            ordering=Ordering(SCHEDULERS[name]),
            limits=limits(sizes.batch_tokens, pool),
        )
        pace = replay(_inputs(name, before, shape), setup, loaded, costs).pace
        rows.append(_compare(name, setup, load, shape, loaded, costs, pace))
    setting: dict[str, str | int | float] = {
        "prompts' mean tokens": round(mean), "paper's tokens for one": sizes.scale, "requests": load.requests,
        "a second": round(qps, 1), "pool": pool, "tokens computed a second": round(mean * rate(costs, mean)),
    }  # fmt: skip
    yield from figures(rows, setting, costs.errors["batch"].median, sizes.apart)


def figures(
    rows: Sequence[Predicted], setting: dict[str, str | int | float], profile_error: float, apart: float
) -> Iterator[Figure]:
    """Each scheduler, then how many pairs whose predicted P99 differ by ``apart`` have the predicted order."""
    for row in rows:
        mine = {**setting, "scheduler": row.scheduler}
        for name, ours, predicted in zip(("P50", "P95", "P99"), row.measured_s, row.predicted_s, strict=True):
            yield Figure(f"TTFT {name}", ours, "s", "", mine, "predicted", predicted)
        error, goal = row.median_error, Goal(0.2, of="ours")
        yield Figure("median error", error, "share", "", mine, "second run", row.repeat_error, goal=goal)
        yield Figure("pace", row.measured_pace, "", "", mine, "run before", row.pace)
        preemptions = row.measured_preemptions
        yield Figure("preemptions", preemptions, "", "", mine, "predicted", row.predicted_preemptions)
        yield Figure("failed", row.failed, "", "", mine)
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if abs(a.predicted_s[2] - b.predicted_s[2]) > apart * min(a.predicted_s[2], b.predicted_s[2])
    ]
    agreeing = sum(
        (a.predicted_s[2] < b.predicted_s[2]) == (a.measured_s[2] < b.measured_s[2]) for a, b in pairs
    )
    goal = Goal(1.0, "at least") if pairs else None
    table, of = "Agreement", "pairs well apart"
    yield Figure("pairs measured in the predicted order", agreeing, "", table, {}, of, len(pairs), goal=goal)
    yield Figure("median error of the profile on passes of other shapes", profile_error, "share", table)


def limits(batch_tokens: int, pool_tokens: int) -> Limits:
    """The paper's batching in passes that a CPU runs in a fraction of a second."""
    return paper_limits(
        max_batch_tokens=batch_tokens,
        chunk_min=batch_tokens,
        chunk_max=batch_tokens,
        eviction="recompute",
        max_prompt_tokens=pool_tokens,
    )


def scaled(shape: Retrieval, scale: int) -> Retrieval:
    """The same shape with shorter prompts."""
    return replace(shape, tokens=Quantiles(tuple((p, n / scale) for p, n in shape.tokens.points)))


def _compare(
    name: str, setup: Setup, load: Load, shape: Retrieval, loaded: LoadedModel, costs: CostModel, pace: float
) -> Predicted:
    simulated = simulate(_inputs(name, load, shape), setup, costs.scaled(pace))
    measured, again = (replay(_inputs(name, load, shape), setup, loaded, costs) for _ in range(2))
    answered = simulated.answered & (measured.ttft_ns != NEVER) & (again.ttft_ns != NEVER)
    columns = simulated.columns
    predicted_ns = (columns["first_token_ns"] - columns["last_input_ns"])[answered]
    measured_ns = measured.ttft_ns[answered]
    return Predicted(
        scheduler=name,
        predicted_s=quantiles(predicted_ns / 1e9, *_AT),
        measured_s=quantiles(measured_ns / 1e9, *_AT),
        median_error=_median_error(predicted_ns, measured_ns),
        repeat_error=_median_error(again.ttft_ns[answered], measured_ns),
        pace=pace,
        measured_pace=measured.pace,
        predicted_preemptions=int(columns["swaps"].sum() + columns["recomputes"].sum()),
        measured_preemptions=measured.preempted,
        failed=int((~answered).sum()),
    )


def _inputs(name: str, load: Load, shape: Retrieval) -> Iterator[Input]:
    pieces = crawler(load, shape)
    return iter(whole(pieces) if name == "vLLM-NS" else pieces)


def _median_error(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    return float(np.median(np.abs(one - other) / other))

