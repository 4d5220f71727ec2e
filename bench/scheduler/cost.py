"""The cost of planning a step with many live requests, for every policy.

The scheduler runs over the simulated device, whose block metadata is the daemon's. A new request replaces
each one that ends; every other request is a stream whose prompt arrives in pieces. Times are thread times.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import product

from bench.figures import Figure, Goal, Setting, quantiles
from bench.run import SuiteRun
from bench.scheduler.paper import OVERHEAD_P99_US
from lab.plan.host_costs import HostCosts
from lab.simulation.device import SimDevice
from lab.simulation.tokens import EMPTY, Segments
from scheduler.costs import load
from scheduler.interfaces import Limits, PriorityClass
from scheduler.planner import plan
from scheduler.policies import NAMES, Ordering
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler

_PROFILE = "h200-paper"
"""By which swapping or recomputing is chosen; on the device nothing takes time."""
_BLOCK = 16
_PIECES = 4
"""Of a streaming prompt."""
_BASE = range(256)
"""Common prefix of all prompts, so that policies by prefix have something to order by."""


class CostWorld:
    """A scheduler with a constant number of ``live`` requests, step by step.

    ``pool``: its size relative to what they need together; ``prompt`` and ``answer``: tokens.
    """

    def __init__(self, live: int, pool: float, policy: str, prompt: int = 512, answer: int = 20) -> None:
        self.prompt, self.answer = prompt, answer
        blocks = int(live * (prompt + answer) * pool) // _BLOCK
        costs = load(_PROFILE)
        self.device = SimDevice(
            HostCosts(costs, on=False),
            self._elapse,
            blocks=blocks,
            block_size=_BLOCK,
            host_blocks=blocks,
            keep_prefixes=Ordering(policy).by_prefix,
        )
        self.limits = Limits(max_drafts=0, stream_timeout_ns=0)
        self.key = Ordering(policy).key
        self.scheduler = Scheduler(
            self.device,
            self.device.pool,
            self.limits,
            self.device.clock,
            ordering=Ordering(policy),
            costs=costs,
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
        """Send the next pieces of two streams, as other threads would."""
        for _ in range(min(2, len(self.streams))):
            request, left = self.streams.popleft()
            if request.id not in self.live:
                continue
            self.scheduler.extend(request.id, self._document(self.prompt // _PIECES))
            if left > 1:
                self.streams.append((request, left - 1))
            else:
                self.scheduler.finish(request.id)

    def planned(self) -> int:
        """Thread time (ns) of phase 1 alone, which changes nothing."""
        scheduler, pool = self.scheduler, self.device.pool
        began = time.thread_time_ns()
        plan(scheduler.queues, pool, self.limits, scheduler._grouping)
        return time.thread_time_ns() - began

    def sorted(self) -> int:
        """Thread time (ns) of sorting all live requests by the policy's key, which a daemon does not: it
        keeps them sorted.
        """
        requests, key = list(self.live.values()), self.key
        began = time.thread_time_ns()
        sorted(requests, key=key)
        return time.thread_time_ns() - began

    def _submit(self) -> None:
        self._submitted += 1
        streaming = self._submitted % 2 == 0
        tokens = self.prompt // (_PIECES if streaming else 1)
        prompt = Segments([_BASE]) + self._document(max(1, tokens - self.rng.randrange(tokens)))
        of = partial(RequestSpec, PriorityClass.POOL, "", open_prompt=self.device.open_prompt)
        request = Request(of(prompt, self.answer, self._ended, complete=not streaming))
        self.live[self.scheduler.submit(request)] = request
        if streaming:
            self.streams.append((request, _PIECES - 1))

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


_GOAL_US = {500: 150.0, 10_000: 1500.0}
"""Of the median plan, by live requests."""


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Thread time of *plan*, phase 1 of a step: order, budgets, and which requests are admitted, of a step's
    64 at most. *Stream2LLM* section 6.5 gives "sub-millisecond" for sorting and budgets, and below 165 us at
    P99 for sorting 500 requests alone: beside that stands *sorting*, all requests by a policy's key, which a
    daemon keeps sorted. Over counting readers.
    """
    numbers, policies = run.sized(((500, 10_000), NAMES), ((40,), ("fcfs", "klpm")))
    warm, steps = run.sized((50, 400), (2, 10))
    for live, pool, policy in product(numbers, (2.5, 0.25), policies):
        world, plans, sorts = CostWorld(live, pool, policy), list[float](), list[float]()
        for _ in range(warm + steps):
            world.feed()
            plans.append(world.planned() / 1e3)
            sorts.append(world.sorted() / 1e3)
            world.scheduler.step()
        setting: Setting = {"policy": policy, "requests": live, "pool / wanted": pool}
        median, p99 = quantiles(plans[warm:], 0.5, 0.99)
        goal = Goal(_GOAL_US[live], of="ours") if live in _GOAL_US else None
        yield Figure("plan P50", median, "us", setting=setting, goal=goal)
        paper, sorting = OVERHEAD_P99_US.get(live, (None, None))
        of, goal = ("paper", Goal(1.0)) if paper else ("", None)
        yield Figure("plan P99", p99, "us", "", setting, of, paper, goal=goal)
        if not Ordering(policy).by_prefix:
            took = quantiles(sorts[warm:], 0.99)[0]
            yield Figure("sorting P99", took, "us", "", setting, of, sorting, goal=goal)
