"""Fitted calibrations that labels adapt at run time: against the rule in plain words, a drift, and none."""

import random
from collections.abc import Sequence
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flash.confidence import CalibrationCurve, QuestionCalibration
from flash.learnt_calibration import LEAST, MOST, STEP, AdaptedCalibration, LearntCalibrations, adapted_on
from flash.temperature import Floats, calibrated_probabilities

CHOICES = ("UP", "FLAT", "DOWN")
PLAIN = QuestionCalibration(
    name="trend", text="", choices=list(CHOICES), temperature=2.0, scores=[0.5], labels=1, mean_gap=1.0
)
CURVED = replace(
    PLAIN, curves=[CalibrationCurve([0.0, 0.3, 1.0], [0.05, 0.2 + n / 10, 0.9]) for n in range(3)]
)
Labels = list[tuple[tuple[float, ...], int]]


def tempered(shares: Sequence[float], by: float) -> list[float]:
    """Probabilities at another temperature than theirs."""
    weights = [each ** (1 / by) for each in shares]
    return [each / sum(weights) for each in weights]


def drawn(seed: int, count: int, world: float, fitted: QuestionCalibration = PLAIN) -> Labels:
    """Answers whose calibrated probabilities are right at the temperature ``world``: at 1 as they are."""
    draw, found = random.Random(seed), Labels()
    for _ in range(count):
        logits = tuple(draw.gauss(0, 5) for _ in CHOICES)
        weights = tempered(fitted.probabilities(logits), world)
        found.append((logits, draw.choices(range(len(CHOICES)), weights)[0]))
    return found


def told(fitted: QuestionCalibration, labels: Labels, known: LearntCalibrations) -> QuestionCalibration:
    for logits, right in labels:
        known.label("q", False, CHOICES, logits, right, fitted)
    found = known.find("q", False, fitted)
    assert found is not None
    return found


def best_temperature(shares: list[list[float]], right: list[int]) -> float:
    """The least log loss, by thirds; a hundred labels more are as the calibration expects."""
    logs = np.log(shares)
    own = logs[np.arange(len(right)), right].sum() + 100 * (np.array(shares) * logs).sum(1).mean()

    def loss(by: float) -> float:
        totals = np.log(np.exp(logs / by).sum(1))
        return float(totals.sum() + 100 * totals.mean() - own / by)

    low, high = log(0.02), log(50)
    for _ in range(80):
        third = (high - low) / 3
        if loss(exp(low + third)) < loss(exp(high - third)):
            high -= third
        else:
            low += third
    return exp(low)


def expected(fitted: QuestionCalibration, labels: Labels) -> tuple[float, float]:
    """The rule in plain words: the temperature now, and the gain in standard errors that it had.

    Each hundred of the newest 500 labels is judged by the 500 before it.
    """
    shares = [fitted.probabilities(logits) for logits, _ in labels]
    right = [each for _, each in labels]
    gains = list[float]()
    for begin in range(max(len(labels) - 500, 100), len(labels), 100):
        older = slice(max(begin - 500, 0), begin)
        by = best_temperature(shares[older], right[older])
        for n in range(begin, min(begin + 100, len(labels))):
            gains.append(log(tempered(shares[n], by)[right[n]]) - log(shares[n][right[n]]))
    mean = sum(gains) / len(gains)
    spread = sqrt(sum((each - mean) ** 2 for each in gains) / len(gains))
    return best_temperature(shares[-500:], right[-500:]), mean / (spread / sqrt(len(gains)))


def packed(labels: Labels) -> Floats:
    return np.array([[*logits, right] for logits, right in labels])


@settings(max_examples=40)
@given(
    fitted=st.sampled_from([PLAIN, CURVED]),
    steps=st.integers(LEAST // STEP, MOST // STEP),
    shift=st.integers(0, MOST),
    world=st.floats(0.3, 4.0),
    seed=st.integers(0, 10**6),
)
def test_a_calibration_is_adapted_by_the_rule(
    fitted: QuestionCalibration, steps: int, shift: int, world: float, seed: int
) -> None:
    before = drawn(seed, min(shift, steps * STEP), 1.0, fitted)
    labels = before + drawn(seed + 1, steps * STEP - len(before), world, fitted)
    found, (by, gain) = adapted_on(fitted, packed(labels)), expected(fitted, labels)
    if isinstance(found, AdaptedCalibration):
        assert gain > 3 - 1e-3
        assert found.tempered == pytest.approx(by, rel=1e-3)
        for logits, _ in labels[:20]:
            shares = fitted.probabilities(logits)
            assert found.probabilities(logits) == pytest.approx(tempered(shares, by), rel=1e-2)
            assert found.choice_set(logits, 0.9) == fitted.choice_set(logits, 0.9)
            assert found.scaled(logits) == fitted.scaled(logits)
    else:
        assert found is fitted
        assert gain <= 3 + 1e-3


@pytest.mark.parametrize("fitted", [PLAIN, CURVED])
def test_probabilities_of_many_answers_are_those_of_each(fitted: QuestionCalibration) -> None:
    labels = drawn(1, 100, 1.0)
    together = calibrated_probabilities(fitted, packed(labels)[:, :-1])
    assert together.tolist() == [pytest.approx(fitted.probabilities(logits)) for logits, _ in labels]


def log_loss(fitted: QuestionCalibration, labels: Labels) -> float:
    return -sum(log(fitted.probabilities(logits)[right]) for logits, right in labels) / len(labels)


def ece(fitted: QuestionCalibration, labels: Labels) -> float:
    """Of the likeliest choice, in ten bins of equal mass."""
    best = []
    for logits, right in labels:
        shares = fitted.probabilities(logits)
        best.append((max(shares), shares.index(max(shares)) == right))
    bins = np.array_split(np.array(sorted(best)), 10)
    return float(sum(len(each) * abs(each[:, 0].mean() - each[:, 1].mean()) for each in bins) / len(best))


@pytest.mark.parametrize("fitted", [PLAIN, CURVED])
@pytest.mark.parametrize("world", [0.5, 2.0, 3.0])
def test_a_drift_is_followed(fitted: QuestionCalibration, world: float) -> None:
    known = LearntCalibrations()
    assert told(fitted, drawn(2, 1_000, 1.0, fitted), known) is fitted
    adapted = told(fitted, drawn(3, 1_000, world, fitted), known)
    later = drawn(4, 2_000, world, fitted)
    assert log_loss(adapted, later) < log_loss(fitted, later) - 0.01
    assert ece(adapted, later) < ece(fitted, later) / 2
    assert known.adapted == 1
    assert told(fitted, drawn(5, 1_000, 1.0, fitted), known) is fitted, "the drift is over"
    assert known.adapted == 0


@pytest.mark.parametrize("seed", range(5))
def test_without_a_drift_the_fitted_one_stays(seed: int) -> None:
    known = LearntCalibrations()
    for part in range(30):
        assert told(PLAIN, drawn(100 * seed + part, STEP, 1.0), known) is PLAIN


def test_a_few_labels_spoil_nothing() -> None:
    """Fewer than `LEAST`, or a handful of the worst ones among many."""
    known = LearntCalibrations()
    assert told(PLAIN, drawn(6, LEAST - 1, 8.0), known) is PLAIN
    worst: Labels = [((40.0, 0.0, 0.0), 2)] * 5
    known = LearntCalibrations()
    assert told(PLAIN, drawn(7, MOST // 2, 1.0) + worst + drawn(8, 495, 1.0), known) is PLAIN


@pytest.mark.parametrize("at", [STEP, LEAST, MOST + 2 * STEP + 7])
def test_an_adapted_calibration_goes_on_after_a_restart(at: int) -> None:
    labels = drawn(9, MOST + 4 * STEP + 3, 2.5)
    whole, second = LearntCalibrations(), LearntCalibrations()
    for number, label in enumerate(labels):
        if number == at:
            second = LearntCalibrations(whole.cut())
            assert second.find("q", False, PLAIN) == whole.find("q", False, PLAIN)
        found = told(PLAIN, [label], whole)
        if number >= at:
            assert told(PLAIN, [label], second) == found
    assert second.cut() == whole.cut()
    assert isinstance(found, AdaptedCalibration)
    newer = replace(PLAIN, temperature=5.0)
    assert second.find("q", False, newer) is newer, "it was calibrated again, and that is right"
