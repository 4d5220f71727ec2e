"""The scheduler on a real engine next to its simulation: one scaled crawler trace, a profile just measured.

Tokens are divided by a constant. Rate and times between chunks follow from the engine's tokens per second, so
that the load and the number of prompts in progress match *Stream2LLM*'s crawler at 4 requests a second. The
pool is short, as in its section 6.4; otherwise the policies would hardly differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.engine.contenders import embedded
from bench.figures import AT, Figure, Goal, Setting, quantiles
from bench.run import SuiteRun
from bench.scheduler.replay import replay
from bench.scheduler.simulated import SCHEDULERS
from daemon.cli.profile import ladder_for, model_of
from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.loading import LoadedModel
from engine.profile.timing import measure as measure_costs
from scheduler.costs import CostModel
from scheduler.curves import Curve
from scheduler.policies import Ordering
from scheduler.simulation.distributions import QuantileDistribution
from scheduler.simulation.run import NEVER, Setup, paper_limits, simulate
from scheduler.simulation.workload import CRAWLER, Load, Retrieval, crawler, whole
from scheduler.types import Limits

_BLOCK = 16
_AGREEMENT = "Agreement"
_LIVE = 40
"""Prompts in progress: 9.9 s of retrieval at 4 requests a second."""


@dataclass(frozen=True)
class PredictedSizes:
    """``seconds`` of arrivals, or so many ``requests``. ``scale``: the paper's tokens per token here.

    ``load``: relative to the engine's rate on one prompt alone. ``rehearsal``: share of the requests in an
    earlier run of another trace, which corrects the profile as a running daemon does.

    ``pressure``: mean demand of the prompts in progress over the pool. ``apart``: predicted P99 that differ
    by at least this share are expected in the same order when measured.
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


QUICK = PredictedSizes(
    requests=8, load=20.0, scale=128, batch_tokens=64, quick_profile=True, schedulers=("vLLM-NS", "fcfs")
)


def profile(loaded: LoadedModel, batch_tokens: int, longest: int, *, quick: bool) -> CostModel:
    """The cost model of this engine, measured now, for prompts up to ``longest`` tokens."""
    ladder = ladder_for(longest, batch_tokens, quick=quick)

    def measured() -> CostModel:
        blocks = ladder.blocks(_BLOCK) + 8
        engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
        samples = measure_costs(engine, ladder)
        return model_of(samples, engine, ladder.chunk, "this machine", "foretick bench scheduler")

    return in_own_thread(measured)


def slowed(costs: CostModel, factor: float) -> CostModel:
    """The profile of a device that computes ``factor`` times slower; transfers do not change."""
    curve = costs.recompute
    return msgspec.structs.replace(
        costs,
        recompute=Curve(curve.x, tuple(y * factor for y in curve.y)),
        **{name: getattr(costs, name) * factor for name in ("pass_s", "floor_s", "row_s", "context_s")},
    )


def rate(costs: CostModel, tokens: float) -> float:
    """Prompts of so many tokens that the engine computes per second."""
    return 1e9 / costs.recompute_ns(round(tokens))


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The crawler's shape with shorter prompts on the embedded model, and the simulator on the very same
    trace under the profile measured in this part, times the pace of a run before on another trace: a
    daemon, too, corrects its profile by the passes it runs. *Median error*: of single requests' TTFT; its
    reference is a second measured run instead of the prediction, which no prediction can beat. *Pace*:
    what the scheduler's steps took over what the profile says of their passes.
    """
    sizes, loaded = QUICK if run.quick else PredictedSizes(), embedded(run)
    shape = scaled(CRAWLER, sizes.scale)
    longest = round(shape.tokens.at(1.0))
    costs = profile(loaded, sizes.batch_tokens, longest, quick=sizes.quick_profile)
    mean = shape.tokens.mean
    qps = sizes.load * rate(costs, mean)
    load = Load(qps, sizes.requests or max(8, round(qps * sizes.seconds)), delay=4.0 / qps, seed=1)
    # On average half of an arriving prompt is present; the pool always holds the longest.
    pool = max(round(_LIVE * mean / 2 / sizes.pressure), 2 * longest)
    setting: Setting = {
        "prompts' mean tokens": round(mean), "paper's tokens for one": sizes.scale, "requests": load.requests,
        "a second": round(qps, 1), "pool": pool, "tokens computed a second": round(mean * rate(costs, mean)),
    }  # fmt: skip
    before = replace(load, requests=max(4, round(sizes.rehearsal * load.requests)), seed=2)
    found: list[Figure] = []
    for name in sizes.schedulers:
        run.say(f"engine, {name} ...")
        ordering = Ordering(SCHEDULERS[name])
        setup = Setup(pool, block_size=_BLOCK, ordering=ordering, limits=limits(sizes.batch_tokens, pool))
        found += _compared(name, setup, (before, load), shape, loaded, costs, {**setting, "scheduler": name})
    yield from found
    yield from agreement(found, sizes.apart)
    error = costs.errors["batch"].median
    yield Figure("median error of the profile on passes of other shapes", error, "share", _AGREEMENT)


def agreement(found: Sequence[Figure], apart: float) -> Iterator[Figure]:
    """How many pairs whose predicted P99 differ by ``apart`` have that order when measured."""
    p99 = [(f.ours, f.reference) for f in found if f.name == "TTFT P99" and isinstance(f.reference, float)]
    pairs = [(a, b) for a, b in combinations(p99, 2) if abs(a[1] - b[1]) > apart * min(a[1], b[1])]
    agreeing = sum((a[1] < b[1]) == (a[0] < b[0]) for a, b in pairs)
    if pairs:
        goal, name = Goal(1.0, "at least"), "pairs of schedulers in the predicted order"
        yield Figure(name, agreeing, "", _AGREEMENT, {}, "pairs well apart", float(len(pairs)), goal=goal)


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
    return replace(shape, tokens=QuantileDistribution(tuple((p, n / scale) for p, n in shape.tokens.points)))


def _compared(
    scheduler: str,
    setup: Setup,
    loads: tuple[Load, Load],
    shape: Retrieval,
    loaded: LoadedModel,
    costs: CostModel,
    setting: Setting,
) -> Iterator[Figure]:
    """One scheduler; ``loads``: of the rehearsal, and of the predicted run.

    Requests that fail, measured or predicted, are counted and left out of everything else.
    """
    before, load = (
        [*(whole(crawler(each, shape)) if scheduler == "vLLM-NS" else crawler(each, shape))] for each in loads
    )
    pace = replay(before, setup, loaded, costs).pace
    simulated = simulate(iter(load), setup, slowed(costs, pace))
    measured, again = (replay(load, setup, loaded, costs) for _ in range(2))
    answered = simulated.answered & (measured.ttft_ns != NEVER) & (again.ttft_ns != NEVER)
    columns, ours = simulated.columns, measured.ttft_ns[answered]
    predicted = (columns["first_token_ns"] - columns["last_input_ns"])[answered]
    preemptions = int(columns["swaps"].sum() + columns["recomputes"].sum())
    figure = partial(Figure, setting=setting)
    for name, at in AT.items():
        seconds, expected = (quantiles(ns / 1e9, at)[0] for ns in (ours, predicted))
        yield figure(f"TTFT {name}", seconds, "s", against="predicted", reference=expected)
    error, least = _median_error(predicted, ours), _median_error(again.ttft_ns[answered], ours)
    goal = Goal(0.2, of="ours")
    yield figure("median error", error, "share", against="second run", reference=least, goal=goal)
    yield figure("pace", measured.pace, against="run before", reference=pace)
    yield figure("preemptions", measured.preempted, against="predicted", reference=preemptions)
    yield figure("failed", int((~answered).sum()))


def _median_error(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    return float(np.median(np.abs(one - other) / other))
