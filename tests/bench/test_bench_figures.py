"""The summaries say what they claim about samples whose figures are known."""

from __future__ import annotations

import pytest

from bench.figures import latency, median_ratio, rates, slope_ms_per_1k


def test_latency_quantiles_are_samples_that_occurred() -> None:
    """Nearest rank: of 1 to 100 ms the median is 50 and the 99th percentile 99."""
    found = latency([i * 1_000_000 for i in range(100, 0, -1)])
    assert (found.n, found.p50_ms, found.p99_ms, found.max_ms) == (100, 50.0, 99.0, 100.0)


def test_slope_of_a_line_is_its_slope() -> None:
    """3 ms and 2 ms more for each 1,000 tokens."""
    contexts = [500, 1000, 4000, 9000]
    assert slope_ms_per_1k(contexts, [3_000_000 + 2000 * c for c in contexts]) == pytest.approx(2.0)


def test_noise_that_hits_both_of_a_pair_leaves_the_ratio() -> None:
    """Half of the pairs ran ten times slower, ours always at half the reference's time."""
    assert median_ratio([1, 10, 1, 10], [2, 20, 2, 20]) == 0.5


def test_rates_keep_their_range() -> None:
    """Of three runs over 100 things: median, slowest and fastest."""
    found = rates(100, [1.0, 4.0, 2.0])
    assert (found.median, found.low, found.high) == (50.0, 25.0, 100.0)


def test_figures_of_nothing_are_refused() -> None:
    """No samples, no runs, one context, unequal pairs: an error instead of a number."""
    with pytest.raises(ValueError, match="one sample"):
        latency([])
    with pytest.raises(ValueError, match="one run"):
        rates(1, [])
    with pytest.raises(ValueError, match="two contexts"):
        slope_ms_per_1k([7, 7], [1, 2])
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1], [1, 2])
