"""The scheduler on a real engine beside its simulation: one scaled crawler trace, a profile just measured.

Tokens are divided by a constant; rate and times between chunks follow from what the engine computes a
second, so that the load and the number of prompts under way are those of *Stream2LLM*'s crawler at 4
requests a second. The pool is short, as in its section 6.4, or the policies would hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bench.scheduler_replay import replay
from bench.scheduler_result import Measured, Predicted
from bench.scheduler_simulated import SCHEDULERS
from daemon.cli.profile import ladder_for, model_of
from engine.device import in_own_thread
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


def profile(loaded: LoadedModel, batch_tokens: int, longest: int, *, quick: bool) -> CostModel:
    """The cost model of this engine, measured here and now, for prompts up to ``longest`` tokens."""
    return in_own_thread(lambda: _profile(loaded, ladder_for(longest, batch_tokens, quick=quick)))


def _profile(loaded: LoadedModel, ladder: Ladder) -> CostModel:
    engine = Engine(
        loaded, blocks=ladder.blocks(_BLOCK) + 8, block_size=_BLOCK, frame_limit=loaded.max_positions
    )
    return model_of(measure(engine, ladder), engine, ladder.chunk, "this machine", "foretick bench scheduler")


def rate(costs: CostModel, tokens: float) -> float:
    """Prompts of so many tokens that the engine can compute a second."""
    return 1e9 / costs.recompute_ns(round(tokens))


def run(sizes: Sizes, loaded: LoadedModel, say: Callable[[str], None] = lambda text: None) -> Measured:
    """Every scheduler, first simulated, then measured."""
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
        say(f"engine, {name} ...")
        setup = Setup(
            pool,
            block_size=_BLOCK,
            ordering=Ordering(SCHEDULERS[name]),
            limits=limits(sizes.batch_tokens, pool),
        )
        pace = replay(_inputs(name, before, shape), setup, loaded, costs).pace
        rows.append(_compare(name, setup, load, shape, loaded, costs, pace))
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if abs(a.predicted_s[2] - b.predicted_s[2]) > sizes.apart * min(a.predicted_s[2], b.predicted_s[2])
    ]
    return Measured(
        scale=sizes.scale,
        qps=qps,
        requests=load.requests,
        mean_tokens=mean,
        pool_tokens=pool,
        tokens_a_second=mean * rate(costs, mean),
        profile_error=costs.errors["batch"].median,
        rows=rows,
        pairs=len(pairs),
        agreeing=sum(
            (a.predicted_s[2] < b.predicted_s[2]) == (a.measured_s[2] < b.measured_s[2]) for a, b in pairs
        ),
    )


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
        predicted_s=_quantiles(predicted_ns),
        measured_s=_quantiles(measured_ns),
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


def _quantiles(ttft_ns: NDArray[np.int64]) -> tuple[float, float, float]:
    p50, p95, p99 = np.quantile(ttft_ns / 1e9, (0.5, 0.95, 0.99), method="inverted_cdf")
    return float(p50), float(p95), float(p99)
