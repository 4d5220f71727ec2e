"""Piecewise-linear curves: the form of the cost functions (*Stream2LLM* section 4.3).

A curve with few knots evaluates in a fraction of a microsecond, is defined between and beyond the measured
sizes, and, unlike a polynomial, never falls.
"""

from bisect import bisect_right
from itertools import pairwise
from math import isfinite

import msgspec


class CostCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds by size: linear between knots, with the last slope beyond them.

    ``x``: sizes (tokens or blocks), rising from 0; ``y``: seconds, never falling. Raises ValueError
    otherwise, and for fewer than two knots.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) < 2:
            raise ValueError(f"a curve needs two knots or more, not {len(self.x)} x and {len(self.y)} y")
        if not all(map(isfinite, (*self.x, *self.y))):
            raise ValueError("a curve's knots must be finite numbers")
        if self.x[0] != 0 or any(a >= b for a, b in pairwise(self.x)):
            raise ValueError("a curve's x must begin at 0 and rise")
        if self.y[0] < 0 or any(a > b for a, b in pairwise(self.y)):
            raise ValueError("a curve's y must not be negative and must never fall")

    def __call__(self, size: float) -> float:
        """Seconds at ``size``, at least 0. O(log knots)."""
        x, y = self.x, self.y
        right = bisect_right(x, size, 1, len(x) - 1)
        x0, y0 = x[right - 1], y[right - 1]
        return y0 + (size - x0) * (y[right] - y0) / (x[right] - x0)


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of predictions relative to the measured values; half of them are at most ``median``."""

    median: float
    worst: float
