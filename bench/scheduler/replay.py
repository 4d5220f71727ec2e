"""A workload in real time: scheduler, worker and readers of the daemon, fed at the inputs' times."""

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
from regions.prompt import StreamingPrompt
from regions.watch import PrefixWatch
from scheduler.costs import CostModel, spans_of
from scheduler.policies import Ordering
from scheduler.request import Event, Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.simulation.inputs import Input
from scheduler.simulation.run import NEVER, Setup, go_on
from scheduler.simulation.tokens import Segments
from scheduler.types import PriorityClass
from scheduler.worker import Worker

_SPECIAL = 3
"""Ids of tokens that are no text."""
_DRAIN_S = 120.0


@dataclass(frozen=True)
class Replayed:
    """``ttft_ns`` by request, [requests] in order of opening, `NEVER` for those that failed.

    ``preempted``: preemptions of all of them.
    ``reused``: part of the prompts' tokens that came from the prefix cache.
    ``pace``: what the scheduler's steps took, over what the costs say of their passes.
    """

    ttft_ns: NDArray[np.int64]
    preempted: int
    reused: float
    pace: float


def replay(inputs: Iterable[Input], setup: Setup, loaded: LoadedModel, costs: CostModel) -> Replayed:
    """Run a workload to its end on a new engine of ``setup``'s pool, without a host tier.

    TTFT counts from the last input, as in the simulator. Raises RuntimeError when requests do not end.
    """
    return _Replay(setup, loaded, costs).run(inputs)


class _Timed(Scheduler):
    """Knows how long its steps took that did something."""

    busy_ns = 0

    def step(self) -> bool:
        began = time.monotonic_ns()
        worked = super().step()
        if worked:
            self.busy_ns += time.monotonic_ns() - began
        return worked


class _Counting:
    """An executor that adds up what the costs say of its passes."""

    def __init__(self, executor: Engine, costs: CostModel) -> None:
        self.told_ns = 0
        self._executor, self._costs = executor, costs

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        self.told_ns += self._costs.batch_ns(spans_of(batch))
        return self._executor.execute(batch)


class _Replay:
    def __init__(self, setup: Setup, loaded: LoadedModel, costs: CostModel) -> None:
        self.engine = in_own_thread(
            lambda: Engine(
                loaded,
                blocks=setup.pool_tokens // setup.block_size,
                block_size=setup.block_size,
                frame_limit=loaded.max_positions,
                cache_tokens=None if setup.prefix_cache else 0,
            )
        )
        self.vocabulary = int(loaded.model.config.vocab_size) - _SPECIAL
        ordering: Ordering = setup.ordering
        self.executor = _Counting(self.engine, costs)
        self.scheduler = _Timed(
            self.executor,
            self.engine.pool,
            setup.limits,
            time.monotonic_ns,
            ordering=ordering,
            costs=costs,
            index=PrefixWatch(self.engine.cache) if ordering.by_prefix else None,
            rng=random.Random(setup.seed),
        )
        self.requests: dict[int, Request] = {}
        self.open = 0
        self.ended = threading.Condition()

    def run(self, inputs: Iterable[Input]) -> Replayed:
        worker = Worker(self.scheduler)
        worker.start()
        try:
            began = time.monotonic_ns()
            for piece in inputs:
                time.sleep(max(0.0, (began + piece.time_ns - time.monotonic_ns()) / 1e9))
                self.feed(piece)
            with self.ended:
                if not self.ended.wait_for(lambda: self.open == 0, _DRAIN_S):
                    raise RuntimeError(f"{self.open} requests are still under way")
        finally:
            worker.stop(0.0)
        return self.result()

    def feed(self, piece: Input) -> None:
        tokens = self.tokens(piece.tokens)
        if piece.op == "open":
            request = Request(
                RequestSpec(
                    PriorityClass.POOL,
                    "",
                    tokens,
                    piece.max_tokens,
                    self.done,
                    open_prompt=self.reader,
                    complete=piece.last,
                )
            )
            with self.ended:
                self.open += 1
            self.requests[piece.request] = request
            self.scheduler.submit(request)
            return
        go_on(self.scheduler, self.requests[piece.request].id, piece, tokens)

    def tokens(self, tokens: Segments) -> list[int]:
        """Ids of the model's vocabulary: what differs may agree by chance, what agrees agrees."""
        return [_SPECIAL + token % self.vocabulary for token in tokens]

    def reader(self) -> StreamingPrompt:
        return self.engine.open_stream()

    def done(self, request: Request) -> None:
        with self.ended:
            self.open -= 1
            self.ended.notify_all()

    def result(self) -> Replayed:
        requests = [self.requests[number] for number in sorted(self.requests)]
        ttft = []
        for request in requests:
            first = request.first(Event.KV_ON_GPU)
            failed = first is None or request.error is not None
            ttft.append(NEVER if failed else cast("int", first) - request.last_chunk_ns)
        prompts = sum(len(request.prompt) for request in requests)
        return Replayed(
            np.array(ttft, np.int64),
            sum(len(request.preempted_by) for request in requests),
            sum(request.cached_tokens for request in requests) / prompts,
            self.scheduler.busy_ns / self.executor.told_ns,
        )
