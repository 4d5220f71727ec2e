"""Fits piecewise-linear curves to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from scheduler.curves import CostCurve, FitError

Floats = NDArray[np.float64]


class Point(msgspec.Struct, frozen=True):
    """``seconds`` at ``size``; errors are relative to ``measured``, the whole time of the measurement."""

    size: float
    seconds: float
    measured: float

    @classmethod
    def whole(cls, size: float, seconds: float) -> Point:
        """A point whose error is relative to ``seconds``."""
        return cls(size, seconds, seconds)


def error_of(off: Sequence[float]) -> FitError:
    """Summary of relative errors, none negative. Raises ValueError when there are none."""
    if not off:
        raise ValueError("an error needs at least one prediction")
    return FitError(float(np.median(off)), float(max(off)))


def fit(points: Sequence[Point], max_knots: int, *, through_zero: bool) -> tuple[CostCurve, FitError]:
    """Fit a piecewise-linear curve to ``points``; returns it and its error at points left out.

    Knots lie at measured sizes. For every number of knots, dynamic programming chooses those with the least
    squared relative error over the medians of each size, and least squares sets their heights. Each size but
    the last is left out in turn. The fewest knots win whose mean error there and at the last size is within a
    tenth of the best, so noise does not become knots.

    ``max_knots``: the most knots after 0. ``through_zero``: size 0 takes 0 s; otherwise that height is
    fitted. Raises ValueError without points, and for a size or a measured time that is not positive.
    """
    if not points or any(not (0 < p.size < inf and 0 < p.measured < inf) for p in points):
        raise ValueError("a fit needs points of positive size and time")
    if max_knots < 1:
        raise ValueError("a fit needs at least one knot after 0")
    curves = _fits(points, max_knots, through_zero)
    sizes = sorted({p.size for p in points})
    if len(sizes) == 1:
        return curves[0], error_of([_off(curves[0], p) for p in points])
    off: list[list[float]] = [[] for _ in curves]
    for excluded in sizes[:-1]:
        parts = _fits([p for p in points if p.size != excluded], max_knots, through_zero)
        for k, found in enumerate(off):
            part = parts[min(k, len(parts) - 1)]
            found += [_off(part, p) for p in points if p.size == excluded]
    last = [[_off(curve, p) for p in points if p.size == sizes[-1]] for curve in curves]
    means = [float(np.mean([*found, *end])) for found, end in zip(off, last, strict=True)]
    best = next(k for k, mean in enumerate(means) if mean <= 1.1 * min(means))
    return curves[best], error_of(off[best])


def _off(curve: CostCurve, point: Point) -> float:
    return abs(curve(point.size) - point.seconds) / point.measured


def _fits(points: Sequence[Point], most: int, through_zero: bool) -> list[CostCurve]:
    """The best curve with 1, 2, ... ``most`` knots after 0, as far as there are sizes."""
    x = np.array(sorted({p.size for p in points}))
    y, scale = (
        np.array([np.median([getattr(p, name) for p in points if p.size == size]) for size in x])
        for name in ("seconds", "measured")
    )
    curves = []
    for chosen in choose_knots(x, y, scale, most, through_zero):
        knots = [0.0, *(float(x[i]) for i in chosen)]
        curves.append(CostCurve(tuple(knots), heights(points, knots, through_zero)))
    return curves


def choose_knots(x: Floats, y: Floats, scale: Floats, most: int, through_zero: bool) -> list[list[int]]:
    """For each number of knots up to ``most``, the rising indices of the best ones, with the last size.

    The cost of a choice is `first_error` plus the sum of `piece_error` over its pieces, from knot to knot.
    When the height at 0 is unknown, the first piece ends at the second size or later, so that points
    determine it. O(sizes^2) for each number, after a table of all pieces.
    """
    n = len(x)
    pieces = np.array([[piece_error(x, y, scale, start, end) for end in range(n)] for start in range(n)])
    cost = np.array([first_error(x, y, scale, end, through_zero) for end in range(n)])
    came: list[NDArray[np.int64]] = []
    chosen = [[n - 1]]
    while len(chosen) < most:
        ways = cost[:, None] + pieces
        came.append(np.argmin(ways, axis=0))
        cost = ways.min(axis=0)
        if cost[-1] == inf:
            break
        way = [n - 1]
        for step in reversed(came):
            way.append(int(step[way[-1]]))
        chosen.append(way[::-1])
    return chosen


def piece_error(x: Floats, y: Floats, scale: Floats, start: int, end: int) -> float:
    """Squared relative errors between two points of the line through them; infinite if they coincide."""
    if end <= start:
        return inf
    inner = slice(start + 1, end)
    line = y[start] + (x[inner] - x[start]) * (y[end] - y[start]) / (x[end] - x[start])
    return float(np.sum(((line - y[inner]) / scale[inner]) ** 2))


def first_error(x: Floats, y: Floats, scale: Floats, end: int, through_zero: bool) -> float:
    """Error of the first piece, up to point ``end``: from 0, or the best rising line from 0 s or above."""
    if not through_zero and end == 0:
        return 0.0 if len(x) == 1 else inf
    inner = slice(0, end)
    slope = max(0.0, y[end] / x[end])
    if not through_zero:
        run, rise = ((part[inner] - part[end]) / scale[inner] for part in (x, y))
        slope = min(max(0.0, float(run @ rise / (run @ run))), slope)
    line = y[end] + slope * (x[inner] - x[end])
    return float(np.sum(((line - y[inner]) / scale[inner]) ** 2))


def heights(points: Sequence[Point], knots: Sequence[float], through_zero: bool) -> tuple[float, ...]:
    """Heights of ``knots`` with no negative rise, by least squares of relative errors.

    A rise that would be negative is set to 0 and the others are solved again.
    """
    size, seconds, measured = np.array([msgspec.structs.astuple(p) for p in points]).T
    hats = np.array([np.interp(size, knots, row) for row in np.eye(len(knots))]).T
    rises = hats[:, ::-1].cumsum(axis=1)[:, ::-1] / measured[:, None]
    free = list(range(1 if through_zero else 0, len(knots)))
    found = np.zeros(len(knots))
    while free:
        solved = np.linalg.lstsq(rises[:, free], seconds / measured, rcond=None)[0]
        if (solved >= 0).all():
            found[free] = solved
            break
        del free[int(np.argmin(solved))]
    return tuple(float(height) for height in found.cumsum())
