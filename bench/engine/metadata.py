"""The cost of block metadata; nothing here touches KV.

First of a question before any arithmetic: fork, alias, release, keep. Then of ordering a long queue by
cached prefixes: incrementally, or by asking the cache each step. Its prompts are (base)(user)(document), as
in *k-LPM* definition 4. Each step admits the first requests of the order, as if a pass computed them at once,
and saves their prompts. The cache has little room, so some are evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from bench.figures import Figure, quantiles
from bench.run import SuiteRun, timed
from bench.scheduler.orders import rank
from regions.ephemeral import Fork
from regions.frozen import Context, alias
from regions.kv_tensors import KVPool, LayerShape
from regions.prefix_index import PrefixIndex
from regions.radix import Node, RadixCache, TokenArray
from regions.tape import Retention, Tape
from scheduler.prefix_queue import PrefixQueue
from scheduler.request import Request

Target = TypeVar("Target", Tape, Fork)

_BLOCK = 16
_RECORD = 16
_QUESTION = 37
_K = 4
_STEPS = 300
_PER_USER = 4
"""Prompts."""


def calls(run: SuiteRun) -> Iterator[Figure]:
    """What a question costs before any arithmetic, by context length, on a pool of tiny layers. The
    reference is the shortest context.
    """
    contexts, repeats = run.sized(((2_048, 16_384, 131_072), 100), ((208, 2_000), 20))
    shortest, *_, longest = contexts
    worlds = [MetadataWorld(tokens) for tokens in contexts]
    for call in _CALLS:
        us = {world.tokens: _median_us(call, world, repeats) for world in worlds}
        for context, taken in us.items():
            reference = (f"{shortest:,}", us[shortest]) if context == longest else ("", None)
            yield Figure(f"{context:,} tokens", taken, "us", "", {"call": call}, *reference)


class MetadataWorld:
    """A tape, and a cached prompt, each of ``tokens`` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.pool = KVPool([LayerShape(1, 1, 1)], 3 * tokens // _BLOCK + 64, block_size=_BLOCK)
        self.prompt = np.arange(tokens, dtype=np.int32)
        self.tape = Tape("bench", self.pool, Context(), Retention(tokens), frame_limit=tokens + 4096)
        _write(self.tape, range(tokens))
        self.tape.commit([_RECORD] * (tokens // _RECORD))
        self.cache = RadixCache(self.pool, tokens)
        self.cache.save(self.prompt, own := self.own_prompt())
        own.release()

    def own_prompt(self) -> Fork:
        """A whole prompt in its own blocks."""
        return _write(Fork(self.pool, frame_limit=self.tokens + 4096), range(self.tokens))

    def question(self) -> Fork:
        """A fork of the tape with a question's tokens."""
        return _write(self.tape.fork(), range(_QUESTION))

    def cached(self) -> Context:
        """The cached prompt, with one reference."""
        context = self.cache.match(self.prompt)
        assert context is not None  # saved before
        return context


def _release(_: MetadataWorld, target: Any) -> None:
    target.release()


def _keep(_: MetadataWorld, target: Any) -> None:
    target.keep(target.length - 1)


Work = Callable[[MetadataWorld, Any], Any]
_CALLS: dict[str, tuple[Callable[[MetadataWorld], Any], Work]] = {
    "fork a tape": (lambda world: None, lambda world, _: world.tape.fork()),
    "release the fork": (lambda world: world.tape.fork(), _release),
    f"take blocks for a question of {_QUESTION} tokens and note them as written": (
        lambda world: world.tape.fork(),
        lambda _, fork: _write(fork, range(_QUESTION)),
    ),
    "keep all but the question's last token": (MetadataWorld.question, _keep),
    "release the fork with its question": (MetadataWorld.question, _release),
    "alias a cached prompt": (
        MetadataWorld.cached,
        lambda world, context: alias(world.pool, context.extents, world.tokens),
    ),
    "release the alias": (MetadataWorld.cached, _release),
    "find a cached prompt by its tokens": (lambda world: None, lambda world, _: world.cached()),
    "keep all but the last token of a prompt of its own": (MetadataWorld.own_prompt, _keep),
    "release a prompt of its own": (MetadataWorld.own_prompt, _release),
}
"""By name: the setup, and the timed operation on its result. What either leaves is released afterwards."""


def _write(target: Target, tokens: Sequence[int]) -> Target:
    """Mark tokens as if a pass had computed them; returns the target."""
    if not target.acquire(len(tokens)):
        raise RuntimeError("the pool is too small")
    target.wrote(target.next_slots(len(tokens)), tokens)
    return target


def _median_us(name: str, world: MetadataWorld, repeats: int) -> float:
    before, work = _CALLS[name]
    ns = []
    for _ in range(repeats):
        made = before(world)
        result, took = timed(work, world, made)
        ns.append(took)
        released = name.startswith("release")
        for left in {id(each): each for each in (made, result) if each is not None and not released}.values():
            left.release()
    return float(np.median(ns)) / 1e3


class _Spec(NamedTuple):
    salt: str = ""
    tenant: str = ""


class _Waiting(NamedTuple):
    """The part of a `Request` that the queue sees."""

    id: int
    prompt: TokenArray
    spec: _Spec = _Spec()
    takes: int = 0


def order(run: SuiteRun) -> Iterator[Figure]:
    """What `klpm` pays in a step for its order: what saving and evicting adds for the watched prompts,
    following the changes, finding those that are admitted and taking them out. The reference asks the
    cache for the match of each prompt at each step, and sorts.
    """
    for waiting in run.sized((100, 1_000, 10_000), (40,)):
        yield from run.sized(step_costs(waiting), step_costs(waiting, (32, 64, 16), admitted=4, budget=2_048))


class _TimedWatch(PrefixIndex):
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


class _Queue:
    """A waiting queue, and the cache whose changes it follows."""

    def __init__(self, waiting: int, prompt: tuple[int, int, int], admitted: int, budget: int) -> None:
        self.admitted = admitted
        # a pass's prompts are in the pool in addition to the cache
        tokens = budget + (admitted + 1) * sum(prompt)
        self.pool = KVPool([LayerShape(1, 1, 1)], 2 * tokens // _BLOCK, block_size=_BLOCK)
        self.cache = RadixCache(self.pool, budget)
        self.watch = _TimedWatch(self.cache)
        self.queue = PrefixQueue(self.watch, lambda: _K)
        self.requests = {n: _Waiting(n, prompt) for n, prompt in enumerate(_prompts(waiting, *prompt))}
        self.taken = 0
        for request in self.requests.values():
            self.queue.add(cast("Request", request))

    def order(self) -> list[int]:
        """Numbers of the requests to admit."""
        return [request.id for request in islice(self.queue, self.admitted)]

    def ask(self) -> list[int]:
        """The same, by asking the cache for every request's match; changes nothing."""
        numbers = np.array(list(self.requests))
        matches = np.array([self.cache.match_length(r.prompt[:-1]) for r in self.requests.values()])
        chosen = islice(rank(_K, numbers, matches, step=self.taken), self.admitted)
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
            if context is not None:
                context.release()
            self.cache.save(prompt, _write(fork, prompt[fork.cached_tokens :].tolist()))
            fork.release()
        return self.watch.ns - before


def step_costs(
    waiting: int, prompt: tuple[int, int, int] = (256, 512, 128), admitted: int = 8, budget: int = 65_536
) -> Iterator[Figure]:
    """Microseconds per step with so many requests waiting, ``admitted`` of which are taken in each.

    ``prompt``: tokens of base, user and document; ``budget``: of the cache. The first two steps have a row
    of their own: the base prompt is cached and every request's match changes.
    """
    world = _Queue(waiting, prompt, admitted, budget)
    kept: list[float] = []
    asked: list[float] = []
    for _ in range(min(_STEPS, waiting // admitted)):
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


def _prompts(waiting: int, base: int, user: int, document: int) -> list[TokenArray]:
    rng = np.random.default_rng(1)

    def some(n: int) -> TokenArray:
        return rng.integers(0, 1 << 17, n, np.int32)

    shared = some(base)
    users = [np.concatenate((shared, some(user))) for _ in range(-(-waiting // _PER_USER))]
    prompts = [np.concatenate((users[i % len(users)], some(document))) for i in range(waiting)]
    return [prompts[i] for i in rng.permutation(waiting)]
