"""What a step of the scheduler costs without the forward pass, with many live requests, for every policy.

The scheduler runs over the simulated device, whose block metadata is the daemon's; a pass costs it nothing,
and the executor's own time is taken off. The number of live requests stays the same: a new one replaces each
that ends, and every other one is a stream whose prompt comes in pieces. Time is that of the thread, so other
processes do not count.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.scheduler_result import Cost
from engine.step import Chunk, Executor, SampledToken
from scheduler.planner import plan
from scheduler.policies import Ordering
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.simulation.device import SimDevice
from scheduler.simulation.tokens import EMPTY, Segments
from scheduler.theory.orders import rank
from scheduler.types import Limits, PriorityClass

_BLOCK = 16
_BASE = range(256)
"""What all prompts begin with, so that policies by prefix have something to order by."""


@dataclass(frozen=True)
class Plan:
    """``live`` requests at a time; ``pool``: its size as a part of what they want together.

    ``naive``: every so many steps all live requests are sorted, as the reference.
    """

    live: Sequence[int] = (500, 10_000)
    pools: Sequence[float] = (2.5, 0.25)
    policies: Sequence[str] = ("vllm", "fcfs", "lcas", "mcps", "lpm", "klpm", "klpm-adaptive")
    steps: int = 400
    warm: int = 50
    naive: int = 20
    prompt: int = 512
    pieces: int = 4
    answer: int = 20


class FreeCosts:
    """A device on which nothing takes time; recomputing is dear enough that swapping is chosen at times."""

    def recompute_ns(self, tokens: int) -> int:
        """See `scheduler.types.Costs`."""
        return tokens

    def swap_ns(self, blocks: int) -> int:
        """See `scheduler.types.Costs`."""
        return blocks * _BLOCK

    def swap_out_ns(self, blocks: int) -> int:
        """See `DeviceCosts`."""
        return 0

    def swap_in_ns(self, blocks: int) -> int:
        """See `DeviceCosts`."""
        return 0

    def batch_ns(self, spans: Sequence[tuple[int, int]]) -> int:
        """See `scheduler.types.Costs`."""
        return 1


class TimedExecutor:
    """Counts the thread time that another executor takes, ns."""

    def __init__(self, executor: Executor) -> None:
        self.ns = 0
        self._executor = executor

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `engine.step.Executor`."""
        began = time.thread_time_ns()
        rows = self._executor.execute(batch)
        self.ns += time.thread_time_ns() - began
        return rows


class World:
    """A scheduler with so many live requests, step by step."""

    def __init__(self, sizes: Plan, live: int, pool: float, policy: str) -> None:
        self.sizes, self.policy = sizes, policy
        blocks = int(live * (sizes.prompt + sizes.answer) * pool) // _BLOCK
        self.device = SimDevice(
            FreeCosts(),
            self._elapse,
            blocks=blocks,
            block_size=_BLOCK,
            host_blocks=blocks,
            keep_prefixes=Ordering(policy).by_prefix,
        )
        self.executor = TimedExecutor(self.device.executor)
        self.limits = Limits(max_drafts=0, stream_timeout_ns=0)
        self.scheduler = Scheduler(
            self.executor,
            self.device.pool,
            self.limits,
            self.device.clock,
            ordering=Ordering(policy),
            costs=FreeCosts(),
            tier=self.device.tier,
            index=self.device.index,
            rng=random.Random(0),
        )
        self.rng = random.Random(1)
        self.live: dict[int, Request] = {}
        self.streams: deque[tuple[Request, int]] = deque()
        self._documents = len(_BASE)
        self._submitted = 0
        for _ in range(live):
            self._submit()

    def feed(self) -> None:
        """The next pieces of two streams, as other threads would bring them."""
        for _ in range(min(2, len(self.streams))):
            request, left = self.streams.popleft()
            if request.id not in self.live:
                continue
            self.scheduler.extend(request.id, self._document(self.sizes.prompt // self.sizes.pieces))
            if left > 1:
                self.streams.append((request, left - 1))
            else:
                self.scheduler.finish(request.id)

    def planned(self) -> int:
        """Thread time (ns) of phase 1 alone. It changes nothing, so it may be asked for."""
        began = time.thread_time_ns()
        plan(self.scheduler._live.queues, self.device.pool, self.limits, self.scheduler._grouping)
        return time.thread_time_ns() - began

    def stepped(self) -> int:
        """Thread time (ns) of a step less the executor's."""
        before, began = self.executor.ns, time.thread_time_ns()
        self.scheduler.step()
        return time.thread_time_ns() - began - (self.executor.ns - before)

    def sorted_anew(self) -> int:
        """Thread time (ns) of ordering all live requests from nothing, as the paper's code does each step."""
        live, key = list(self.live.values()), Ordering(self.policy).key
        began = time.thread_time_ns()
        if Ordering(self.policy).by_prefix:
            matches = [self.device.cache.match_length(r.prompt, r.spec.salt) for r in live]
            next(rank(4, np.array([r.id for r in live]), np.array(matches)))
        else:
            live.sort(key=key)
        return time.thread_time_ns() - began

    def _submit(self) -> None:
        self._submitted += 1
        streaming = self._submitted % 2 == 0
        tokens = self.sizes.prompt // (self.sizes.pieces if streaming else 1)
        request = Request(
            RequestSpec(
                PriorityClass.POOL,
                "",
                Segments([_BASE]) + self._document(max(1, tokens - self.rng.randrange(tokens))),
                self.sizes.answer,
                self._ended,
                open_prompt=self.device.open_prompt,
                complete=not streaming,
            )
        )
        self.live[self.scheduler.submit(request)] = request
        if streaming:
            self.streams.append((request, self.sizes.pieces - 1))

    def _ended(self, request: Request) -> None:
        if request.error is not None:
            raise RuntimeError(f"a request failed: {request.error.message}")
        del self.live[request.id]
        self._submit()

    def _document(self, tokens: int) -> Segments:
        start, self._documents = self._documents, self._documents + tokens + 1
        return Segments([range(start, start + tokens)]) if tokens else EMPTY

    def _elapse(self, until: int) -> None:
        self.device.clock.now = until


def run(sizes: Plan) -> list[Cost]:
    """A row for each policy, number of live requests, and pool."""
    return [
        _measure(sizes, live, pool, policy)
        for live in sizes.live
        for pool in sizes.pools
        for policy in sizes.policies
    ]


def _measure(sizes: Plan, live: int, pool: float, policy: str) -> Cost:
    world = World(sizes, live, pool, policy)
    plans, steps, naive = [], [], []
    for number in range(sizes.warm + sizes.steps):
        world.feed()
        planned, stepped = world.planned(), world.stepped()
        if number < sizes.warm:
            continue
        plans.append(planned)
        steps.append(stepped)
        if number % sizes.naive == 0:
            naive.append(world.sorted_anew())
    return Cost(policy, live, pool, *_us(plans), *_us(steps), _us(naive)[0])


def _us(samples_ns: Sequence[int]) -> tuple[float, float]:
    """Median and 99th percentile, microseconds."""
    p50, p99 = np.quantile(np.asarray(samples_ns, np.float64) / 1e3, (0.5, 0.99), method="inverted_cdf")
    return float(p50), float(p99)
