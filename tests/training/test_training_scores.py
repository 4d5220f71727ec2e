"""Scores of confidence against brute force and values known in advance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tapes.rules import Floats
from tests.kit.tolerance import near, of_float64
from training.scores import (
    Flags,
    accuracy_at,
    brier,
    expected_calibration_error,
    log_loss,
    reliability,
    risk_coverage,
)

EXACT = of_float64(1.0)
answers = st.lists(
    st.tuples(st.sampled_from((0.5, 0.6, 0.61, 0.9, 0.95, 1.0)), st.booleans()), min_size=1, max_size=60
)


def arrays(drawn: list[tuple[float, bool]]) -> tuple[Floats, Flags]:
    return np.array([p for p, _ in drawn]), np.array([right for _, right in drawn])


@given(drawn=answers, bins=st.integers(1, 8), seed=st.integers(0, 3))
def test_bins_hold_equal_mass_and_ties_stay_together(
    drawn: list[tuple[float, bool]], bins: int, seed: int
) -> None:
    """The order of the answers has no say, every answer is in one bin, and no confidence in two."""
    confidence, right = arrays(drawn)
    found = reliability(confidence, right, bins)
    shuffled = np.random.default_rng(seed).permutation(len(right))
    again = reliability(confidence[shuffled], right[shuffled], bins)
    assert [part.answers for part in again] == [part.answers for part in found]
    assert sum(part.answers for part in found) == len(right)
    assert len(found) <= min(bins, len(set(confidence.tolist())))
    assert sum(part.answers * part.right for part in found) == near(right.sum(), of_float64(60))
    edges = [part.confidence for part in found]
    assert edges == sorted(edges)


def test_bins_of_different_values_are_equally_large() -> None:
    confidence = np.linspace(0.5, 1, 150)
    assert [part.answers for part in reliability(confidence, confidence > 0.7, 15)] == [10] * 15


def test_calibration_error_of_known_answers() -> None:
    """Nine of ten right at 0.9 is perfect; at 1.0 it is off by 0.1, in one tie."""
    right = np.array([True] * 9 + [False])
    assert expected_calibration_error(np.full(10, 0.9), right) == near(0.0, EXACT)
    assert expected_calibration_error(np.full(10, 1.0), right) == near(0.1, EXACT)
    half = np.array([0.6] * 10 + [0.8] * 10)
    assert expected_calibration_error(half, np.array([True] * 20), 2) == near(0.3, EXACT)


def test_the_error_of_a_perfect_predictor_shrinks_with_its_labels() -> None:
    """0.007 at 20,000 labels and 90 %: what is left is noise, so 0.02 can be asked for."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.85, 0.95, 20_000)
    assert expected_calibration_error(confidence, rng.random(20_000) < confidence) < 0.012


def test_brier_and_log_loss_of_known_answers() -> None:
    probabilities, label = np.array([[0.8, 0.2], [0.5, 0.5], [0.0, 1.0]]), np.array([0, 1, 1])
    assert brier(probabilities, label) == near((0.08 + 0.5 + 0) / 3, EXACT)
    assert log_loss(probabilities, label) == near(-(np.log(0.8) + np.log(0.5)) / 3, EXACT)


@given(drawn=answers)
def test_risk_at_a_coverage_is_the_share_wrong_above_a_threshold(drawn: list[tuple[float, bool]]) -> None:
    confidence, right = arrays(drawn)
    found = risk_coverage(confidence, right)
    thresholds = sorted(set(confidence.tolist()), reverse=True)
    for limit, coverage, risk in zip(thresholds, found.coverage, found.risk, strict=True):
        kept = confidence >= limit
        assert coverage == near(kept.mean(), EXACT)
        assert risk == near((~right[kept]).mean(), EXACT)


def test_accuracy_at_a_coverage_takes_the_mean_of_ties_at_the_edge() -> None:
    confidence = np.array([0.9, 0.8, 0.8, 0.7])
    right = np.array([True, True, False, False])
    assert accuracy_at(confidence, right, 0.25) == near(1.0, EXACT)
    assert accuracy_at(confidence, right, 0.5) == near(0.75, EXACT)
    assert accuracy_at(confidence, right, 1.0) == near(0.5, EXACT)


def test_area_of_known_risks() -> None:
    found = risk_coverage(np.array([0.9, 0.8]), np.array([True, False]))
    assert found.area == near(0.125, EXACT)
