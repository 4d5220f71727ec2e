"""Readers of one engine asked in one pass, one after the other, and as kept caches: timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.contenders import Reply
from bench.engine_result import Together
from bench.figures import latency, median_ratio
from bench.questions import agree, in_turn
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
class Setting:
    """Readers: what they are called, how many, their rows in one pass; the rest as in `Together`."""

    name: str
    readers: int
    rows: int
    shared_tokens: int
    own_tokens: float


def compare(
    setting: Setting,
    stopwatch: Stopwatch,
    together: Ask,
    one_by_one: Ask,
    repeats: int,
    kept: Ask | None = None,
) -> Together:
    """Ask in all ways in turn, ``repeats`` times after once unmeasured. Raises Disagreement."""
    ways = [stopwatch.lap(ask) for ask in (together, one_by_one, kept) if ask is not None]
    ns: list[list[int]] = [[] for _ in ways]
    attention: list[list[int]] = [[] for _ in ways]
    for turn in range(-1, repeats):
        taken = in_turn(ways, (), turn)
        for way, ((replies, in_attention), took) in enumerate(taken):
            for ours, other in zip(taken[0][0][0], replies, strict=True):
                agree(ours, other, setting.shared_tokens + int(setting.own_tokens))
            if turn >= 0:
                ns[way].append(took)
                attention[way].append(in_attention)
    return Together(
        name=setting.name,
        readers=setting.readers,
        rows=setting.rows,
        shared_tokens=setting.shared_tokens,
        own_tokens=setting.own_tokens,
        together=latency(ns[0]),
        in_turn=latency(ns[1]),
        gain=median_ratio(ns[1], ns[0]),
        attention_together=latency(attention[0]),
        attention_in_turn=latency(attention[1]),
        attention_gain=median_ratio(attention[1], attention[0]),
        kept=latency(ns[2]) if kept else None,
        kept_ratio=median_ratio(ns[0], ns[2]) if kept else None,
    )
