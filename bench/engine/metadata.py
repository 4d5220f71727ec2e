"""The cost of a question before any arithmetic: fork, alias, release, keep. Nothing here touches KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bench.figures import Figure
from bench.run import SuiteRun, timed
from regions.ephemeral import Fork
from regions.frozen import Context, alias
from regions.pool import KVPool, LayerShape
from regions.radix import RadixCache
from regions.tape import Retention, Tape

Target = TypeVar("Target", Tape, Fork)

_BLOCK = 16
_RECORD = 16
_QUESTION = 37


@dataclass(frozen=True)
class MetadataPlan:
    """``contexts``: tokens, shortest first; ``repeats``: calls of each operation at each."""

    contexts: tuple[int, ...] = (2_048, 16_384, 131_072)
    repeats: int = 100


QUICK = MetadataPlan((208, 2_000), 20)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """What a question costs before any arithmetic, by context length, on a pool of tiny layers. The
    reference is the shortest context.
    """
    plan = QUICK if run.quick else MetadataPlan()
    worlds = [MetadataWorld(tokens) for tokens in plan.contexts]
    shortest = min(plan.contexts)
    for call in _CALLS:
        us = {world.tokens: _median_us(call, world, plan.repeats) for world in worlds}
        for context, taken in us.items():
            reference = (f"{shortest:,}", us[shortest]) if context == max(us) else ("", None)
            yield Figure(f"{context:,} tokens", taken, "us", "", {"call": call}, *reference)


class MetadataWorld:
    """A tape, and a cached prompt, each of ``tokens`` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.pool = KVPool([LayerShape(1, 1, 1)], 3 * tokens // _BLOCK + 64, block_size=_BLOCK)
        self.prompt = np.arange(tokens, dtype=np.int32)
        self.tape = Tape("bench", self.pool, Context(), Retention(tokens), frame_limit=tokens + 4096)
        _write(self.tape, tokens)
        self.tape.commit([_RECORD] * (tokens // _RECORD))
        self.cache = RadixCache(self.pool, tokens)
        own = self.own_prompt()
        self.cache.save(self.prompt, own)
        own.release()

    def own_prompt(self) -> Fork:
        """A whole prompt in its own blocks."""
        return _write(Fork(self.pool, frame_limit=self.tokens + 4096), self.tokens)

    def question(self) -> Fork:
        """A fork of the tape with a question's tokens."""
        return _write(self.tape.fork(), _QUESTION)

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
        lambda _, fork: _write(fork, _QUESTION),
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


def _write(target: Target, tokens: int) -> Target:
    """Mark ``tokens`` tokens as if a pass had computed them; returns the target."""
    if not target.acquire(tokens):
        raise RuntimeError("the pool is too small for the contexts")
    target.wrote(target.next_slots(tokens), range(tokens))
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
