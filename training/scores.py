"""Scores of confidence: calibration error, Brier score, log loss, risk by coverage; and conformity scores."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tapes.rules import Floats, Ints

Flags = npt.NDArray[np.bool_]

QUANTILES = 500
"""Order statistics kept of a question's scores; sets cover at most 1 / QUANTILES too much."""
_LEAST = 1e-12


def order_statistics(scores: Floats, most: int = QUANTILES) -> list[float]:
    """At most ``most`` of the sorted scores, at equally spaced ranks, the largest one included."""
    ordered = np.sort(scores)
    count = min(most, len(ordered))
    ranks = np.array([(j * len(ordered)) // count for j in range(1, count + 1)])
    found: list[float] = ordered[ranks - 1].tolist()
    return found


class Bin(NamedTuple):
    """Answers of about equal confidence: their number, mean confidence, and share that is right."""

    answers: int
    confidence: float
    right: float


def reliability(confidence: Floats, right: Flags, bins: int = 15) -> list[Bin]:
    """Bins of equal mass by confidence; equal confidences share a bin, so the order of ties has no say."""
    _, inverse, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2
    of_value = np.minimum((middle * bins / len(confidence)).astype(np.int64), bins - 1)
    of_answer = of_value[inverse]
    found = []
    for number in np.unique(of_value):
        inside = of_answer == number
        found.append(Bin(int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean())))
    return found


def expected_calibration_error(confidence: Floats, right: Flags, bins: int = 15) -> float:
    """Mean distance between confidence and accuracy over bins of equal mass."""
    parts = reliability(confidence, right, bins)
    return sum(part.answers * abs(part.confidence - part.right) for part in parts) / len(confidence)


def brier(probabilities: Floats, label: Ints) -> float:
    """Mean squared distance of [answers, choices] probabilities from the right choice's certainty."""
    wanted = np.eye(probabilities.shape[1])[label]
    return float(((probabilities - wanted) ** 2).sum(1).mean())


def log_loss(probabilities: Floats, label: Ints) -> float:
    """Mean negative log probability of the right choice, nats."""
    given = probabilities[np.arange(len(label)), label]
    return float(-np.log(np.maximum(given, _LEAST)).mean())


class RiskCoverage(NamedTuple):
    """Share of wrong answers among the most confident ones, at each coverage that a threshold can reach."""

    coverage: Floats
    risk: Floats

    @property
    def area(self) -> float:
        """Area under the curve (trapezoids, from the first coverage on); smaller is better."""
        return float(np.trapezoid(self.risk, self.coverage))


def risk_coverage(confidence: Floats, right: Flags) -> RiskCoverage:
    """Answers of equal confidence are kept or dropped together."""
    order = np.argsort(-confidence, kind="stable")
    ordered, wrong = confidence[order], np.cumsum(~right[order])
    last = np.append(ordered[1:] != ordered[:-1], True)
    kept = np.arange(1, len(ordered) + 1)[last]
    return RiskCoverage(kept / len(ordered), wrong[last] / kept)


def accuracy_at(confidence: Floats, right: Flags, coverage: float) -> float:
    """Share right among the most confident ``coverage`` of the answers; ties at the edge count in part."""
    found = risk_coverage(confidence, right)
    kept = found.coverage * len(right)
    wrong = np.interp(coverage * len(right), np.append(0.0, kept), np.append(0.0, found.risk * kept))
    return float(1 - wrong / (coverage * len(right)))
