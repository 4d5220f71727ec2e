"""What arrives, when: ticks, asks and prompts as Poisson processes, thinned to what changes the bars.

Of the ticks of one interval only the first and the last are made: the first closes the bar before it, the
last is the newest one that the bar's answers have seen. The ticks between them cost the intake some
microseconds each and change no time here. Both are drawn exactly: of n uniform times, the first is at
1 - u^(1/n) of the interval, and the last at u^(1/(n-1)) of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["tick", "ask", "prompt"]


class Arrival(NamedTuple):
    """At ``at_ns``, since the beginning; ``of``: number of a tick's symbol or of an ask's session."""

    at_ns: int
    kind: Kind
    of: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """A second, over all sessions. Raises ValueError for a negative one, and without ticks."""

    ticks: float
    asks: float = 0.0
    prompts: float = 0.0

    def __post_init__(self) -> None:
        if not self.ticks > 0 or self.asks < 0 or self.prompts < 0:
            raise ValueError("ticks must be above 0 a second, asks and prompts at least 0")


def arrivals(
    rates: Rates, intervals: Sequence[Sequence[int]], sessions: int, seconds: float, seed: int = 0
) -> list[Arrival]:
    """All arrivals within ``seconds``, in order of time.

    ``intervals``: of each symbol, those of the bars that are made of it, ns. Its ticks are thinned by their
    greatest common divisor, so that every bar keeps its first and last.
    """
    rng = np.random.default_rng(seed)
    found: list[Arrival] = []
    for symbol, own in enumerate(intervals):
        times = _ticks(rng, rates.ticks / len(intervals), gcd(*own), round(seconds * 1e9))
        found += (Arrival(at, "tick", symbol) for at in times)
    asks = rng.uniform(0.0, seconds, rng.poisson(rates.asks * seconds))
    asked = rng.integers(sessions, size=len(asks))
    found += (
        Arrival(round(at * 1e9), "ask", of) for at, of in zip(asks.tolist(), asked.tolist(), strict=True)
    )
    prompts = rng.uniform(0.0, seconds, rng.poisson(rates.prompts * seconds))
    found += (Arrival(round(at * 1e9), "prompt") for at in prompts.tolist())
    return sorted(found, key=lambda arrival: arrival.at_ns)


def _ticks(rng: np.random.Generator, rate: float, interval: int, until: int) -> Iterator[int]:
    n = -(-until // interval)
    counts = rng.poisson(rate * interval * 1e-9, n)
    first = 1 - rng.random(n) ** (1 / np.maximum(counts, 1))
    last = first + (1 - first) * rng.random(n) ** (1 / np.maximum(counts - 1, 1))
    for number, (count, begin, end) in enumerate(
        zip(counts.tolist(), first.tolist(), last.tolist(), strict=True)
    ):
        for share in (begin, end)[: min(count, 2)]:
            at = number * interval + min(int(share * interval), interval - 1)
            if at < until:
                yield at
