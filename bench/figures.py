"""The few numbers that summarise samples: quantiles, a slope, and ratios to a reference."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Latency(msgspec.Struct, frozen=True):
    """Samples of one latency: how many, their median, 99th percentile (nearest rank) and maximum."""

    n: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def latency(samples_ns: Sequence[int]) -> Latency:
    """Summarise durations in ns. Raises ValueError when there are none."""
    if not len(samples_ns):
        raise ValueError("a latency needs at least one sample")
    milliseconds = np.asarray(samples_ns, np.float64) / 1e6
    p50, p99 = np.quantile(milliseconds, (0.5, 0.99), method="inverted_cdf")
    return Latency(len(milliseconds), float(p50), float(p99), float(milliseconds.max()))


def median_ratio(ours_ns: Sequence[int], reference_ns: Sequence[int]) -> float:
    """Median over pairs taken one right after the other: noise that lasts hits both of a pair.

    Raises ValueError unless the two are as long as each other.
    """
    return float(np.median([a / b for a, b in zip(ours_ns, reference_ns, strict=True)]))


def slope_ms_per_1k(tokens: Sequence[int], samples_ns: Sequence[float]) -> float:
    """Least-squares slope of latency over context, in ms for each 1,000 tokens.

    Raises ValueError when all contexts are the same.
    """
    x, y = np.asarray(tokens, np.float64), np.asarray(samples_ns, np.float64)
    spread = x - x.mean()
    if not spread.any():
        raise ValueError("a slope needs two contexts")
    return float((spread * (y - y.mean())).sum() / (spread**2).sum() / 1e6 * 1000)


class Rates(msgspec.Struct, frozen=True):
    """Throughput of repeated runs over ``n`` things each, things a second, one entry a run.

    One run is not enough: where two processes share few cores the same code runs several times faster or
    slower, as they happen to be placed.
    """

    n: int
    per_second: list[float]

    @property
    def median(self) -> float:
        """The middle run."""
        return float(np.median(self.per_second))

    @property
    def low(self) -> float:
        """The slowest run."""
        return min(self.per_second)

    @property
    def high(self) -> float:
        """The fastest run."""
        return max(self.per_second)


def rates(n: int, seconds: Sequence[float]) -> Rates:
    """From the time each run took. Raises ValueError when there are none."""
    if not seconds:
        raise ValueError("a rate needs at least one run")
    return Rates(n, [n / s for s in seconds])
