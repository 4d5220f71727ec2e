"""How good answers are: accuracy with intervals, by distance, at onset; and what confidence is worth."""

from itertools import pairwise
from math import inf, sqrt
from typing import Any

import msgspec
import numpy as np

from flash.confidence import COVERAGE, AdaptiveCoverage, Calibration, QuestionCalibration, threshold
from flash.temperature import calibrated_probabilities, softmax
from tapes.rules import UNDEFINED, Floats, Ints
from training.scores import Flags, accuracy_at, brier, expected_calibration_error, log_loss, risk_coverage
from training.sources import Answers

DISTANCES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, inf)
"""Edges of the distance to the boundary, in each question's own unit."""
_RESAMPLES = 400
_Z = 1.959964


class Share(msgspec.Struct, frozen=True):
    """A share with its 95 % confidence interval."""

    share: float
    low: float
    high: float
    answers: int


class AtDistance(msgspec.Struct, frozen=True):
    """Accuracy of answers whose distance to the boundary is at least ``begin`` and below ``end``."""

    begin: float
    end: float | None
    answers: int
    accuracy: float


class ConfidenceScores(msgspec.Struct, frozen=True):
    """What confidence is worth; ``log_loss`` in nats."""

    calibration_error: float
    brier: float
    log_loss: float
    right_at_80: float
    """Share right among the most confident 80 %."""
    risk_area: float


class Sets(msgspec.Struct, frozen=True):
    """Choice sets: share that contains the right answer, mean size, share with exactly one choice."""

    asked: float
    covered: float
    adaptive: float
    """Share covered where each label moves the next set's coverage."""
    size: float
    single: float


class QuestionScores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of one question. ``onset``: the label differs from the one a bar before."""

    question: str
    undefined: int
    accuracy: Share
    balanced: Share
    onset: Share | None = None
    persistence: Share | None = None
    undefined_found: float | None = None
    """Share of undefined ones that are answered NONE when NONE may be answered."""
    undefined_claimed: float | None = None
    """Share of defined ones that are then answered NONE."""
    distances: list[AtDistance] = []
    majority: float | None = None
    simple: float | None = None
    simple_balanced: float | None = None
    raw: ConfidenceScores | None = None
    calibrated: ConfidenceScores | None = None
    sets: Sets | None = None


class Report(msgspec.Struct, frozen=True):
    """An evaluation: what was asked of which model, and its scores by setting and question.

    ``lines``: what the bars were written in, as a calibration names them.
    """

    model: str
    revision: str
    data: dict[str, str | int | float]
    settings: dict[str, list[QuestionScores]]
    lines: str = ""


def wilson(right: int, answers: int) -> Share:
    """A share with Wilson's interval; for independent answers."""
    if not answers:
        return Share(0.0, 0.0, 1.0, 0)
    p, z2 = right / answers, _Z * _Z
    centre = (p + z2 / (2 * answers)) / (1 + z2 / answers)
    half = _Z * sqrt(p * (1 - p) / answers + z2 / (4 * answers * answers)) / (1 + z2 / answers)
    return Share(p, max(centre - half, 0.0), min(centre + half, 1.0), answers)


def balanced_accuracy(right: Flags, label: Ints, tape: Ints, seed: int = 0) -> Share:
    """Mean over the labels of the share right; bootstrap over tapes, whose answers go together."""
    kinds, kind = np.unique(label, return_inverse=True)
    _, group = np.unique(tape, return_inverse=True)
    tapes = int(group.max()) + 1
    total, hits = np.zeros((tapes, len(kinds))), np.zeros((tapes, len(kinds)))
    np.add.at(total, (group, kind), 1.0)
    np.add.at(hits, (group, kind), right.astype(float))
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(tapes, np.full(tapes, 1 / tapes), _RESAMPLES).astype(float)
    with np.errstate(invalid="ignore"):
        resampled = np.nanmean((drawn @ hits) / (drawn @ total), axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Share(float((hits.sum(0) / total.sum(0)).mean()), float(low), float(high), len(label))


def distance_of(answers: Answers) -> Floats:
    """Distance to the nearest boundary. In `range_location`'s middle the margin is 1 at both."""
    distance: Floats = np.abs(answers.margin)
    if answers.name == "range_location":
        distance = np.where(answers.label == 1, np.maximum(1 - distance, 0.0), distance)
    return distance


def by_distance(distance: Floats, right: Flags) -> list[AtDistance]:
    """Accuracy in bands of distance; bands without answers are left out."""
    found = []
    for begin, end in pairwise(DISTANCES):
        inside = (distance >= begin) & (distance < end)
        if inside.any():
            limit = None if end == inf else end
            found.append(AtDistance(begin, limit, int(inside.sum()), float(right[inside].mean())))
    return found


def given_confidence(logits: Floats, probabilities: Floats) -> Floats:
    """The probability of the answer that is given: the one with the highest logit."""
    confidence: Floats = probabilities[np.arange(len(logits)), logits.argmax(1)]
    return confidence


def confidence_scores(logits: Floats, probabilities: Floats, label: Ints) -> ConfidenceScores:
    """Scores of probabilities for answers with these logits."""
    confidence, right = given_confidence(logits, probabilities), logits.argmax(1) == label
    return ConfidenceScores(
        expected_calibration_error(confidence, right),
        brier(probabilities, label),
        log_loss(probabilities, label),
        accuracy_at(confidence, right, 0.8),
        risk_coverage(confidence, right).area,
    )


def set_scores(fitted: QuestionCalibration, logits: Floats, label: Ints, coverage: float = COVERAGE) -> Sets:
    """Scores of choice sets of this coverage, fixed and adaptive, in the order of the answers."""
    scores = 1 - softmax(logits, fitted.temperature)
    kept = scores <= threshold(fitted.scores, fitted.labels, coverage)
    own = scores[np.arange(len(label)), label]
    state, hits = AdaptiveCoverage.of(coverage), 0
    for score in own.tolist():
        hit = score <= threshold(fitted.scores, fitted.labels, state.asked)
        hits += hit
        state = state.after(hit)
    covered = kept[np.arange(len(label)), label]
    size = kept.sum(1)
    return Sets(
        coverage, float(covered.mean()), hits / len(label), float(size.mean()), float((size == 1).mean())
    )


def score(answers: Answers, calibration: Calibration | None = None, numbered: bool = False) -> QuestionScores:
    """All scores of one question; ``numbered``: as asked by number."""
    own = answers.defined
    right = own.right
    accuracy = wilson(int(right.sum()), len(right))
    undefined = len(answers.label) - len(right)
    is_undefined = answers.label == UNDEFINED
    claims = answers.logits.argmax(1) == len(answers.choices) if answers.choices else is_undefined
    found = float(claims[is_undefined].mean()) if undefined else None
    if not len(right) or not answers.choices:
        return QuestionScores(
            question=answers.name,
            undefined=undefined,
            accuracy=accuracy,
            balanced=accuracy,
            undefined_found=found,
        )
    logits, label = own.logits[:, :-1], own.label
    changed = (own.before != label) & (own.before != UNDEFINED)
    kept = own.before == label
    shares = np.bincount(label, minlength=len(answers.choices)) / len(label)
    simple = own.guess == label
    fitted = calibration.find(answers.name, answers.choices, numbered) if calibration else None
    return QuestionScores(
        question=answers.name,
        undefined=undefined,
        accuracy=accuracy,
        balanced=balanced_accuracy(right, label, own.tape),
        onset=wilson(int(right[changed].sum()), int(changed.sum())) if changed.any() else None,
        persistence=wilson(int(right[kept].sum()), int(kept.sum())) if kept.any() else None,
        undefined_found=found,
        undefined_claimed=float(claims[~is_undefined].mean()),
        distances=by_distance(distance_of(own), right),
        majority=float(shares.max()),
        simple=float(simple.mean()),
        simple_balanced=balanced_accuracy(simple, label, own.tape).share,
        raw=confidence_scores(logits, softmax(logits), label),
        calibrated=confidence_scores(logits, calibrated_probabilities(fitted, logits), label)
        if fitted
        else None,
        sets=set_scores(fitted, logits, label) if fitted else None,
    )


COLUMNS = (
    "question", "labels", "balanced", "95 %", "accuracy", "onset", "persist", "majority", "simple", "ECE",
    "at 80 %", "covered",
)  # fmt: skip


def tables(report: Report) -> list[Any]:
    """A rich table for each setting; shares in percent."""
    from rich.table import Table

    found = []
    for name, scores in report.settings.items():
        table = Table(title=f"{report.model}: {name}")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "question" else "right", no_wrap=True)
        for each in scores:
            table.add_row(*row(each))
        found.append(table)
    return found


def row(scores: QuestionScores) -> list[str]:
    """The cells of COLUMNS."""
    balanced, confidence = scores.balanced, scores.calibrated or scores.raw
    if not scores.accuracy.answers:  # there was no right answer
        return [scores.question, "0", *[""] * (len(COLUMNS) - 2)]
    return [
        scores.question,
        f"{scores.accuracy.answers:,}",
        _percent(balanced.share),
        f"{_percent(balanced.low)}..{_percent(balanced.high)}",
        _percent(scores.accuracy.share),
        _percent(scores.onset.share if scores.onset else None),
        _percent(scores.persistence.share if scores.persistence else None),
        _percent(scores.majority),
        _percent(scores.simple),
        f"{confidence.calibration_error:.3f}" if confidence else "",
        _percent(confidence.right_at_80 if confidence else None),
        _percent(scores.sets.covered if scores.sets else None),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
