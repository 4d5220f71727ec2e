"""Calibrations of questions that have none, learnt from the labels that come while the daemon runs.

As of `foretick calibrate`: a temperature from the older half of the labels, conformity scores from the newer
one. The newest `MOST` labels count, and it is fitted again with each `STEP` of them, so it follows the market
without an adaptive coverage. What is fitted is a function of the labels in their order: a saved state goes on
as if there had been no restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from flash.confidence import QuestionCalibration
from flash.temperature import fit_temperature, softmax

LEAST, LEAST_OF_A_CHOICE = 400, 10
"""Labels, and those of each choice, below which nothing is fitted."""
MOST, STEP = 1_000, 50
QUESTIONS = 256
"""Of one session, paused ones included; the first one is forgotten when there are more."""

Pair = tuple[tuple[float, ...], int]
"""Logits of the choices, and the number of the right one."""


class LearntState(msgspec.Struct, frozen=True, array_like=True):
    """What labels told of the question of a hash, asked by its ``numbered`` place or in words.

    ``labels``: how many came; ``pairs``: the newest of them.
    """

    question: str
    numbered: bool
    choices: tuple[str, ...]
    labels: int
    pairs: tuple[Pair, ...]


@dataclass
class _Learning:
    choices: tuple[str, ...]
    labels: int
    pairs: deque[Pair]
    fitted: QuestionCalibration | None = None


class LearntCalibrations:
    """Those of one session's questions."""

    def __init__(self, states: Sequence[LearntState] = ()) -> None:
        self._known: dict[tuple[str, bool], _Learning] = {}
        for each in states:
            known = _Learning(each.choices, each.labels, deque(each.pairs, MOST + STEP))
            self._known[each.question, each.numbered] = known
            self._fit(each.question, each.numbered, known)

    def find(self, question: str, numbered: bool) -> QuestionCalibration | None:
        """What was fitted for the question of this hash, asked so; None while it has too few labels."""
        known = self._known.get((question, numbered))
        return None if known is None else known.fitted

    def label(
        self, question: str, numbered: bool, choices: tuple[str, ...], logits: tuple[float, ...], right: int
    ) -> None:
        """Count a label."""
        known = self._known.get((question, numbered))
        if known is None:
            if len(self._known) == QUESTIONS:
                del self._known[next(iter(self._known))]
            known = self._known[question, numbered] = _Learning(choices, 0, deque(maxlen=MOST + STEP))
        known.pairs.append((logits, right))
        known.labels += 1
        if known.labels % STEP == 0:
            self._fit(question, numbered, known)

    def cut(self) -> tuple[LearntState, ...]:
        """What is known, to be saved."""
        return tuple(
            LearntState(*key, each.choices, each.labels, tuple(each.pairs))
            for key, each in self._known.items()
        )

    def _fit(self, question: str, numbered: bool, known: _Learning) -> None:
        """On the labels up to the newest whole step."""
        pairs = list(known.pairs)[: len(known.pairs) - known.labels % STEP][-MOST:]
        known.fitted = fitted_on(question, known.choices, pairs, numbered)


def fitted_on(
    question: str, choices: Sequence[str], pairs: Sequence[Pair], numbered: bool
) -> QuestionCalibration | None:
    """A calibration of the question of this hash; None where there are too few labels."""
    right = np.array([each for _, each in pairs], np.int64)
    if len(pairs) < LEAST or np.bincount(right, minlength=len(choices)).min() < LEAST_OF_A_CHOICE:
        return None
    logits, older = np.array([each for each, _ in pairs]), len(pairs) // 2
    temperature = fit_temperature(logits[:older], right[:older])
    newer = softmax(logits[older:], temperature)[np.arange(len(pairs) - older), right[older:]]
    ordered = np.sort(logits, axis=1)
    return QuestionCalibration(
        name=question,
        text="",
        choices=list(choices),
        temperature=temperature,
        scores=np.sort(1 - newer).tolist(),
        labels=len(newer),
        mean_gap=float((ordered[:, -1] - ordered[:, -2]).mean()),
        numbered=numbered,
    )
