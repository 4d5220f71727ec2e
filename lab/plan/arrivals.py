"""What arrives, when: ticks, asks and prompts as Poisson processes, thinned to what changes the bars.

Of the ticks of one interval only the first and the last are made: the first closes the bar before it, the
last is the newest one that the bar's answers have seen. The ticks between them cost the intake some
microseconds each and change no time here. Both are drawn exactly: of n uniform times, the first is at
1 - u^(1/n) of the interval, and the last at u^(1/(n-1)) of the rest.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

from lab.plan.load import Load

Kind = Literal["tick", "ask", "prompt"]


class Arrival(NamedTuple):
    """At ``at_ns``, since the beginning; ``of``: number of a tick's symbol or of an ask's session."""

    at_ns: int
    kind: Kind
    of: int = 0


def arrivals(load: Load, intervals: Sequence[Sequence[int]], sessions: int, seconds: float) -> list[Arrival]:
    """All arrivals within ``seconds``, in order of time; of the asks those that are computed.

    ``intervals``: of each symbol, those of the bars that are made of it, ns. Its ticks are thinned by their
    greatest common divisor, so that every bar keeps its first and last.
    """
    rng = np.random.default_rng(load.seed)
    found: list[Arrival] = []
    for symbol, own in enumerate(intervals):
        times = _ticks(rng, load.ticks / len(intervals), gcd(*own), round(seconds * 1e9))
        found += (Arrival(at, "tick", symbol) for at in times)
    asks = rng.uniform(0.0, seconds, rng.poisson(load.asks_computed * seconds))
    asked = rng.integers(sessions, size=len(asks)).tolist()
    found += (Arrival(round(at * 1e9), "ask", of) for at, of in zip(asks.tolist(), asked, strict=True))
    prompts = rng.uniform(0.0, seconds, rng.poisson(load.prompts * seconds))
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
