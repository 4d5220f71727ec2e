"""Confidence that means something: calibrated probabilities, conformal choice sets, abstention.

A `Calibration` is fitted on labelled tapes (`foretick calibrate`) for one model and one line schema, and is
refused for any other. Per question it has a temperature (Guo et al., 2017), isotonic curves behind it where
they win, and order statistics of the conformity scores, from which choice sets of any coverage follow (split
conformal prediction, least ambiguous sets: Sadinle, Lei and Wasserman, 2019). `AdaptiveCoverage`
keeps the coverage where labels arrive later and the market has changed (Gibbs and Candes, 2021).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, inf, isfinite
from pathlib import Path
from typing import NamedTuple

import msgspec

COVERAGE = 0.9
"""Share of choice sets that contain the right answer, by default."""
UNCALIBRATED = {
    "not_calibrated": "run foretick calibrate (--question FILE for your own), or label 400 of its answers",
    "by_number": "run foretick calibrate --placement numbered, or set flash.placement to ephemeral",
    "off": "remove calibration = 'off' of the model",
    "free_text": "give the question choices",
    "provisional": "ask without the open bars: provisional = false",
    "ready_exit": "ask with early_exit = 0",
    "no_session": "ask about a session",
}
"""Why an answer has neither probability nor choice set, and what gives it both."""


class CalibrationError(ValueError):
    """The file is no calibration, or not one for this model and line schema; the message says what to do."""


class CalibrationCurve(msgspec.Struct, frozen=True):
    """A rising curve through points, constant outside them."""

    x: list[float]
    y: list[float]

    def __post_init__(self) -> None:
        if not self.x or len(self.x) != len(self.y) or not all(map(isfinite, (*self.x, *self.y))):
            raise ValueError("a curve needs as many finite x as y, and at least one")
        if any(a > b for a, b in pairwise(self.x)) or min(self.y) < 0:
            raise ValueError("a curve's x must not fall, and its y not be negative")

    def __call__(self, value: float) -> float:
        """The curve at ``value``, between points along a line."""
        right = bisect_left(self.x, value)
        if right == 0 or right == len(self.x):
            return self.y[min(right, len(self.y) - 1)]
        share = (value - self.x[right - 1]) / (self.x[right] - self.x[right - 1])
        return self.y[right - 1] + share * (self.y[right] - self.y[right - 1])


class QuestionCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted for the question ``name``, or ``text`` in full, with its choices.

    ``numbered``: as asked by its number in the frozen prefix, which models answer less well.
    ``curves``: isotonic ones, a choice each, from the probability at the temperature; empty without.
    ``scores``: ascending order statistics of 1 - p(right choice) on ``labels`` tapes apart from those fitted.
    ``mean_gap``: of the logits, against which drift is measured. ``fitted_until``: of a question about what
    comes next, the time (UTC) of the newest bar that its labels knew; "" of others.
    """

    name: str
    text: str
    choices: list[str]
    temperature: float
    curves: list[CalibrationCurve] = []
    scores: list[float]
    labels: int
    mean_gap: float
    numbered: bool = False
    fitted_until: str = ""

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature:g}, but must be above 0")
        if len(self.choices) < 2 or len(self.curves) not in (0, len(self.choices)):
            raise ValueError("needs two choices or more, and no curve or one for each")
        if any(min(curve.y) <= 0 for curve in self.curves):
            raise ValueError("a probability of 0 on a curve rules out what may come")
        if not self.labels >= len(self.scores) >= 1:
            raise ValueError(f"{len(self.scores)} scores cannot stand for {self.labels} labels")

    def scaled(self, logits: Sequence[float]) -> list[float]:
        """Probabilities of the choices at the temperature."""
        top = max(logits)
        weights = [exp((logit - top) / self.temperature) for logit in logits]
        total = sum(weights)
        return [weight / total for weight in weights]

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        """Calibrated probabilities of the choices."""
        scaled = self.scaled(logits)
        if not self.curves:
            return scaled
        risen = [curve(p) for curve, p in zip(self.curves, scaled, strict=True)]
        total = sum(risen)
        return [p / total for p in risen]

    def choice_set(self, logits: Sequence[float], coverage: float) -> tuple[str, ...]:
        """The choices that can't be excluded at this coverage, likeliest first.

        Empty where even the likeliest one is less likely than right answers usually are.
        """
        limit = threshold(self.scores, self.labels, coverage)
        scored = sorted((1 - p, i) for i, p in enumerate(self.scaled(logits)))
        return tuple(self.choices[i] for score, i in scored if score <= limit)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration file; ``data`` says what it was fitted on."""

    model: str
    """Revision of the model."""
    lines: str
    """The line schema, such as ``compact``."""
    data: dict[str, str | int | float]
    questions: list[QuestionCalibration]
    version: int = 1

    def find(self, asked: str, choices: Sequence[str], numbered: bool = False) -> QuestionCalibration | None:
        """What was fitted for a question, by name or text, with just these choices in this order."""
        for question in self.questions:
            same = asked in (question.name, question.text) and question.choices == list(choices)
            if same and question.numbered == numbered:
                return question
        return None


class Judged(NamedTuple):
    """What an answer's confidence amounts to."""

    probability: float
    """Of the answer that was given."""
    choice_set: tuple[str, ...]
    abstained: bool
    """The probability is below what the session asks for."""
    act: bool | None = None
    """Whether to act on it; None where its question has no `max_error`."""
    abstain_reason: str | None = None
    """Why not."""


@dataclass(frozen=True, slots=True)
class AdaptiveCoverage:
    """The coverage to ask for, so that ``target`` is kept in the long run (adaptive conformal inference).

    Whatever the data do, the share covered after n labels is within (1 + rate) / (rate * n) of the target.
    """

    target: float = COVERAGE
    rate: float = 0.005
    asked: float = COVERAGE

    @classmethod
    def of(cls, target: float, rate: float = 0.005) -> AdaptiveCoverage:
        """Begin at the target."""
        return cls(target, rate, target)

    def after(self, covered: bool) -> AdaptiveCoverage:
        """The next state, once it is known whether a set contained the right answer."""
        missed = 0.0 if covered else 1.0
        return replace(self, asked=self.asked - self.rate * ((1 - self.target) - missed))


def threshold(scores: Sequence[float], labels: int, coverage: float) -> float:
    """The conformal quantile: the ceil((n + 1) * coverage)-th smallest of n = ``labels`` scores.

    ``scores`` are order statistics at equally spaced ranks; between two the larger one is taken. At a
    coverage of 0 no choice is kept; all are kept where there are too few scores.
    """
    if coverage <= 0:
        return -inf
    rank = ceil((labels + 1) * coverage - 1e-9)
    if coverage >= 1 or rank > labels:
        return inf
    return scores[ceil(rank * len(scores) / labels) - 1]


def judge(
    fitted: QuestionCalibration, logits: Sequence[float], given: int, coverage: float, abstain_below: float
) -> Judged:
    """The confidence in choice number ``given``."""
    probability = fitted.probabilities(logits)[given]
    return Judged(probability, fitted.choice_set(logits, coverage), probability < abstain_below)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=0) + b"\n")


def read_calibration(path: Path, model: str, lines: str) -> Calibration:
    """Read a file that must be for this revision of a model and this line schema. Raises CalibrationError."""
    again = f"fit it again: foretick calibrate --model DIR --out {path}"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise CalibrationError(f"cannot read the calibration {path}: {error.strerror}") from error
    # a string that is not UTF-8, deep nesting
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CalibrationError(f"{path} is no calibration: {error}; {again}") from error
    if found.version != 1:
        raise CalibrationError(f"{path} has version {found.version} instead of 1; {again}")
    if found.model != model:
        raise CalibrationError(f"{path} was fitted for model {found.model}, this one is {model}; {again}")
    if found.lines != lines:
        raise CalibrationError(
            f"{path} was fitted on {found.lines!r} lines, this session writes {lines!r}; {again}"
        )
    return found
