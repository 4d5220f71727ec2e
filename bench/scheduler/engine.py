"""Workloads on a real engine, in real time; one of them, a scaled crawler trace, next to its simulation.

Tokens are divided by a constant. Rate and times between chunks follow from the engine's tokens per second, so
that the load and the number of prompts in progress match *Stream2LLM*'s crawler at 4 requests a second. The
pool is short, as in its section 6.4; otherwise the policies would hardly differ.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.engine.contenders import embedded
from bench.figures import AT, Figure, Goal, Setting, quantiles
from bench.run import SuiteRun
from bench.scheduler.simulated import SCHEDULERS
from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from engine.step import Chunk, SampledToken
from lab.profile.cost_model import ladder_for, model_of
from lab.profile.timing import measure as measure_costs
from lab.simulation.distributions import QuantileDistribution
from lab.simulation.inputs import Input
from lab.simulation.run import NEVER, Setup, go_on, paper_limits, simulate
from lab.simulation.workload import CRAWLER, Load, Retrieval, crawler, whole
from regions.prefix_index import PrefixIndex
from scheduler.costs import CostModel, spans_of
from scheduler.curves import CostCurve
from scheduler.interfaces import Limits, PriorityClass
from scheduler.policies import Ordering
from scheduler.request import LifecycleEvent, Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.worker import Worker

Inputs = Sequence[Input]
_BLOCK = 16
_AGREEMENT = "Agreement"
_LIVE = 40
"""Prompts in progress: 9.9 s of retrieval at 4 requests a second."""
_PRESSURE = 1.25
"""Mean demand of the prompts in progress over the pool."""
_SECONDS = 25.0
"""Of arrivals."""
_SPECIAL = 3
"""Token ids without a text."""
_DRAIN_S = 120.0


def slowed(costs: CostModel, factor: float) -> CostModel:
    """The profile of a device that computes ``factor`` times slower; transfers do not change."""
    curve = costs.recompute
    return msgspec.structs.replace(
        costs,
        recompute=CostCurve(curve.x, tuple(y * factor for y in curve.y)),
        **{name: getattr(costs, name) * factor for name in ("pass_s", "floor_s", "row_s", "context_s")},
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


def rate(costs: CostModel, tokens: float) -> float:
    """Prompts of ``tokens`` tokens that the engine computes per second."""
    return 1e9 / costs.recompute_ns(round(tokens))


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The crawler's shape with shorter prompts on the embedded model, and the simulator on the very same
    trace under the profile measured in this part, times the pace of a run before on another trace: a
    daemon, too, corrects its profile by the passes it runs. *Median error*: of single requests' TTFT; its
    reference is a second measured run instead of the prediction, which no prediction can beat. *Pace*:
    what the scheduler's steps took over what the profile says of their passes.
    """
    scale, part, batch_tokens = run.sized((16, 0.3, 512), (128, 20.0, 64))
    loaded, shape = embedded(run), scaled(CRAWLER, scale)
    longest, mean = round(shape.tokens.at(1.0)), shape.tokens.mean
    costs = profile(loaded, batch_tokens, longest, quick=run.quick)
    qps = part * rate(costs, mean)  # part: of the engine's rate on one prompt alone
    load = Load(qps, run.sized(max(8, round(qps * _SECONDS)), 8), delay=4.0 / qps, seed=1)
    # On average half of an arriving prompt is present; the pool always holds the longest.
    pool = max(round(_LIVE * mean / 2 / _PRESSURE), 2 * longest)
    setting: Setting = {
        "prompts' mean tokens": round(mean), "paper's tokens for one": scale, "requests": load.requests,
        "a second": round(qps, 1), "pool": pool, "tokens computed a second": round(mean * rate(costs, mean)),
    }  # fmt: skip
    rehearsal = replace(load, requests=max(4, load.requests // 2), seed=2)
    found: list[Figure] = []
    for name in run.sized(tuple(SCHEDULERS), ("vLLM-NS", "fcfs")):
        run.say(f"engine, {name} ...")
        ordering = Ordering(SCHEDULERS[name])
        setup = Setup(pool, block_size=_BLOCK, ordering=ordering, limits=limits(batch_tokens, pool))
        traces = (crawler(each, shape) for each in (rehearsal, load))
        before, predicted = (list(whole(trace) if name == "vLLM-NS" else trace) for trace in traces)
        found += _compared(setup, before, predicted, loaded, costs, {**setting, "scheduler": name})
    yield from found
    yield from agreement(found)
    error = costs.errors["batch"].median
    yield Figure("median error of the profile on passes of other shapes", error, "share", _AGREEMENT)


def agreement(found: Sequence[Figure], apart: float = 0.25) -> Iterator[Figure]:
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
    setup: Setup, before: Inputs, load: Inputs, loaded: LoadedModel, costs: CostModel, setting: Setting
) -> Iterator[Figure]:
    """One scheduler on ``load``, with the pace of the run ``before``.

    Requests that fail, measured or predicted, are counted and left out of everything else.
    """
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


@dataclass(frozen=True)
class Replayed:
    """``ttft_ns`` by request, [requests] in order of opening, `NEVER` for those that failed.

    ``preempted``: preemptions of all of them. ``reused``: share of the prompts' tokens that came from the
    prefix cache. ``pace``: duration of the scheduler's steps over what the costs predict for their passes.
    """

    ttft_ns: NDArray[np.int64]
    preempted: int
    reused: float
    pace: float


class _Timed(Scheduler):
    """Records the duration of its steps that did something."""

    busy_ns = 0

    def step(self) -> bool:
        began = time.monotonic_ns()
        worked = super().step()
        if worked:
            self.busy_ns += time.monotonic_ns() - began
        return worked


class _Counting:
    """An executor that adds up the predicted costs of its passes."""

    def __init__(self, executor: Engine, costs: CostModel) -> None:
        self.predicted_ns = 0
        self._executor, self._costs = executor, costs

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        self.predicted_ns += self._costs.batch_ns(spans_of(batch))
        return self._executor.execute(batch)


def replay(inputs: Iterable[Input], setup: Setup, loaded: LoadedModel, costs: CostModel) -> Replayed:
    """Run a workload in real time on a new engine of ``setup``'s pool, without a host tier.

    TTFT counts from the last input, as in the simulator. Raises RuntimeError when requests do not end.
    """
    engine = in_own_thread(
        lambda: Engine(
            loaded,
            blocks=setup.pool_tokens // setup.block_size,
            block_size=setup.block_size,
            frame_limit=loaded.max_positions,
            cache_tokens=None if setup.prefix_cache else 0,
        )
    )
    executor = _Counting(engine, costs)
    scheduler = _Timed(
        executor,
        engine.pool,
        setup.limits,
        time.monotonic_ns,
        ordering=setup.ordering,
        costs=costs,
        index=PrefixIndex(engine.cache) if setup.ordering.by_prefix else None,
        rng=random.Random(setup.seed),
    )
    requests = _run(scheduler, engine, inputs)
    preempted = sum(len(request.preempted_by) for request in requests)
    reused = sum(request.cached_tokens for request in requests) / sum(len(r.prompt) for r in requests)
    ttft = np.array([_ttft_ns(request) for request in requests], np.int64)
    return Replayed(ttft, preempted, reused, scheduler.busy_ns / executor.predicted_ns)


def _run(scheduler: Scheduler, engine: Engine, inputs: Iterable[Input]) -> list[Request]:
    """Feed ``inputs`` at their times and wait for all requests; returns them in order of opening."""
    # modulo the model's vocabulary: equal ids stay equal, different ones may become equal by chance
    vocabulary = int(engine.model.model.config.vocab_size) - _SPECIAL
    of = partial(RequestSpec, PriorityClass.POOL, "", open_prompt=engine.open_prompt)
    requests: dict[int, Request] = {}
    ended = threading.Semaphore(0)
    worker = Worker(scheduler)
    worker.start()
    try:
        began = time.monotonic_ns()
        for piece in inputs:
            time.sleep(max(0.0, (began + piece.time_ns - time.monotonic_ns()) / 1e9))
            tokens = [_SPECIAL + token % vocabulary for token in piece.tokens]
            if piece.op != "open":
                go_on(scheduler, requests[piece.request].id, piece, tokens)
                continue
            spec = of(tokens, piece.max_tokens, lambda request: ended.release(), complete=piece.last)
            requests[piece.request] = Request(spec)
            scheduler.submit(requests[piece.request])
        deadline = time.monotonic() + _DRAIN_S
        for left in range(len(requests), 0, -1):
            if not ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"{left} requests are still in progress")
    finally:
        worker.stop(0.0)
    return [requests[number] for number in sorted(requests)]


def _ttft_ns(request: Request) -> int:
    first = None if request.error else request.first(LifecycleEvent.KV_ON_GPU)
    return NEVER if first is None else first - request.last_chunk_ns
