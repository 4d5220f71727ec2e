"""What a question costs before any arithmetic: fork, alias, release, keep, by context length.

On a pool whose layers are tiny, so that the longest context fits; nothing here touches KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bench.figures import Figure
from bench.run import Run
from regions.context import Past
from regions.ephemeral import Fork
from regions.pool import KVPool, LayerShape
from regions.prefix import alias
from regions.radix import RadixCache
from regions.tape import Retention, Tape

Target = TypeVar("Target", Tape, Fork)

_BLOCK = 16
_RECORD = 16
_QUESTION = 37


@dataclass(frozen=True)
class Plan:
    """``contexts``: tokens, shortest first; ``repeats``: calls of each operation at each."""

    contexts: tuple[int, ...] = (2_048, 16_384, 131_072)
    repeats: int = 100


QUICK = Plan((208, 2_000), 20)


def measure(run: Run) -> Iterator[Figure]:
    """What a question costs before any arithmetic, by context length, on a pool of tiny layers. The reference is
    the shortest context.
    """
    plan = QUICK if run.quick else Plan()
    worlds = [_World(tokens) for tokens in plan.contexts]
    for call in _CALLS:
        yield from figures(call.name, {w.tokens: _median_us(call, w, plan.repeats) for w in worlds})


def figures(call: str, us: dict[int, float]) -> Iterator[Figure]:
    """One call's medians by context, each beside that of the shortest."""
    shortest = min(us)
    for context, taken in us.items():
        name = f"{context:,} tokens"
        reference = (f"{shortest:,}", us[shortest]) if context == max(us) else ("", None)
        yield Figure(name, taken, "us", "", {"call": call}, *reference)


class _World:
    """A tape, and a cached prompt, each of ``tokens`` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.pool = KVPool([LayerShape(1, 1, 1)], 3 * tokens // _BLOCK + 64, block_size=_BLOCK)
        self.prompt = np.arange(tokens, dtype=np.int32)
        self._limit = tokens + 4096
        self.tape = Tape("bench", self.pool, Past(), Retention(tokens), frame_limit=self._limit)
        _write(self.tape, tokens)
        self.tape.commit([_RECORD] * (tokens // _RECORD))
        self.cache = RadixCache(self.pool, tokens)
        own = self.own_prompt()
        self.cache.save(self.prompt, own)
        own.release()

    def own_prompt(self) -> Fork:
        """All of the prompt in blocks of its own."""
        fork = Fork(self.pool, frame_limit=self._limit)
        return _write(fork, self.tokens)

    def question(self) -> Fork:
        """A fork of the tape with a question's tokens."""
        return _write(self.tape.fork(), _QUESTION)

    def cached(self) -> Past:
        """The cached prompt, held once."""
        past = self.cache.match(self.prompt)
        assert past is not None  # it was saved
        return past


@dataclass(frozen=True)
class _Call:
    """``work`` is timed, on what ``before`` made; ``after`` puts away what both left."""

    name: str
    before: Callable[[_World], Any]
    work: Callable[[_World, Any], Any]
    after: Callable[[Any, Any], object] = lambda made, result: None


def _nothing(_: _World) -> None:
    return None


def _fork(world: _World) -> Fork:
    return world.tape.fork()


def _shorten(_: _World, fork: Fork) -> None:
    fork.keep(fork.length - 1)


def _release(_: object, held: Fork | Past) -> None:
    held.release()


def _release_made(made: Fork, _: object) -> None:
    made.release()


def _release_both(made: Past, result: Past) -> None:
    made.release()
    result.release()


_CALLS = (
    _Call("fork a tape", _nothing, lambda world, _: world.tape.fork(), _release),
    _Call("release the fork", _fork, _release),
    _Call(
        f"take blocks for a question of {_QUESTION} tokens and note them as written",
        _fork,
        lambda world, fork: _write(fork, _QUESTION),
        _release_made,
    ),
    _Call("keep all but the question's last token", _World.question, _shorten, _release_made),
    _Call("release the fork with its question", _World.question, _release),
    _Call(
        "alias a cached prompt",
        _World.cached,
        lambda world, past: alias(world.pool, past.extents, world.tokens),
        _release_both,
    ),
    _Call("release the alias", _World.cached, _release),
    _Call("find a cached prompt by its tokens", _nothing, lambda world, _: world.cached(), _release),
    _Call("keep all but the last token of a prompt of its own", _World.own_prompt, _shorten, _release_made),
    _Call("release a prompt of its own", _World.own_prompt, _release),
)


def _write(target: Target, tokens: int) -> Target:
    """As if a pass had computed ``tokens`` tokens; the target."""
    if not target.acquire(tokens):
        raise RuntimeError("the pool is too small for the contexts")
    target.wrote(target.place(tokens), range(tokens))
    return target


def _median_us(call: _Call, world: _World, repeats: int) -> float:
    ns = []
    for _ in range(repeats):
        made = call.before(world)
        began = time.perf_counter_ns()
        result = call.work(world, made)
        ns.append(time.perf_counter_ns() - began)
        call.after(made, result)
    return float(np.median(ns)) / 1e3
