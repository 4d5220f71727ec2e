"""Teaching what comes next: labels of a desk's own tape, in time, and what the answers are worth there.

The tape's first part is trained on, by labels that are known within it. Behind an embargo of one horizon, the
rest is asked, and scored walk-forward in the order of time (`training.walk_forward`). What is shown is what a
session knows: an anchor is chosen by the bars before the first question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from flash.confidence import QuestionCalibration
from tapes.question_file import QuestionError
from tapes.rules import UNDEFINED, Floats, Ints, Rule
from training.ahead import History, plain_features
from training.ahead_card import time_text
from training.batches import Vocabulary
from training.sources import Drawn, Reader, Setting, Stretch
from training.taught_question import by_time
from training.walk_forward import Decisions, fit_in_time

_ANSWERS = 16
"""Labels to measure on, for each of which a tape may be read."""


class _Asked(NamedTuple):
    """Tapes of two windows, asked at ``cuts`` of each; ``bar`` [answers]: the number of each, -1 where a
    price had left the levels; ``features`` [answers, features].
    """

    tapes: Sequence[Drawn]
    cuts: Ints
    bar: Ints
    features: Floats

    def in_time(self, label: Ints) -> Ints:
        """Indices of the answers that have a ``label`` [bars], in the order of time."""
        order = np.argsort(self.bar, kind="stable")
        order = order[self.bar[order] >= 0]
        found: Ints = order[label[self.bar[order]] != UNDEFINED]
        return found


@dataclass(frozen=True)
class Ahead:
    """``learnt``: bars to train on, which have the labels of ``rule``. ``asked``: tapes behind them;
    ``order``: which of their answers have a label. ``decisions``: those, still without logits, behind what
    the plain model learns of the bars that are trained on.
    """

    learnt: Stretch
    rule: Rule
    window: int
    asked: _Asked
    order: Ints
    decisions: Decisions
    until: str

    @classmethod
    def of(cls, rule: Rule, whole: Stretch, window: int, share: float, labels: int) -> Ahead:
        """Train on this ``share`` of the bars; for ``labels`` see `_ANSWERS`.

        Raises QuestionError where no label is known in time, or no bar is left to ask at.
        """
        bars, horizon = whole.everything, rule.horizon
        end, ends = round(share * len(bars)), np.arange(window - 1, len(bars))
        label = np.full(len(bars), UNDEFINED, np.int64)
        label[ends] = History(bars, whole.spec, window, ends, 1).labels(rule)
        in_time = np.where(np.arange(len(bars)) + horizon < end, label, UNDEFINED)  # the purge
        known = np.flatnonzero(in_time != UNDEFINED)
        if not len(known):
            raise QuestionError(f"{rule.name}: no bar of the first {end:,} has a label that is known by then")
        if len(bars) - end - horizon < 2 * window:
            raise QuestionError(f"{rule.name}: the tape is too short to ask behind the first {end:,} bars")
        learnt = replace(whole, everything=bars[:end], shown=window)
        held = replace(whole, everything=bars[end + horizon :], shown=window)
        past, asked = _read(learnt, 0, window, labels), _read(held, end + horizon, window, labels)
        before, order = past.in_time(in_time), asked.in_time(label)
        bar = np.concatenate([past.bar[before], asked.bar[order]])
        features = np.concatenate([past.features[before], asked.features[order]])
        at = bars["ts_last_event"].astype(np.int64)
        blank = np.zeros((len(bar), len(rule.choices)))
        decisions = Decisions(
            rule.name, rule.text, rule.choices, horizon, bar, at[bar], blank, label[bar], features,
            first=len(before),
        )  # fmt: skip
        taught = by_time(rule, at[known], label[known])
        return cls(learnt, taught, window, asked, order, decisions, time_text(int(at[-1])))

    def answered(self, reader: Reader, advance: Callable[[float], None]) -> Decisions:
        """Ask at every bar behind those that were trained on."""
        cuts, rng, logits = self.asked.cuts, np.random.default_rng(0), []
        for number, drawn in enumerate(self.asked.tapes):
            (read,) = reader.read(drawn, Setting("terse", 2, self.window), cuts, np.array([0]), rng)
            logits.append(read.chosen[:, :-1])
            advance((number + 1) / len(self.asked.tapes))
        found = self.decisions.logits.copy()
        found[self.decisions.first :] = np.concatenate(logits)[self.order]
        return replace(self.decisions, logits=found)

    def fitted(self, answered: Decisions) -> list[QuestionCalibration]:
        """The calibration of all that is known at the tape's end; none where that is too little."""
        found = fit_in_time(answered, np.arange(len(answered.label)))
        return [] if found is None else [msgspec.structs.replace(found, fitted_until=self.until)]


def _read(stretch: Stretch, offset: int, window: int, labels: int) -> _Asked:
    """Tapes of a stretch that begins at bar ``offset``: side by side, or spaced evenly."""
    beyond = max(len(stretch.everything) - 2 * window + 1, 0)
    apart = max(window, -(-beyond // max(labels // _ANSWERS, 1)))
    cuts = np.arange(window - 1, 2 * window - 1)
    tapes = list(stretch.windows(Vocabulary(), np.arange(0, beyond, apart), 2 * window, window))
    bar, features = [np.zeros(0, np.int64)], []
    for x, _, start in tapes:
        assert x.at is not None, "bars are recorded"
        bar.append(np.where(x.at[:, cuts] > 0, offset + start[:, None] + cuts, -1).ravel())
        features.append(plain_features(x)[:, cuts].reshape(bar[-1].size, -1))
    return _Asked(tapes, cuts, np.concatenate(bar), np.concatenate(features))
