"""A workload in real time: the daemon's scheduler, worker and readers, fed at the inputs' times."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.loading import LoadedModel
from engine.step import Chunk, SampledToken
from regions.watch import PrefixWatch
from scheduler.costs import CostModel, spans_of
from scheduler.request import Event, Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.simulation.inputs import Input
from scheduler.simulation.run import NEVER, Setup, go_on
from scheduler.types import PriorityClass
from scheduler.worker import Worker

_SPECIAL = 3
"""Token ids without a text."""
_DRAIN_S = 120.0


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
        self.told_ns = 0
        self._executor, self._costs = executor, costs

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        self.told_ns += self._costs.batch_ns(spans_of(batch))
        return self._executor.execute(batch)


def replay(inputs: Iterable[Input], setup: Setup, loaded: LoadedModel, costs: CostModel) -> Replayed:
    """Run a workload to its end on a new engine of ``setup``'s pool, without a host tier.

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
        index=PrefixWatch(engine.cache) if setup.ordering.by_prefix else None,
        rng=random.Random(setup.seed),
    )
    requests = _run(scheduler, engine, inputs)
    preempted = sum(len(request.preempted_by) for request in requests)
    reused = sum(request.cached_tokens for request in requests) / sum(len(r.prompt) for r in requests)
    ttft = np.array([_ttft_ns(request) for request in requests], np.int64)
    return Replayed(ttft, preempted, reused, scheduler.busy_ns / executor.told_ns)


def _run(scheduler: Scheduler, engine: Engine, inputs: Iterable[Input]) -> list[Request]:
    """Feed ``inputs`` at their times and wait for all requests; returns them in order of opening."""
    # modulo the model's vocabulary: equal ids stay equal, different ones may become equal by chance
    vocabulary = int(engine.model.model.config.vocab_size) - _SPECIAL
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
            spec = RequestSpec(
                PriorityClass.POOL,
                "",
                tokens,
                piece.max_tokens,
                lambda request: ended.release(),
                open_prompt=engine.open_prompt,
                complete=piece.last,
            )
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
    first = request.first(Event.KV_ON_GPU)
    failed = first is None or request.error is not None
    return NEVER if failed else cast("int", first) - request.last_chunk_ns
