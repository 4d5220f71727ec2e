"""Fits a calibration: a temperature per question, isotonic curves where they win, and conformity scores."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from sklearn.isotonic import IsotonicRegression

from flash.confidence import CalibrationCurve, QuestionCalibration
from flash.temperature import calibrated_probabilities, fit_temperature, softmax
from tapes.rules import UNDEFINED, Flags, Floats, Ints
from training.scores import log_loss, order_statistics
from training.sources import Answers
from training.tokenizer import NONE

LEAST_LABELS, LEAST_OF_A_CHOICE = 200, 10
"""Labels of a question, on tapes to fit and apart, and of each choice, below which nothing is fitted."""


def fit_curves(scaled: Floats, label: Ints) -> list[CalibrationCurve]:
    """Isotonic regression of each choice against the others, from probabilities [answers, choices]."""
    least = 0.5 / len(label)  # no probability is 0 or 1: the next label may be the first of its kind
    curves = []
    for choice in range(scaled.shape[1]):
        fitted = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip")
        fitted.fit(scaled[:, choice], label == choice)
        x, y = fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist()
        curves.append(CalibrationCurve([round(v, 6) for v in x], [round(v, 6) or least for v in y]))
    return curves


def fit_question(
    name: str,
    text: str,
    choices: tuple[str, ...],
    logits: Floats,
    label: Ints,
    apart: Flags,
    numbered: bool = False,
) -> QuestionCalibration | None:
    """Fit on the answers that are not ``apart``; choose the method and take scores on those that are.

    None: too few labels.
    """
    ours, theirs = label[~apart], label[apart]
    rarest = np.bincount(ours, minlength=len(choices)).min()
    if min(len(ours), len(theirs)) < LEAST_LABELS or rarest < LEAST_OF_A_CHOICE:
        return None
    temperature = fit_temperature(logits[~apart], ours)
    curves = fit_curves(softmax(logits[~apart], temperature), ours)
    held = softmax(logits[apart], temperature)
    ordered = np.sort(logits, axis=1)
    fitted = QuestionCalibration(
        name=name,
        text=text,
        choices=list(choices),
        temperature=temperature,
        curves=curves,
        scores=[_above(s) for s in order_statistics(1 - held[np.arange(len(theirs)), theirs])],
        labels=len(theirs),
        mean_gap=float((ordered[:, -1] - ordered[:, -2]).mean()),
        numbered=numbered,
    )
    isotonic = log_loss(calibrated_probabilities(fitted, logits[apart]), theirs)
    return fitted if isotonic < log_loss(held, theirs) else msgspec.structs.replace(fitted, curves=[])


def fit(
    answers: Iterable[Answers], texts: dict[str, str], numbered: bool = False
) -> list[QuestionCalibration]:
    """Every question with choices, without NONE (where the rule is defined) and with it."""
    found = []
    for each in answers:
        if not each.choices:
            continue
        defined, with_none = each.defined, np.where(each.label == UNDEFINED, len(each.choices), each.label)
        ways = (
            (each.choices, defined.logits[:, :-1], defined.label, defined.tape),
            ((*each.choices, NONE), each.logits, with_none, each.tape),
        )
        for choices, logits, label, tape in ways:
            apart = half_of(tape)
            fitted = fit_question(each.name, texts[each.name], choices, logits, label, apart, numbered)
            if fitted is not None:
                found.append(fitted)
    return found


def _above(score: float) -> float:
    """A few digits, and never below ``score``: equal scores belong to the set however they were computed."""
    return float(f"{score * (1 + 1e-6) + 1e-15:.7g}")


def half_of(tape: Ints) -> Flags:
    """True for about half of the tapes, drawn once."""
    names, inverse = np.unique(tape, return_inverse=True)
    drawn: Flags = (np.random.default_rng(0).permutation(len(names)) % 2 == 1)[inverse]
    return drawn
