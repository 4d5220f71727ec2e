"""Calibrations that labels make at run time: against other temperatures, the coverage, and a restart."""

import random
from collections.abc import Sequence
from math import exp, log

import numpy as np
import pytest

from flash.confidence import COVERAGE
from flash.learnt_calibration import (
    LEAST,
    MOST,
    QUESTIONS,
    STEP,
    LearntCalibrations,
    Pair,
    fitted_on,
)
from flash.temperature import Floats, fit_temperature

CHOICES = ("UP", "FLAT", "DOWN")


def drawn(seed: int, count: int, temperature: float) -> list[Pair]:
    """Answers whose logits are right at a temperature."""
    draw, found = random.Random(seed), list[Pair]()
    for _ in range(count):
        logits = tuple(draw.gauss(0, 3) for _ in CHOICES)
        weights = [exp(each / temperature) for each in logits]
        found.append((logits, draw.choices(range(len(CHOICES)), weights)[0]))
    return found


def loss(pairs: Sequence[Pair], temperature: float) -> float:
    """In plain words."""
    total = 0.0
    for logits, right in pairs:
        total += log(sum(exp(each / temperature) for each in logits)) - logits[right] / temperature
    return total


def packed(pairs: Sequence[Pair]) -> Floats:
    return np.array([[*logits, right] for logits, right in pairs])


def told(pairs: Sequence[Pair], known: LearntCalibrations | None = None) -> LearntCalibrations:
    known = known or LearntCalibrations()
    for logits, right in pairs:
        known.label("q", False, CHOICES, logits, right)
    return known


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_no_other_temperature_has_a_smaller_loss(temperature: float) -> None:
    pairs = drawn(1, 600, temperature)
    found = fit_temperature(np.array([each for each, _ in pairs]), np.array([each for _, each in pairs]))
    assert 0.7 * temperature < found < 1.4 * temperature
    least = loss(pairs, found)
    assert all(least < loss(pairs, found * factor) for factor in (0.9, 0.99, 1.01, 1.1))


def test_a_temperature_stays_within_its_bounds() -> None:
    """Answers that are always right have the coldest one, those that never are the hottest."""
    logits, right = np.array([[9.0, 1.0, 2.0]] * 20), np.zeros(20, np.int64)
    assert fit_temperature(logits, right) == pytest.approx(0.02)
    assert fit_temperature(logits, right + 1) == pytest.approx(50.0)
    assert fit_temperature(np.zeros((20, 3)), right) > 0, "any is as good"


@pytest.mark.parametrize("gap", [0.2, 0.5, 9.0])
def test_labels_that_are_all_right_make_no_answer_certain(gap: float) -> None:
    """Of n labels and one more, spread evenly: half of it is wrong. As the older half of the least labels."""
    pairs = [((gap, 0.0), 0) if number % 2 else ((0.0, gap), 1) for number in range(LEAST)]
    fitted = fitted_on("q", ("UP", "DOWN"), packed(pairs), numbered=False)
    assert fitted is not None
    assert fitted.temperature > 0.02, "its bound"
    assert fitted.probabilities((gap, 0.0))[1] == pytest.approx(0.5 / (LEAST // 2 + 1), rel=1e-4)


def test_sets_cover_what_is_asked_on_answers_to_come() -> None:
    fitted = fitted_on("q", CHOICES, packed(drawn(2, MOST, 2.0)), numbered=False)
    assert fitted is not None
    later = drawn(3, 3_000, 2.0)
    hits = sum(CHOICES[right] in fitted.choice_set(logits, COVERAGE) for logits, right in later)
    assert abs(hits / len(later) - COVERAGE) < 0.04  # three standard errors of 500 scores


def test_nothing_is_fitted_on_too_few_labels() -> None:
    pairs = drawn(4, LEAST, 1.0)
    assert told(pairs[:-1]).find("q", numbered=False) is None
    known = told(pairs)
    assert known.find("q", numbered=False) == fitted_on("q", CHOICES, packed(pairs), numbered=False)
    assert known.find("q", numbered=True) is None
    assert known.find("r", numbered=False) is None
    rare = [(logits, 0 if number > 8 else right) for number, (logits, right) in enumerate(pairs)]
    assert told(rare).find("q", numbered=False) is None
    for number in range(QUESTIONS):
        assert known.find("q", numbered=False) is not None
        known.label(f"r{number}", False, CHOICES, *pairs[0])
    assert known.find("q", numbered=False) is None, "there are too many questions"


@pytest.mark.parametrize("at", [0, LEAST - 1, LEAST, MOST + 2 * STEP + 7])
def test_a_saved_state_goes_on_as_without_a_stop(at: int) -> None:
    """Also between two steps, and where older labels are forgotten."""
    pairs = drawn(5, MOST + 4 * STEP + 3, 1.5)
    whole, second = LearntCalibrations(), LearntCalibrations()
    for number, pair in enumerate(pairs):
        if number == at:
            second = LearntCalibrations(whole.cut())
            assert second.find("q", numbered=False) == whole.find("q", numbered=False)
        told([pair], whole)
        if number >= at:
            told([pair], second)
    assert second.cut() == whole.cut()
    assert second.find("q", numbered=False) == whole.find("q", numbered=False)
    newest = pairs[: len(pairs) - len(pairs) % STEP][-MOST:]
    assert whole.find("q", numbered=False) == fitted_on("q", CHOICES, packed(newest), numbered=False)
