"""What ordering a long waiting line by cached prefixes costs: kept current, beside asking the cache anew.

Prompts are (base)(user)(document), as in *k-LPM* definition 4. Each step admits the first of the order, as if
a pass computed them at once, and saves their prompts; the budget of the cache is short, so some are evicted.
Timed is what the scheduler pays in a step: what saving and evicting adds for the watched prompts, following
the changes, walking to the requests that are admitted, and taking these out of the line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar, cast

import msgspec
import numpy as np

from bench.tables import table
from regions.ephemeral import Fork
from regions.pool import KVPool, LayerShape
from regions.radix import Node, RadixCache, TokenArray
from regions.watch import PrefixWatch
from scheduler.prefix_queue import PrefixQueue
from scheduler.request import Request
from scheduler.theory.orders import rank

T = TypeVar("T")

_BLOCK = 16


@dataclass(frozen=True)
class Plan:
    """``prompt``: tokens of base, user and document; ``budget``: tokens of the cache.

    Each user asks ``repeats`` times; ``admitted`` requests go at each of ``steps`` steps.
    """

    waiting: Sequence[int] = (100, 1_000, 10_000)
    prompt: tuple[int, int, int] = (256, 512, 128)
    repeats: int = 4
    admitted: int = 8
    steps: int = 300
    k: int = 4
    budget: int = 65_536


class Row(msgspec.Struct, frozen=True):
    """Microseconds of a step with ``waiting`` requests.

    ``first``: the first two together, in which the base prompt is cached and everybody's match changes;
    ``median`` and ``p99`` are those of the others.
    """

    waiting: int
    median: float
    p99: float
    first: float
    anew: float
    """Median of asking `RadixCache.match_length` for everybody and sorting."""


@dataclass(frozen=True)
class _Waiting:
    id: int
    prompt: TokenArray
    salt: str = ""


def run(plan: Plan) -> list[Row]:
    """A row for each length of the line. Raises RuntimeError when the two orders differ."""
    return [_row(plan, waiting) for waiting in plan.waiting]


def render(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    columns = ("waiting", "a step, median, us", "p99", "first two steps", "asked anew, median", "ratio")
    cells = [
        (
            f"{row.waiting:,}",
            *(f"{us:,.0f}" for us in (row.median, row.p99, row.first, row.anew)),
            f"{row.anew / row.median:,.0f}",
        )
        for row in rows
    ]
    return table(columns, cells)


class _TimedWatch(PrefixWatch):
    """Counts the time in which the trie's changes are followed, in ns."""

    ns = 0

    def added(self, node: Node, parent: Node) -> None:
        with self._clock():
            super().added(node, parent)

    def split(self, upper: Node, node: Node) -> None:
        with self._clock():
            super().split(upper, node)

    def dropped(self, node: Node, parent: Node) -> None:
        with self._clock():
            super().dropped(node, parent)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        began = time.perf_counter_ns()
        yield
        self.ns += time.perf_counter_ns() - began


class _World:
    def __init__(self, plan: Plan, waiting: int, watched: bool) -> None:
        self.plan = plan
        # a pass's prompts lie in the pool beside the cache
        tokens = plan.budget + (plan.admitted + 1) * sum(plan.prompt)
        self.pool = KVPool([LayerShape(1, 1, 1)], 2 * tokens // _BLOCK, block_size=_BLOCK)
        self.cache = RadixCache(self.pool, plan.budget)
        self.watch = _TimedWatch(self.cache) if watched else None
        self.line = None if self.watch is None else PrefixQueue(self.watch, lambda: plan.k)
        self.requests: dict[int, _Waiting] = {}
        self.taken = 0
        for number, prompt in enumerate(_prompts(plan, waiting)):
            self.requests[number] = _Waiting(number, prompt)
            if self.line is not None:
                self.line.add(cast("Request", self.requests[number]))

    def order(self) -> list[int]:
        """Numbers of those to be admitted."""
        if self.line is not None:
            return [request.id for request in islice(self.line, self.plan.admitted)]
        numbers = np.array(list(self.requests))
        matches = np.array([self.cache.match_length(r.prompt[:-1]) for r in self.requests.values()])
        chosen = islice(rank(self.plan.k, numbers, matches, step=self.taken), self.plan.admitted)
        return [int(numbers[i]) for i in chosen]

    def take(self, chosen: Sequence[int]) -> list[TokenArray]:
        """They are admitted; their prompts."""
        self.taken += len(chosen)
        requests = [self.requests.pop(number) for number in chosen]
        if self.line is not None:
            for request in requests:
                self.line.admitted(cast("Request", request))
        return [request.prompt for request in requests]

    def save(self, prompts: Sequence[TokenArray]) -> float:
        """As if passes had computed them; us that the watch took."""
        before = self.watch.ns if self.watch else 0
        for prompt in prompts:
            context = self.cache.match(prompt[:-1])
            fork = Fork(self.pool, frame_limit=len(prompt), context=context)
            own = prompt[fork.cached_tokens :]
            if context is not None:
                context.release()
            if not fork.acquire(len(own)):
                raise RuntimeError("the pool is too small for a pass beside the cache")
            fork.wrote(fork.place(len(own)), own.tolist())
            self.cache.save(prompt, fork)
            fork.release()
        return (self.watch.ns - before) / 1e3 if self.watch else 0.0


def _row(plan: Plan, waiting: int) -> Row:
    ours, theirs = _World(plan, waiting, True), _World(plan, waiting, False)
    kept: list[float] = []
    anew: list[float] = []
    for _ in range(min(plan.steps, waiting // plan.admitted)):
        chosen, ordered = _timed(ours.order)
        prompts, took = _timed(lambda chosen=chosen: ours.take(chosen))  # type: ignore[misc]  # bound at once
        reference, asked = _timed(theirs.order)
        if chosen != reference:
            raise RuntimeError(f"the line has {chosen} first, the cache {reference}")
        theirs.take(reference)
        kept.append(ordered + took + ours.save(prompts))
        theirs.save(prompts)
        anew.append(asked)
    return Row(
        waiting,
        float(np.median(kept[2:])),
        float(np.quantile(kept[2:], 0.99, method="inverted_cdf")),
        sum(kept[:2]),
        float(np.median(anew)),
    )


def _prompts(plan: Plan, waiting: int) -> list[TokenArray]:
    rng = np.random.default_rng(1)
    base, user, document = plan.prompt

    def some(n: int) -> TokenArray:
        return rng.integers(0, 1 << 17, n, np.int32)

    shared = some(base)
    users = [np.concatenate((shared, some(user))) for _ in range(-(-waiting // plan.repeats))]
    prompts = [np.concatenate((users[i % len(users)], some(document))) for i in range(waiting)]
    return [prompts[i] for i in rng.permutation(waiting)]


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter_ns()
    result = work()
    return result, (time.perf_counter_ns() - began) / 1e3


if __name__ == "__main__":
    print(render(run(Plan())))
