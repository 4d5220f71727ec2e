"""Workloads on a real engine, in real time."""

import random
import threading
import time
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from lab.profile.cost_model import ladder_for, model_of
from lab.profile.timing import measure as measure_costs
from lab.simulation.inputs import Input
from lab.simulation.run import NEVER, Setup, go_on
from regions.prefix_index import PrefixIndex
from scheduler.costs import CostModel
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


def replay(
    inputs: Iterable[Input], setup: Setup, loaded: LoadedModel, costs: CostModel
) -> tuple[NDArray[np.int64], float]:
    """Run a workload in real time on a new engine of ``setup``'s pool, without a host tier.

    TTFT of each request, ns, [requests] in order of opening: from the last input, as in the simulator, NEVER
    for those that failed; and the share of the prompts' tokens that came from the prefix cache. Raises
    RuntimeError when requests do not end.
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
    scheduler = Scheduler(
        engine,
        engine.pool,
        setup.limits,
        time.monotonic_ns,
        ordering=setup.ordering,
        costs=costs,
        index=PrefixIndex(engine.cache) if setup.ordering.by_prefix else None,
        rng=random.Random(setup.seed),
    )
    requests = _run(scheduler, engine, inputs)
    reused = sum(request.cached_tokens for request in requests) / sum(len(r.prompt) for r in requests)
    firsts = [None if each.error else each.first(LifecycleEvent.KV_ON_GPU) for each in requests]
    ttft = np.array(
        [
            NEVER if first is None else first - each.last_chunk_ns
            for first, each in zip(firsts, requests, strict=True)
        ],
        np.int64,
    )
    return ttft, reused


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
