"""Curves against numpy's interpolation, their fit against a search through all choices of knots."""

from itertools import combinations, pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.profile.curve_fit import Point, choose_knots, error_of, first_error, fit, heights, piece_error
from scheduler.curves import CostCurve
from tests.kit import tolerance

steps = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8)


def curve_of(rises: list[tuple[int, int]], start: float = 0.0) -> CostCurve:
    x, y = np.cumsum([(0, start), *rises], axis=0).T
    return CostCurve(tuple(map(float, x)), tuple(map(float, y)))


def points_on(curve: CostCurve, sizes: list[float]) -> list[Point]:
    return [Point.whole(size, curve(size)) for size in sizes]


@given(steps, st.floats(0, 10), st.floats(0, 600))
def test_a_curve_interpolates_between_knots_and_extrapolates_behind_the_last(rises, start, size) -> None:
    curve = curve_of(rises, start)
    (x0, x1), (y0, y1) = curve.x[-2:], curve.y[-2:]
    wanted = np.interp(size, curve.x, curve.y) if size <= x1 else y1 + (size - x1) * (y1 - y0) / (x1 - x0)
    bound = tolerance.of_float64(600 * (1 + max(curve.y)))  # a slope times the farthest size
    assert curve(size) == tolerance.near(wanted, bound)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((0.0,), (0.0,)),
        ((0.0, 1.0), (0.0,)),
        ((1.0, 2.0), (0.0, 1.0)),
        ((0.0, 2.0, 2.0), (0.0, 1.0, 2.0)),
        ((0.0, 1.0, 2.0), (0.0, 2.0, 1.0)),
        ((0.0, 1.0), (-1.0, 1.0)),
        ((0.0, 1.0), (0.0, inf)),
        ((0.0, 1.0), (nan, 1.0)),
    ],
)
def test_invalid_curves_are_refused(x, y) -> None:
    with pytest.raises(ValueError, match="curve"):
        CostCurve(x, y)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 9)), min_size=1, max_size=7),
    st.integers(1, 7),
    st.booleans(),
)
def test_no_other_choice_of_as_many_knots_is_better(points, most, through_zero) -> None:
    x, y = np.cumsum([n for n, _ in points]).astype(float), np.array([seconds for _, seconds in points])
    scale, last = y + 0.5, len(points) - 1

    def error(knots: tuple[int, ...]) -> float:
        pieces = (piece_error(x, y, scale, a, b) for a, b in pairwise(knots))
        return first_error(x, y, scale, knots[0], through_zero) + sum(pieces)

    found = choose_knots(x, y, scale, most, through_zero)
    for k, knots in enumerate(found, start=1):
        others = [(*inner, last) for inner in combinations(range(last), k - 1)]
        assert tuple(knots) in others
        assert error(tuple(knots)) == pytest.approx(min(map(error, others)), rel=1e-9, abs=1e-12)
    sizes = len(points) if through_zero or len(points) == 1 else len(points) - 1
    assert len(found) == min(most, sizes)


def test_the_error_of_a_piece_is_that_of_what_lies_between_its_ends() -> None:
    x, y, scale = np.array([1.0, 2.0, 4.0]), np.array([1.0, 5.0, 7.0]), np.array([1.0, 2.0, 7.0])
    assert piece_error(x, y, scale, 0, 2) == ((3.0 - 5.0) / 2.0) ** 2
    assert piece_error(x, y, scale, 0, 1) == 0.0
    assert piece_error(x, y, scale, 1, 1) == inf
    assert first_error(x, y, scale, 1, True) == (2.5 - 1.0) ** 2
    assert first_error(x, y, scale, 0, False) == inf
    # the best line through (2, 5) meets (1, 1), but would begin below 0: through 0 is the steepest
    assert first_error(x, y, scale, 1, False) == (2.5 - 1.0) ** 2
    assert first_error(x, np.array([3.0, 5.0, 7.0]), scale, 1, False) == 0.0


@given(steps, st.booleans())
def test_heights_of_what_lies_on_a_curve_are_the_curves(rises, through_zero) -> None:
    curve = curve_of([(n, rise + 1) for n, rise in rises], 0.0 if through_zero else 3.0)
    sizes = [*curve.x[1:], *((a + b) / 2 for a, b in pairwise(curve.x))]
    found = heights(points_on(curve, sizes), list(curve.x), through_zero)
    assert found == pytest.approx(curve.y, rel=1e-6, abs=1e-6)


def test_heights_are_the_best_of_relative_errors() -> None:
    points = [Point.whole(1, 1.0), Point.whole(1, 3.0), Point.whole(2, 8.0)]
    (_, one, two) = heights(points, [0.0, 1.0, 2.0], True)
    # the height h at 1 with the least (h - 1)^2 + (h - 3)^2 / 9
    assert (one, two) == pytest.approx((1.2, 8.0))


def test_heights_that_would_fall_are_level() -> None:
    points = [Point(1, 4.0, 1.0), Point(2, 2.0, 1.0), Point(3, 5.0, 1.0)]
    assert heights(points, [0.0, 1.0, 2.0, 3.0], True) == pytest.approx((0.0, 3.0, 3.0, 5.0))


def test_a_bend_is_found_where_it_is() -> None:
    curve = CostCurve((0.0, 64.0, 512.0), (0.5, 0.6, 8.0))
    points = points_on(curve, [2.0**i for i in range(10)])
    found, error = fit(points, 6, through_zero=False)
    assert 64.0 in found.x
    assert len(found.x) <= 4
    assert [found(p.size) for p in points] == pytest.approx([p.seconds for p in points], rel=1e-6)
    assert error.median == pytest.approx(0, abs=1e-6)


def test_noise_does_not_become_knots_and_shows_in_the_error() -> None:
    random = np.random.default_rng(5)
    line = [
        Point.whole(n, 0.01 * n * float(random.uniform(0.9, 1.1))) for n in range(8, 200, 8) for _ in "123"
    ]
    found, error = fit(line, 8, through_zero=True)
    assert len(found.x) <= 3
    assert found(100) == pytest.approx(1.0, rel=0.05)
    assert 0.02 < error.median < 0.1


def test_the_error_is_that_of_sizes_left_out() -> None:
    spiked = [Point.whole(n, float(n)) for n in (1, 2, 4, 8, 16)]
    spiked[2] = Point.whole(4, 40.0)
    found, error = fit(spiked, 5, through_zero=True)
    assert error.worst >= 0.9  # nothing else says that 4 takes 40
    assert found.y == tuple(sorted(found.y))


def test_errors_are_parts_of_all_that_was_measured() -> None:
    part = [Point(n, 0.01 * n + wrong, 10.0) for n, wrong in ((1, 0.05), (2, -0.05), (4, 0.05), (64, 0.0))]
    found, error = fit(part, 4, through_zero=True)
    assert error.worst < 0.02
    assert found(64) == pytest.approx(0.64, abs=0.05)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 99), st.floats(0.1, 9)), min_size=1, max_size=10), st.booleans())
def test_whatever_was_measured_the_curve_never_falls(points, through_zero) -> None:
    found, error = fit(
        [Point.whole(*p) for p in points], 4, through_zero=through_zero
    )  # Curve itself refuses
    assert found.x[-1] == max(n for n, _ in points)
    assert 0 <= error.median <= error.worst
    assert not through_zero or found.y[0] == 0


@pytest.mark.parametrize("points", [[], [Point.whole(0, 1)], [Point.whole(1, 0)], [Point.whole(1, inf)]])
def test_a_fit_needs_points(points) -> None:
    with pytest.raises(ValueError, match="points"):
        fit(points, 3, through_zero=True)
    with pytest.raises(ValueError, match="knot"):
        fit([Point.whole(1, 1)], 0, through_zero=True)


def test_an_error_needs_a_prediction() -> None:
    with pytest.raises(ValueError, match="at least one"):
        error_of([])
    assert error_of([0.3, 0.1, 0.2]).median == 0.2
