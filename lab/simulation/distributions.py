"""Random numbers with published quantiles, all drawn from the `random.Random` that is passed in."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb, exp, log
from random import Random
from statistics import fmean


@dataclass(frozen=True, slots=True)
class QuantileDistribution:
    """A positive random value given by points (probability, value); log(value) is linear between them.

    Probabilities rise from 0 to 1, and values rise with them. Raises ValueError otherwise.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if self.points[0][0] != 0 or self.points[-1][0] != 1 or self.points[0][1] <= 0:
            raise ValueError("quantiles must run from probability 0 to 1, with positive values")
        if any(p >= q or x >= y for (p, x), (q, y) in pairwise(self.points)):
            raise ValueError("quantiles must rise")

    def at(self, p: float) -> float:
        """The quantile of probability `p`."""
        upper = min(max(bisect_right(self.points, p, key=lambda point: point[0]), 1), len(self.points) - 1)
        (p0, x0), (p1, x1) = self.points[upper - 1], self.points[upper]
        share = (p - p0) / (p1 - p0)
        return exp(log(x0) + share * (log(x1) - log(x0)))

    def draw(self, rng: Random) -> float:
        """One value."""
        return self.at(rng.random())

    @property
    def mean(self) -> float:
        """Expected value: between two points it is (y - x) / log(y / x)."""
        return sum((q - p) * (y - x) / log(y / x) for (p, x), (q, y) in pairwise(self.points))


class Counts:
    """A random whole number from 1 on; ``weights[i]`` is the weight of i + 1."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)
        self._sums = list(accumulate(weights))

    def draw(self, rng: Random) -> int:
        """One value."""
        return rng.choices(range(1, len(self._sums) + 1), cum_weights=self._sums)[0]

    def rank(self, value: int, rng: Random) -> float:
        """A probability at which the quantile is `value`, uniform among these."""
        return (self._sums[value - 1] - rng.random() * self.weights[value - 1]) / self._sums[-1]

    @property
    def mean(self) -> float:
        """Expected value."""
        return fmean(range(1, len(self._sums) + 1), self.weights)


def humped(mean: float, most: int) -> Counts:
    """1 + a binomial of `most` - 1 trials: a single hump around the mean."""
    p, trials = (mean - 1) / (most - 1), most - 1
    return Counts([comb(trials, n) * p**n * (1 - p) ** (trials - n) for n in range(most)])


def skewed(mean: float, most: int) -> Counts:
    """Weights n * ratio ** n up to `most`: small values are the most frequent, and a few are large."""
    low, high = 1e-6, 1 - 1e-6  # of the ratio of successive weights; the mean rises with it
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _weighted(middle, most).mean < mean else (low, middle)
    return _weighted(low, most)


def _weighted(ratio: float, most: int) -> Counts:
    return Counts([n * ratio**n for n in range(1, most + 1)])


def shares(rng: Random, total: int, n: int) -> list[int]:
    """`n` random parts of at least 1 that add up to `total` (gamma weights of shape 2); needs total >= n."""
    weights = [rng.gammavariate(2.0, 1.0) for _ in range(n)]
    whole, spare = sum(weights), total - n
    ends = [int(spare * part / whole) for part in accumulate(weights)]
    ends[-1] = spare
    return [1 + end - start for start, end in zip([0, *ends], ends, strict=False)]
