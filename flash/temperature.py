"""Calibrated probabilities of many answers at once, and their temperature (Guo et al., 2017).

Of one answer: `QuestionCalibration`.
"""

from math import sqrt

import numpy as np
import numpy.typing as npt

from flash.confidence import QuestionCalibration

_COLDEST, _HOTTEST = 0.02, 50.0

Floats = npt.NDArray[np.float64]


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """Probabilities along the last axis."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    probabilities: Floats = weights / weights.sum(-1, keepdims=True)
    return probabilities


def calibrated_probabilities(fitted: QuestionCalibration, logits: Floats) -> Floats:
    """`QuestionCalibration.probabilities` of many answers at once, [answers, choices]."""
    scaled = softmax(logits, fitted.temperature)
    if not fitted.curves:
        return scaled
    risen = np.stack([np.interp(scaled[:, i], curve.x, curve.y) for i, curve in enumerate(fitted.curves)], 1)
    probabilities: Floats = risen / risen.sum(1, keepdims=True)
    return probabilities


def fit_temperature(
    logits: Floats, right: npt.NDArray[np.int64], prior: float = 0.0, at: float = 1.0
) -> float:
    """The temperature with the smallest log loss of the ``right`` choices, within bounds.

    ``logits``: [answers, choices]. ``prior``: this number of labels more, spread as the logits say at a
    temperature ``at``; evenly over the choices where that is infinite.

    The loss is convex in the temperature's inverse: its slope is the logits' mean less that of the right
    choice, and the slope's own their variance. So Newton's method finds it, with bisection where a step
    leaves the bounds that earlier slopes have set.
    """
    own, more = logits[np.arange(len(right)), right], prior / len(right)
    own = (own + more * (softmax(logits, at) * logits).sum(1)) / (1 + more)
    gaps = logits - own[:, None]
    low, high, inverse = 1 / _HOTTEST, 1 / _COLDEST, 1.0
    while high / low > 1 + 1e-9:
        shares = softmax(gaps, 1 / inverse)
        means = np.einsum("ij,ij->i", shares, gaps)
        slope = float(means.mean())
        variance = float((np.einsum("ij,ij,ij->i", shares, gaps, gaps) - means**2).mean())
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        newton = inverse - slope / variance if variance > 0 else 0.0
        if abs(newton / inverse - 1) < 1e-6 and low <= newton <= high:
            return 1 / newton
        inverse = newton if low < newton < high else sqrt(low * high)
    return 1 / inverse
