"""Calibration of an imagined model whose right temperature is known."""

from math import inf

import numpy as np
import pytest

from flash.confidence import Calibration, QuestionCalibration, threshold
from flash.temperature import calibrated_probabilities, fit_temperature, softmax
from tapes.rules import UNDEFINED, Floats, Ints
from tests.kit.tolerance import near, of_float64
from tests.training.answered import answers
from training.calibrate import fit, fit_curves, fit_question, half_of
from training.evaluate import score, set_scores

EXACT = of_float64(1.0)
TEXTS = {"trend": "Up or down?"}


def fitted(logits: Floats, label: Ints) -> QuestionCalibration:
    found = fit_question(
        "trend", "Up or down?", ("UP", "DOWN"), logits, label, half_of(np.arange(len(label)))
    )
    assert found is not None
    return found


@pytest.mark.parametrize("choices", [("UP", "DOWN"), ("UPPER", "MIDDLE", "LOWER")])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_the_temperature_is_found_that_the_labels_were_drawn_with(
    choices: tuple[str, ...], sharpness: float
) -> None:
    """Within the noise of 8,000 labels, and with a smaller log loss than its neighbours."""
    each = answers(8000, choices=choices, sharpness=sharpness).defined
    logits = each.logits[:, :-1]
    temperature = fit_temperature(logits, each.label)
    assert abs(temperature / sharpness - 1) < 0.1

    def loss(t: float) -> float:
        return float(-np.log(softmax(logits, t)[np.arange(len(each.label)), each.label]).mean())

    assert loss(temperature) <= min(loss(temperature * 0.97), loss(temperature * 1.03))


def test_curves_win_where_a_temperature_cannot_help() -> None:
    """Logits that favour one choice more than the labels do: the curves mend the bias."""
    each = answers(8000, sharpness=1.0).defined
    logits = each.logits[:, :-1] + np.array([1.5, 0.0])
    found = fitted(logits, each.label)
    assert found.curves
    probabilities = calibrated_probabilities(found, logits)
    assert abs(probabilities[:, 0].mean() - (each.label == 0).mean()) < 0.01


def test_a_temperature_alone_is_kept_where_it_is_enough() -> None:
    each = answers(4000).defined
    assert not fitted(each.logits[:, :-1], each.label).curves


def test_curves_rise_and_leave_no_certainty() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(500)
    label = (rng.random(500) > p).astype(np.int64)
    for curve in fit_curves(np.stack([p, 1 - p], 1), label):
        assert curve.y == sorted(curve.y)
        assert curve.y[0] > 0
        assert curve.y[-1] < 1


def test_many_answers_at_once_equal_one_by_one() -> None:
    each = answers(3000, sharpness=1.0).defined
    logits = each.logits[:, :-1] + np.array([1.5, 0.0])
    found = fitted(logits, each.label)
    together = calibrated_probabilities(found, logits[:50])
    for row in range(50):
        alone = found.probabilities(logits[row].tolist())
        assert [near(p, EXACT) for p in together[row].tolist()] == alone


def test_sets_cover_what_is_asked_on_tapes_apart_from_those_fitted() -> None:
    each, other = answers(8000, tapes=8000), answers(8000, seed=5, tapes=8000)
    found = fit([each], TEXTS)
    assert [tuple(question.choices) for question in found] == [("UP", "DOWN"), ("UP", "DOWN", "NONE")]
    calibration = Calibration(model="m", lines="compact", data={}, questions=found)
    scores = score(other, calibration)
    assert scores.sets is not None
    assert scores.calibrated is not None
    assert abs(scores.sets.covered - 0.9) < 0.02
    assert abs(scores.sets.adaptive - 0.9) < 0.01
    assert scores.calibrated.calibration_error < 0.03
    assert scores.raw is not None
    assert scores.raw.calibration_error > scores.calibrated.calibration_error


def test_a_choice_set_is_the_one_that_the_scores_allow() -> None:
    each = answers(2000).defined
    found = fitted(each.logits[:, :-1], each.label)
    limit = threshold(found.scores, found.labels, 0.9)
    assert limit < inf
    for row in range(50):
        logits = each.logits[row, :-1]
        inside = {found.choices[i] for i in np.flatnonzero(1 - softmax(logits, found.temperature) <= limit)}
        assert set(found.choice_set(logits.tolist(), 0.9)) == inside


def test_too_few_labels_fit_nothing() -> None:
    each = answers(300)
    assert fit([each], TEXTS) == []
    only = answers(3000)
    one_label = np.where(only.label == UNDEFINED, UNDEFINED, 0)
    assert (
        fit_question(
            "trend", "", ("UP", "DOWN"), only.logits[:, :2], np.maximum(one_label, 0), half_of(only.tape)
        )
        is None
    )


def test_sets_of_very_confident_answers_cover_what_is_asked() -> None:
    """A right answer's score is far below a millionth; logits in steps of 1/8 tie."""
    rng = np.random.default_rng(0)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        label, hard = rng.integers(0, 2, 8000), rng.random(8000) < 0.03
        gap = np.round(8 * np.where(hard, rng.normal(0.5, 1, 8000), rng.normal(24, 3, 8000))) / 8
        logits = np.zeros((8000, 2))
        logits[np.arange(8000), label] = gap
        return logits, label

    logits, label = draw()
    fitted = fit_question("q", "Q?", ("A", "B"), logits, label, half_of(np.arange(8000)))
    assert fitted is not None
    logits, label = draw()
    served = [
        fitted.choices[right] in fitted.choice_set(row, 0.9)
        for row, right in zip(logits.tolist(), label.tolist(), strict=True)
    ]
    assert set_scores(fitted, logits, label).covered > 0.88
    assert np.mean(served) > 0.88
