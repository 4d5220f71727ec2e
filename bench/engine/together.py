"""Readers of one engine asked in one pass, one after the other, and as kept caches: timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.engine.contenders import Reply
from bench.engine.floor import Floors
from bench.engine.questions import agree, in_turn
from bench.figures import Figure, Goal, Setting, median_ratio, quantiles
from engine.attention.base import Attention, LayerCall

Ask = Callable[[], list[Reply]]


class Stopwatch:
    """An attention backend that adds up the time spent in another, ns."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.ns = 0

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """As the other."""
        began = time.perf_counter_ns()
        output = self._attention(call)
        self.ns += time.perf_counter_ns() - began
        return output

    def lap(self, ask: Ask) -> Callable[[Any], tuple[list[Reply], int]]:
        """``ask``, giving also the ns of attention in it."""

        def work(_: Any) -> tuple[list[Reply], int]:
            self.ns = 0
            return ask(), self.ns

        return work


@dataclass(frozen=True)
class Readers:
    """What a pass of ``rows`` rows reads: ``shared`` tokens of context, and ``own`` tokens of each reader.

    A reader's own new rows count by half.
    """

    name: str
    readers: int
    rows: int
    shared: int
    own: float


class Medians(NamedTuple):
    """Of ``n`` rounds, ms: one pass, another way, and the other over the one, median over pairs."""

    n: int
    one_pass: float
    other: float
    gain: float

    @classmethod
    def of(cls, one_pass: list[int], other: list[int]) -> Medians:
        """Of samples in ns."""
        ours, theirs = (quantiles(ns, 0.5)[0] / 1e6 for ns in (one_pass, other))
        return cls(len(one_pass), ours, theirs, median_ratio(other, one_pass))

    def figure(self, name: str, against: str, setting: Setting, goal: Goal | None = None) -> Figure:
        """One pass beside the other way."""
        return Figure(
            name, self.one_pass, "ms", "", setting, against, self.other, 1 / self.gain, goal, self.n
        )


class Compared(NamedTuple):
    """One pass against one each in turn, the attention in both, and against kept caches one by one."""

    passes: Medians
    attention: Medians
    kept: Medians | None


class Goals(NamedTuple):
    """Of the gain of one pass, of that in its attention, and of one pass over kept caches."""

    gain: Goal | None = None
    attention: Goal | None = None
    kept: Goal | None = None


def figures(of: Readers, floors: Floors, found: Compared, goals: Goals) -> Iterator[Figure]:
    """Ours beside the other ways and the floor, and what bounds it."""
    setting: Setting = {"": of.name, "rows": of.rows, "context": of.shared + round(of.own)}
    passes, attention = found.passes, found.attention
    yield passes.figure("one pass", "in turn", setting)
    if found.kept is not None:
        yield found.kept.figure("one pass", "kept caches one by one", setting, goals.kept)
    floor = floors.of_pass(of.rows, of.shared, of.own, of.readers)
    yield Figure("one pass", passes.one_pass, "ms", "", setting, "floor", floor)
    yield attention.figure("attention in one pass", "in turn", setting)
    yield Figure("gain of one pass", passes.gain, "", "", setting, goal=goals.gain)
    yield Figure("gain of a pass at the floor", passes.other / floor, "", "", setting)
    yield Figure("gain in attention", attention.gain, "", "", setting, goal=goals.attention)
    of_attention = floors.attention(of.rows, of.shared, of.own, of.readers)
    for name, each in (("attention", of_attention), ("linear layers", floors.linear(of.rows))):
        for what, ms in (("arithmetic", each.arithmetic_ms), ("reading", each.reading_ms)):
            yield Figure(f"{name}: {what}", ms, "ms", "Floors", setting)


def compare(
    of: Readers, stopwatch: Stopwatch, together: Ask, one_by_one: Ask, repeats: int, kept: Ask | None = None
) -> Compared:
    """Ask in all ways in turn, ``repeats`` times after once unmeasured. Raises Disagreement."""
    ways = [stopwatch.lap(ask) for ask in (together, one_by_one, kept) if ask is not None]
    passes: list[list[int]] = [[] for _ in ways]
    attention: list[list[int]] = [[] for _ in ways]
    for turn in range(-1, repeats):
        taken = in_turn(ways, (), turn)
        for way, ((replies, in_attention), took) in enumerate(taken):
            for ours, other in zip(taken[0][0][0], replies, strict=True):
                agree(ours, other, of.shared + int(of.own))
            if turn >= 0:
                passes[way].append(took)
                attention[way].append(in_attention)
    caches = Medians.of(passes[0], passes[2]) if kept else None
    return Compared(Medians.of(*passes[:2]), Medians.of(*attention[:2]), caches)
