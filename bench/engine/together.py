"""Readers of one engine asked in one pass, one after the other, and as kept caches: timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.engine.contenders import Reply
from bench.engine.floor import Floors
from bench.engine.questions import agree, in_turn
from bench.figures import Figure, Goal, median_ratio, quantiles
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


@dataclass
class Times:
    """Whole passes and the attention in them, ns, a sample a round."""

    passes: list[int] = field(default_factory=list)
    attention: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Together:
    """Rounds of all ways in turn."""

    of: Readers
    together: Times
    in_turn: Times
    kept: Times | None

    def figures(
        self, floors: Floors, *, gain: Goal | None = None, attention: Goal | None = None, kept: Goal | None = None
    ) -> Iterator[Figure]:
        """Medians. ``gain`` and ``attention``: goals of one pass over in turn, ``kept``: over kept caches."""
        setting: dict[str, str | int | float] = {
            "": self.of.name, "rows": self.of.rows, "context": self.of.shared + round(self.of.own),
        }  # fmt: skip
        one = self.together.passes
        yield _compared("one pass", one, "in turn", self.in_turn.passes, setting)
        if self.kept is not None:
            found = _compared("one pass", one, "kept caches one by one", self.kept.passes, setting, kept)
            yield found
        of = self.of
        floor = floors.of_pass(of.rows, of.shared, of.own, of.readers)
        yield Figure("one pass", quantiles(one, 0.5)[0] / 1e6, "ms", "", setting, "floor", floor)
        yield _compared(
            "attention in one pass", self.together.attention, "in turn", self.in_turn.attention, setting
        )
        yield _gain("gain of one pass", self.in_turn.passes, one, setting, gain)
        in_turn = quantiles(self.in_turn.passes, 0.5)[0] / 1e6
        yield Figure("gain of a pass at the floor", in_turn / floor, "", "", setting)
        yield _gain("gain in attention", self.in_turn.attention, self.together.attention, setting, attention)
        for name, each in (
            ("attention's floor", floors.attention(of.rows, of.shared, of.own, of.readers)),
            ("linear layers' floor", floors.linear(of.rows)),
        ):
            table = "What bounds them"
            yield Figure(f"{name}: arithmetic", each.arithmetic_ms, "ms", table, setting)
            yield Figure(f"{name}: reading", each.reading_ms, "ms", table, setting)


def compare(
    of: Readers, stopwatch: Stopwatch, together: Ask, one_by_one: Ask, repeats: int, kept: Ask | None = None
) -> Together:
    """Ask in all ways in turn, ``repeats`` times after once unmeasured. Raises Disagreement."""
    ways = [stopwatch.lap(ask) for ask in (together, one_by_one, kept) if ask is not None]
    times = [Times() for _ in ways]
    for turn in range(-1, repeats):
        taken = in_turn(ways, (), turn)
        for mine, ((replies, in_attention), took) in zip(times, taken, strict=True):
            for ours, other in zip(taken[0][0][0], replies, strict=True):
                agree(ours, other, of.shared + int(of.own))
            if turn >= 0:
                mine.passes.append(took)
                mine.attention.append(in_attention)
    return Together(of, times[0], times[1], times[2] if kept else None)


def _compared(
    name: str, ours: list[int], against: str, other: list[int], setting: Any, goal: Goal | None = None
) -> Figure:
    a, b = (quantiles(times, 0.5)[0] / 1e6 for times in (ours, other))
    return Figure(name, a, "ms", "", setting, against, b, median_ratio(ours, other), goal, len(ours))


def _gain(name: str, slow: list[int], quick: list[int], setting: Any, goal: Goal | None) -> Figure:
    return Figure(name, median_ratio(slow, quick), "", "", setting, goal=goal, n=len(slow))
