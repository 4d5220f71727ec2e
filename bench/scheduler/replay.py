"""Workloads on a real engine, in real time."""

import random
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from engine.step import Chunk, Executor, SampledToken
from lab.profile.cost_model import ladder_for, model_of
from lab.profile.timing import measure as measure_costs
from lab.simulation.inputs import Input
from lab.simulation.run import NEVER, Setup, go_on
from regions.prefix_index import PrefixIndex
from scheduler.costs import CostModel, spans_of
from scheduler.interfaces import PriorityClass
from scheduler.request import LifecycleEvent, Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.worker import Worker

_BLOCK = 16
_SPECIAL = 3
"""Token ids without a text."""
_DRAIN_S = 120.0


def profile(loaded: LoadedModel, batch_tokens: int, longest: int, *, quick: bool) -> CostModel:
    """The cost model of this engine, measured now, for prompts up to ``longest`` tokens."""
    ladder = ladder_for(longest, batch_tokens, quick=quick)

    def measured() -> CostModel:
        blocks = ladder.blocks(_BLOCK) + 8
        engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
        samples = measure_costs(engine, ladder)
        return model_of(samples, engine, ladder.chunk, "this machine", "foretick bench scheduler")

    return in_own_thread(measured)


class Replayed(NamedTuple):
    """A replay; times in ns."""

    ttft_ns: NDArray[np.int64]
    """[requests] in order of opening, from the last input as in the simulator; NEVER: it failed."""
    prompt_tokens: int
    reused_tokens: int
    """Of the prompts, those found in the prefix cache."""
    computed_tokens: int
    passes_ns: int
    predicted_ns: int
    """What the passes took, and what the profile says of them."""
    span_ns: int
    """From the beginning of the first pass to the end of the last."""


class TimedPasses:
    """An executor, with what its passes computed and took; ``costs`` predict the latter."""

    def __init__(self, executor: Executor, costs: CostModel) -> None:
        self._executor, self._costs = executor, costs
        self.tokens = self.took_ns = self.predicted_ns = self.ended_ns = 0
        self.began_ns: int | None = None

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `Executor`."""
        spans = spans_of(batch)
        began = time.monotonic_ns()
        rows = self._executor.execute(batch)
        self.ended_ns = time.monotonic_ns()
        self.began_ns = began if self.began_ns is None else self.began_ns
        self.took_ns += self.ended_ns - began
        self.predicted_ns += self._costs.batch_ns(spans)
        self.tokens += sum(n for _, n in spans)
        return rows


def replay(inputs: Iterable[Input], setup: Setup, loaded: LoadedModel, costs: CostModel) -> Replayed:
    """Run a workload in real time on a new engine of ``setup``'s pool, without a host tier.

    Raises RuntimeError when requests do not end.
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
    passes = TimedPasses(engine, costs)
    scheduler = Scheduler(
        passes,
        engine.pool,
        setup.limits,
        time.monotonic_ns,
        ordering=setup.ordering,
        costs=costs,
        index=PrefixIndex(engine.cache) if setup.ordering.by_prefix else None,
        rng=random.Random(setup.seed),
    )
    requests = _run(scheduler, engine, inputs)
    firsts = [None if each.error else each.first(LifecycleEvent.KV_ON_GPU) for each in requests]
    ttft = np.array(
        [
            NEVER if first is None else first - each.last_chunk_ns
            for first, each in zip(firsts, requests, strict=True)
        ],
        np.int64,
    )
    return Replayed(
        ttft,
        sum(len(request.prompt) for request in requests),
        sum(request.cached_tokens for request in requests),
        passes.tokens,
        passes.took_ns,
        passes.predicted_ns,
        passes.ended_ns - (passes.began_ns or 0),
    )


def _run(scheduler: Scheduler, engine: Engine, inputs: Iterable[Input]) -> list[Request]:
    """Feed ``inputs`` at their times and wait for all requests; returns them in order of opening."""
    # modulo the model's vocabulary: equal ids stay equal, different ones may become equal by chance
    vocabulary = engine.model.sizes.vocabulary - _SPECIAL
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
