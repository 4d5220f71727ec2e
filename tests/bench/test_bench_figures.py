"""Summaries of samples with known figures."""

from math import exp, log

import pytest

from bench.figures import (
    Figure,
    Goal,
    latency,
    median_ratio,
    over_better,
    quantiles,
    rate,
)


def test_noise_on_both_of_a_pair_does_not_change_the_ratio() -> None:
    """Half of the pairs ran ten times slower; ours always took half the reference's time."""
    ours, reference = [1, 10, 1, 10], [2, 20, 2, 20]
    assert median_ratio(ours, reference) == 0.5
    p50, p99 = latency("ask", ours, {}, against="other", reference_ns=reference)
    assert (p50.ratio, p50.name, p50.n) == (0.5, "ask P50", 4)
    assert (p99.ours, p99.reference, p99.paired) == (1e-5, 2e-5, None)


def test_rates_keep_their_range_and_their_runs() -> None:
    found = rate("ring", 100, [1.0, 4.0, 2.0], "records/s")
    assert (found.ours, found.low, found.high) == (50.0, 25.0, 100.0)
    assert found.samples == [100.0, 25.0, 50.0]


def test_the_better_is_better_on_all_seeds_together() -> None:
    """Here 4 and 1: half and twice that on the seeds, so 1 in the mean; two standard errors are log 4."""
    over, low, high = over_better([2.0, 2.0], [[4.0, 1.0], [2.0, 3.0]])
    assert (over, low, high) == pytest.approx((1.0, exp(-log(4)), exp(log(4))))
    assert over_better([1.0], [[2.0], [4.0]]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("goal", "low", "high", "verdict"),
    [
        (Goal(1.0), 0.8, 1.0, "met"),
        (Goal(1.0), 0.8, 1.1, "undecided"),
        (Goal(1.0), 1.01, 1.1, "missed"),
        (Goal(5.0, "at least"), 5.0, 6.0, "met"),
        (Goal(5.0, "at least"), 4.0, 6.0, "undecided"),
        (Goal(5.0, "at least"), 4.0, 4.9, "missed"),
        (Goal(1.25, "within"), 0.8, 1.25, "met"),
        (Goal(1.25, "within"), 0.7, 1.3, "undecided"),
        (Goal(1.25, "within"), 1.3, 1.4, "missed"),
        (Goal(1.25, "within"), 0.5, 0.7, "missed"),
        (Goal(1.25, "within"), 0.0, 0.0, "missed"),
    ],
)
def test_a_goal_inside_the_interval_is_undecided(goal: Goal, low: float, high: float, verdict: str) -> None:
    assert goal.judge(low, high) == verdict


def test_a_goal_speaks_of_the_ratio_or_of_ours() -> None:
    """An interval limits our value and does not judge a ratio."""
    of_ratio = Figure("pass", 60.0, against="floor", reference=100.0, goal=Goal(0.65), low=1.0, high=99.0)
    assert (of_ratio.judged, of_ratio.verdict) == (0.6, "met")
    of_ours = Figure("pass", 60.0, goal=Goal(65.0, of="ours"), low=50.0, high=70.0)
    assert (of_ours.judged, of_ours.verdict) == (60.0, "undecided")
    with pytest.raises(ValueError, match="goal"):
        _ = Figure("pass", 60.0, goal=Goal(0.65)).verdict


@pytest.mark.parametrize(("ours", "ratio"), [(1.0, 0.5), (2.0, 1.0), (3.0, 1.0), (8.0, 2.0)])
def test_a_ratio_to_a_range_is_that_to_its_nearer_end(ours: float, ratio: float) -> None:
    assert Figure("speed-up", ours, against="paper", reference=(2.0, 4.0)).ratio == ratio


def test_quantiles_are_samples_that_occurred() -> None:
    assert quantiles(list(range(100, 0, -1)), 0.5, 0.99, 1.0) == [50, 99, 100]


def test_figures_of_nothing_are_refused() -> None:
    """No samples, no runs, unequal pairs: an error instead of a number."""
    with pytest.raises(ValueError, match="one sample"):
        quantiles([], 0.5)
    with pytest.raises(ValueError, match="one run"):
        rate("ring", 1, [], "records/s")
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1], [1, 2])
