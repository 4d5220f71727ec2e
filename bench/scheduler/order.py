"""The cost of ordering a long queue by cached prefixes: incrementally, or by asking the cache each step.

Prompts are (base)(user)(document), as in *k-LPM* definition 4. Each step admits the first requests of the
order, as if a pass computed them at once, and saves their prompts. The cache has little room, so some are
evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, cast

import numpy as np

from bench.figures import Figure, quantiles
from bench.run import SuiteRun, timed
from bench.scheduler.orders import rank
from regions.ephemeral import Fork
from regions.pool import KVPool, LayerShape
from regions.radix import Node, RadixCache, TokenArray
from regions.watch import PrefixWatch
from scheduler.prefix_queue import PrefixQueue
from scheduler.request import Request

_BLOCK = 16


@dataclass(frozen=True)
class OrderPlan:
    """``prompt``: tokens of base, user and document; ``budget``: tokens of the cache.

    Each user asks ``repeats`` times; ``admitted`` requests are taken at each of ``steps`` steps.
    """

    waiting: Sequence[int] = (100, 1_000, 10_000)
    prompt: tuple[int, int, int] = (256, 512, 128)
    repeats: int = 4
    admitted: int = 8
    steps: int = 300
    k: int = 4
    budget: int = 65_536


QUICK = OrderPlan(waiting=(40,), prompt=(32, 64, 16), admitted=4, budget=2_048)


class _Spec(NamedTuple):
    salt: str = ""


class _Waiting(NamedTuple):
    """The part of a `Request` that the queue sees."""

    id: int
    prompt: TokenArray
    spec: _Spec = _Spec()


def measure(run: SuiteRun) -> Iterator[Figure]:
    """What `klpm` pays in a step for its order: what saving and evicting adds for the watched prompts,
    following the changes, finding those that are admitted and taking them out. The reference asks the
    cache for everybody's match at each step, and sorts.
    """
    plan = QUICK if run.quick else OrderPlan()
    for waiting in plan.waiting:
        yield from figures(plan, waiting)


class _TimedWatch(PrefixWatch):
    """Adds up the time spent following the trie's changes, in ns."""

    ns = 0

    def added(self, node: Node, parent: Node) -> None:
        self._count(super().added, node, parent)

    def split(self, upper: Node, node: Node) -> None:
        self._count(super().split, upper, node)

    def dropped(self, node: Node, parent: Node) -> None:
        self._count(super().dropped, node, parent)

    def _count(self, follow: Callable[[Node, Node], None], *nodes: Node) -> None:
        self.ns += timed(follow, *nodes)[1]


class _World:
    """A waiting queue, and the cache whose changes it follows."""

    def __init__(self, plan: OrderPlan, waiting: int) -> None:
        self.plan = plan
        # a pass's prompts are in the pool in addition to the cache
        tokens = plan.budget + (plan.admitted + 1) * sum(plan.prompt)
        self.pool = KVPool([LayerShape(1, 1, 1)], 2 * tokens // _BLOCK, block_size=_BLOCK)
        self.cache = RadixCache(self.pool, plan.budget)
        self.watch = _TimedWatch(self.cache)
        self.queue = PrefixQueue(self.watch, lambda: plan.k)
        self.requests = {n: _Waiting(n, prompt) for n, prompt in enumerate(_prompts(plan, waiting))}
        self.taken = 0
        for request in self.requests.values():
            self.queue.add(cast("Request", request))

    def order(self) -> list[int]:
        """Numbers of the requests to admit."""
        return [request.id for request in islice(self.queue, self.plan.admitted)]

    def ask(self) -> list[int]:
        """The same, by asking the cache for every request's match; changes nothing."""
        numbers = np.array(list(self.requests))
        matches = np.array([self.cache.match_length(r.prompt[:-1]) for r in self.requests.values()])
        chosen = islice(rank(self.plan.k, numbers, matches, step=self.taken), self.plan.admitted)
        return [int(numbers[i]) for i in chosen]

    def take(self, chosen: Sequence[int]) -> list[TokenArray]:
        """Admit requests; returns their prompts."""
        self.taken += len(chosen)
        requests = [self.requests.pop(number) for number in chosen]
        for request in requests:
            self.queue.admitted(cast("Request", request))
        return [request.prompt for request in requests]

    def save(self, prompts: Sequence[TokenArray]) -> int:
        """Save prompts as if passes had computed them; returns the ns that the watch took."""
        before = self.watch.ns
        for prompt in prompts:
            context = self.cache.match(prompt[:-1])
            fork = Fork(self.pool, frame_limit=len(prompt), context=context)
            own = prompt[fork.cached_tokens :]
            if context is not None:
                context.release()
            if not fork.acquire(len(own)):
                raise RuntimeError("the pool is too small for a pass and the cache")
            fork.wrote(fork.next_slots(len(own)), own.tolist())
            self.cache.save(prompt, fork)
            fork.release()
        return self.watch.ns - before


def figures(plan: OrderPlan, waiting: int) -> Iterator[Figure]:
    """Microseconds per step with so many requests waiting.

    The first two steps have their own row: the base prompt is cached and every request's match changes.
    """
    world = _World(plan, waiting)
    kept: list[float] = []
    asked: list[float] = []
    for _ in range(min(plan.steps, waiting // plan.admitted)):
        chosen, ordered = timed(world.order)
        expected, asking = timed(world.ask)
        if chosen != expected:
            raise RuntimeError(f"the queue has {chosen} first, the cache {expected}")
        prompts, took = timed(world.take, chosen)
        kept.append((ordered + took + world.save(prompts)) / 1e3)
        asked.append(asking / 1e3)
    figure = partial(Figure, unit="us", setting={"waiting": waiting})
    median, p99 = quantiles(kept[2:], 0.5, 0.99)
    (reference,) = quantiles(asked, 0.5)
    yield figure("step P50", median, against="asking the cache", reference=reference, n=len(kept))
    yield figure("step P99", p99)
    yield figure("first two steps", sum(kept[:2]))


def _prompts(plan: OrderPlan, waiting: int) -> list[TokenArray]:
    rng = np.random.default_rng(1)
    base, user, document = plan.prompt

    def some(n: int) -> TokenArray:
        return rng.integers(0, 1 << 17, n, np.int32)

    shared = some(base)
    users = [np.concatenate((shared, some(user))) for _ in range(-(-waiting // plan.repeats))]
    prompts = [np.concatenate((users[i % len(users)], some(document))) for i in range(waiting)]
    return [prompts[i] for i in rng.permutation(waiting)]
