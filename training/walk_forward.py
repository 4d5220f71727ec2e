"""Walk-forward evaluation of answers about what comes next: by what was known when they were given.

Answers go in time order. Each test fold lies behind all that its forecasts are fitted on; a label counts as
known when its horizon has passed, so those that reach into a test fold are purged before it, and an embargo
behind each fold keeps the next one apart (Lopez de Prado, 2018, ch. 7). Nothing is drawn at random but the
blocks of the intervals (circular block bootstrap: Politis and Romano, 1992).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from flash.confidence import QuestionCalibration
from flash.temperature import calibrated_probabilities
from tapes.rules import Flags, Floats, Ints
from training.calibrate import LEAST_LABELS, LEAST_OF_A_CHOICE, fit_question

RESAMPLES = 1_000
LEAST_BLOCKS = 20
"""Blocks of the tested answers, below which an interval means little."""
_LEAST = 1e-12


class WalkForwardError(ValueError):
    """There is too little past to fit on, or too little behind it to test; says what is missing."""


@dataclass(frozen=True)
class Decisions:
    """Answers to one question in time order, [answers]; each has a label.

    ``bar``: number of the newest bar that each was given from, and ``at`` its time, ns. The label of one at
    bar b is known at bar b + ``horizon``. ``logits`` [answers, choices]; ``features`` [answers, features] are
    what the plain model reads of the same bars. Answers before number ``first`` were trained on: how often
    each choice is right and the plain model are learnt from them, too, and no calibration is.
    """

    name: str
    text: str
    choices: tuple[str, ...]
    horizon: int
    bar: Ints
    at: Ints
    logits: Floats
    label: Ints
    features: Floats
    first: int = 0


class Fold(NamedTuple):
    """Indices of answers in time order: ``train`` has labels that are known before the first of ``test``."""

    train: Ints
    test: Ints


def folds(bar: Ints, horizon: int, count: int, embargo: int, first: int = 0) -> list[Fold]:
    """The second half of the answers from ``first`` on in ``count`` test folds of about equal size, each with
    all of its past.

    The first ``embargo`` bars behind a fold are in no test fold; they are trained on once they are past.
    """
    edges = np.linspace((first + len(bar)) // 2, len(bar), count + 1).astype(np.int64)
    found: list[Fold] = []
    for begin, end in pairwise(edges.tolist()):
        test = np.arange(begin, end)
        if found:
            test = test[bar[test] > bar[begin - 1] + embargo]
        if len(test):
            found.append(Fold(np.flatnonzero(bar + horizon < bar[test[0]]), test))
    return found


class Forecast(NamedTuple):
    """What a fold's past makes of its answers: probabilities [tested, choices] of model and plain model."""

    fitted: QuestionCalibration
    model: Floats
    plain: Floats


def fit_in_time(decisions: Decisions, past: Ints, numbered: bool = False) -> QuestionCalibration | None:
    """A calibration of the ``past``: fitted on its first half, scored on the second, a purge between.

    None: too few labels.
    """
    past = past[past >= decisions.first]
    if not len(past):
        return None
    middle = past[len(past) // 2]
    kept = past[(past >= middle) | (decisions.bar[past] + decisions.horizon < decisions.bar[middle])]
    d = decisions
    return fit_question(d.name, d.text, d.choices, d.logits[kept], d.label[kept], kept >= middle, numbered)


def forecast(decisions: Decisions, fold: Fold, numbered: bool = False) -> Forecast:
    """Fit on the fold's past, and on nothing else. Raises WalkForwardError where that is too little."""
    fitted = fit_in_time(decisions, fold.train, numbered)
    if fitted is None:
        known = int((fold.train >= decisions.first).sum())
        raise WalkForwardError(
            f"{decisions.name}: {known:,} labels before a test fold are too few to calibrate on; "
            f"each half needs {LEAST_LABELS}, and the first one {LEAST_OF_A_CHOICE} of each choice: "
            "a longer tape, or more --labels"
        )
    model = calibrated_probabilities(fitted, decisions.logits[fold.test])
    return Forecast(fitted, model, plain_model(decisions, fold))


def plain_model(decisions: Decisions, fold: Fold) -> Floats:
    """Logistic regression on the features, [tested, choices]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    found = np.zeros((len(fold.test), len(decisions.choices)))
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1_000))
    regression.fit(decisions.features[fold.train], decisions.label[fold.train])
    found[:, regression.classes_] = regression.predict_proba(decisions.features[fold.test])
    return found


def climatology(decisions: Decisions, test: Ints) -> Floats:
    """How often each choice was right so far, of the labels known at each of ``test``, [tested, choices].

    One of each choice is counted beforehand, and of horizons that overlap only what each adds: so few labels
    of a random walk do not pass for a drift.
    """
    choices = len(decisions.choices)
    added = np.diff(decisions.bar, prepend=decisions.bar[:1] - decisions.horizon) / decisions.horizon
    seen = np.cumsum(np.eye(choices)[decisions.label] * np.minimum(added, 1.0)[:, None], axis=0)
    seen = np.concatenate([np.zeros((1, choices)), seen]) + 1.0
    known = np.searchsorted(decisions.bar + decisions.horizon, decisions.bar[test], side="right")
    shares: Floats = seen[known] / seen[known].sum(1, keepdims=True)
    return shares


def base_rate(decisions: Decisions, test: Ints) -> Floats:
    """What skill is measured against, [tested, choices]: climatology or even odds, the better of them.

    A model whose logits are even by themselves knows even odds, and a short past does not: that is no skill.
    """
    known, label = climatology(decisions, test), decisions.label[test]
    even = np.full_like(known, 1 / known.shape[1])
    return min((known, even), key=lambda each: float(losses(each, label)[:, 0].mean()))


def losses(probabilities: Floats, label: Ints) -> Floats:
    """Brier score and log loss (nats) of each answer, [answers, 2]."""
    wanted = np.eye(probabilities.shape[1])[label]
    given = probabilities[np.arange(len(label)), label]
    return np.stack([((probabilities - wanted) ** 2).sum(1), -np.log(np.maximum(given, _LEAST))], axis=1)


def block_length(bar: Ints, horizon: int) -> int:
    """Answers of a block of the bootstrap: at least two horizons of bars, and the answers' cube root."""
    apart = max(float(np.median(np.diff(bar))), 1.0) if len(bar) > 1 else 1.0
    root = round(float(len(bar)) ** (1 / 3))
    return max(ceil(2 * (horizon + 1) / apart), int(root), 1)


def interval(
    values: Floats, of: Callable[[Floats], Floats], length: int, seed: int = 0
) -> tuple[float, float, float]:
    """(``of`` the sums of ``values`` [answers, columns], and its 95 % interval by blocks of ``length``).

    ``of`` gets sums [resamples, columns] and returns [resamples].
    """
    answers = len(values)
    blocks = ceil(answers / length)
    begins = np.random.default_rng(seed).integers(0, answers, (RESAMPLES, blocks))
    wrapped = np.concatenate([values, values[:length]])
    total = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(wrapped, axis=0)])
    sums = (total[begins + length] - total[begins]).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanquantile(of(sums), (0.025, 0.975))
        (whole,) = of(values.sum(0, keepdims=True))
    return float(whole), float(low), float(high)


def skill(model: Floats, reference: Floats, length: int) -> tuple[float, float, float]:
    """1 - mean loss / mean loss of the reference, of losses [answers], with its interval."""
    return interval(np.stack([model, reference], axis=1), lambda sums: 1 - sums[:, 0] / sums[:, 1], length)


def balanced(right: Flags, label: Ints, choices: int, length: int) -> tuple[float, float, float]:
    """Mean over the choices of the share right, with its interval."""
    kind = np.eye(choices)[label]
    columns = np.concatenate([kind * right[:, None], kind], axis=1)
    return interval(columns, lambda sums: np.nanmean(sums[:, :choices] / sums[:, choices:], axis=1), length)
