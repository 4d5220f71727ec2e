"""Calibrations that labels make, or adapt, while the daemon runs.

A question without a calibration learns one, as of `foretick calibrate`: a temperature from the older half of
the labels and one more, spread evenly over the choices (Platt, 1999, takes one of each): labels that were all
right don't make it sure. Conformity scores are from the newer half.

One with a calibration keeps it until labels know better. They fit a temperature behind its probabilities,
which begins at 1 (as `PRIOR` labels would say) and is used only while it has the smaller log loss, by
`MARGIN` standard errors, over the newest labels. Each of those is judged by a temperature of older labels
alone (prequential: Dawid, 1984). Choice sets and what is acted on stay with the calibration: they have an
adaptation of their own (`flash.confidence.AdaptiveCoverage`, `flash.acting`).

The newest `MOST` labels count, and all is fitted again with each `STEP` of them, so it follows the market. It
is a function of the labels in their order: a saved state goes on as if there had been no restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np

from flash.confidence import QuestionCalibration
from flash.temperature import Floats, calibrated_probabilities, fit_temperature, softmax

LEAST, LEAST_OF_A_CHOICE = 400, 10
"""Labels below which nothing is fitted, and those of each choice below which nothing is learnt."""
MOST, STEP = 1_000, 50
QUESTIONS = 256
"""Of one session, paused ones included; the first one is forgotten when there are more."""
PRIOR, EVEN, MARGIN = 100, 1, 3.0
_BLOCK = 100
"""Labels that are judged by one temperature."""

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


class AdaptedCalibration(QuestionCalibration, frozen=True, kw_only=True):
    """A fitted one whose probabilities have another temperature, by labels: above 1 they are less sure."""

    tempered: float

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        """Calibrated probabilities of the choices."""
        weights = [each ** (1 / self.tempered) for each in super().probabilities(logits)]
        total = sum(weights)
        return [each / total for each in weights]


@dataclass
class _Learning:
    """``pairs``: the newest. ``current``: made of them for the ``fitted`` one."""

    choices: tuple[str, ...]
    labels: int
    pairs: deque[Pair]
    fitted: QuestionCalibration | None = None
    current: QuestionCalibration | None = None
    is_new: bool = True


class LearntCalibrations:
    """Those of one session's questions."""

    def __init__(self, states: Sequence[LearntState] = ()) -> None:
        self._known: dict[tuple[str, bool], _Learning] = {}
        for each in states:
            pairs = deque(each.pairs, MOST + STEP)
            self._known[each.question, each.numbered] = _Learning(each.choices, each.labels, pairs)

    @property
    def adapted(self) -> int:
        """Questions whose fitted calibration labels have adapted."""
        return sum(isinstance(each.current, AdaptedCalibration) for each in self._known.values())

    def find(
        self, question: str, numbered: bool, fitted: QuestionCalibration | None = None
    ) -> QuestionCalibration | None:
        """The calibration of the question of this hash, asked so; None while it has too few labels.

        ``fitted``: its calibration of a file or a pack, which is the answer until labels know better.
        """
        known = self._known.get((question, numbered))
        if known is None:
            return fitted
        if known.is_new or known.fitted is not fitted:
            self._fit(question, numbered, known, fitted)
        return known.current

    def label(
        self,
        question: str,
        numbered: bool,
        choices: tuple[str, ...],
        logits: tuple[float, ...],
        right: int,
        fitted: QuestionCalibration | None = None,
    ) -> None:
        """Count a label. ``fitted``: as in `find`."""
        known = self._known.get((question, numbered))
        if known is None:
            if len(self._known) == QUESTIONS:
                del self._known[next(iter(self._known))]
            known = _Learning(choices, 0, deque(maxlen=MOST + STEP))
            self._known[question, numbered] = known
        known.pairs.append((logits, right))
        known.labels += 1
        if known.labels % STEP == 0:
            self._fit(question, numbered, known, fitted)

    def cut(self) -> tuple[LearntState, ...]:
        """What is known, to be saved."""
        return tuple(
            LearntState(*key, each.choices, each.labels, tuple(each.pairs))
            for key, each in self._known.items()
        )

    def _fit(
        self, question: str, numbered: bool, known: _Learning, fitted: QuestionCalibration | None
    ) -> None:
        """On the labels up to the newest whole step."""
        whole = list(known.pairs)[: len(known.pairs) - known.labels % STEP][-MOST:]
        pairs = np.array([[*logits, right] for logits, right in whole]).reshape(-1, len(known.choices) + 1)
        known.fitted, known.is_new = fitted, False
        if fitted is None:
            known.current = fitted_on(question, known.choices, pairs, numbered)
        else:
            known.current = adapted_on(fitted, pairs)


def fitted_on(
    question: str, choices: Sequence[str], pairs: Floats, numbered: bool
) -> QuestionCalibration | None:
    """A calibration of the question of this hash; None where there are too few labels.

    ``pairs``: [labels, choices + 1], the logits and the number of the right choice.
    """
    logits, right = pairs[:, :-1], pairs[:, -1].astype(np.int64)
    if len(pairs) < LEAST or np.bincount(right, minlength=len(choices)).min() < LEAST_OF_A_CHOICE:
        return None
    older = len(pairs) // 2
    temperature = fit_temperature(logits[:older], right[:older], EVEN, inf)
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


def adapted_on(fitted: QuestionCalibration, pairs: Floats) -> QuestionCalibration:
    """The fitted calibration, adapted where that is better. ``pairs``: as in `fitted_on`."""
    if len(pairs) < LEAST:
        return fitted
    right, half = pairs[:, -1].astype(np.int64), MOST // 2
    logs = np.log(np.maximum(calibrated_probabilities(fitted, pairs[:, :-1]), np.finfo(float).tiny))

    def tempered(until: int) -> float:
        older = slice(max(until - half, 0), until)
        return fit_temperature(logs[older], right[older], PRIOR)

    gains = []
    for begin in range(max(len(pairs) - half, _BLOCK), len(pairs), _BLOCK):
        theirs, block = right[begin : begin + _BLOCK], logs[begin : begin + _BLOCK]
        own = np.arange(len(theirs)), theirs
        gains.append(np.log(softmax(block, tempered(begin))[own]) - block[own])
    gain = np.concatenate(gains)
    if gain.mean() <= MARGIN * gain.std() / np.sqrt(len(gain)):
        return fitted
    known = {name: getattr(fitted, name) for name in QuestionCalibration.__struct_fields__}
    return AdaptedCalibration(**known, tempered=tempered(len(pairs)))
