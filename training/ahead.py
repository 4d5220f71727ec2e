"""Questions about what comes next, or with a file of labels: asked in time order, and scored walk-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from flash.confidence import QuestionCalibration
from ingest.bar_kernel import Bars
from ingest.compact import CENTRE, CompactSpec
from tapes.question_file import QuestionError
from tapes.real_bars import anchor_of, levels_of
from tapes.rules import UNDEFINED, Floats, Ints, Levels, Rule, lag, mean_range, rolling
from tapes.worked_examples import minutes
from training.ahead_card import time_text
from training.baseline import shapes
from training.batches import Vocabulary
from training.sources import Drawn, Reader, Recorded, Setting, together
from training.walk_forward import Decisions, fit_in_time

_VOLATILITY = 20
_AT_ONCE = 256
"""Bars that are labelled together."""


@dataclass(frozen=True)
class History:
    """A recorded file's bars, and the number of each at which is asked: every ``stride``, perhaps of those
    that have a label.
    """

    bars: Bars
    spec: CompactSpec
    window: int
    ends: Ints
    stride: int

    @classmethod
    def of(cls, source: Recorded, window: int, labels: int, until_ns: int = 0) -> History:
        """About ``labels`` of the bars that have a whole window; only bars up to ``until_ns``, unless 0."""
        bars, spec = source.bars()
        if until_ns:
            bars = bars[bars["ts_last_event"] <= until_ns]
        stride = max(-(-(len(bars) - window + 1) // labels), 1)
        return cls(bars, spec, window, np.arange(window - 1, len(bars), stride), stride)

    def labelled(self, rules: Sequence[Rule], labels: int) -> History:
        """About ``labels`` of the bars that have a label of one of these at least."""
        every = replace(self, ends=np.arange(self.window - 1, len(self.bars)))
        ends = every.ends[np.any([every.labels(rule) != UNDEFINED for rule in rules], axis=0)]
        stride = max(-(-len(ends) // labels), 1)
        return replace(self, ends=ends[::stride], stride=stride)

    def shown(self, end: int) -> tuple[Levels, str]:
        """What is known at a bar: the window that ends there, and the header of its anchor."""
        past = self.bars[end - self.window + 1 : end + 1]
        anchor = anchor_of(past, self.spec)
        return replace(levels_of(past, anchor, self.window), minute=minutes(self.window)), anchor.header

    def labels(self, rule: Rule) -> Ints:
        """The label of each bar at which is asked, UNDEFINED where its horizon has not passed."""
        found = np.full(len(self.ends), UNDEFINED, np.int64)
        known = np.flatnonzero(self.ends + rule.horizon < len(self.bars))
        for begin in range(0, len(known), _AT_ONCE):
            some = known[begin : begin + _AT_ONCE]
            ends = self.ends[some].tolist()
            parts = [self.bars[end - self.window + 1 : end + 1 + rule.horizon] for end in ends]
            # a label may know what came: the anchor suits all of these bars
            levels = [levels_of(part, anchor_of(part, self.spec), self.window) for part in parts]
            drawn = together([(each, (), 0) for each in levels], self.window)
            found[some] = rule.label(drawn.levels).value[:, -1 - rule.horizon]
        return found


def plain_features(x: Levels) -> Floats:
    """What the plain model reads of every bar [tapes, bars, features]: `shapes`, and how volatile it is."""
    change = (x.close - lag(x.close, 1)).astype(np.float64)
    usual = np.sqrt(rolling(change**2, _VOLATILITY, np.sum) / _VOLATILITY)
    recent = np.sqrt(rolling(change**2, _VOLATILITY // 4, np.sum) / (_VOLATILITY // 4))
    unit, price = mean_range(x), np.maximum(100 * x.percent[:, None] + x.close - CENTRE, 1)
    volatility = [np.log(unit / price), np.log((usual + 0.5) / unit), np.log((recent + 0.5) / (usual + 0.5))]
    return np.concatenate([shapes(x), np.stack(volatility, axis=-1)], axis=-1)


def ask(
    reader: Reader, history: History, setting: Setting, progress: Callable[[float], None] = lambda share: None
) -> list[Decisions]:
    """Ask all questions at each bar where they have a label, in time order.

    Raises QuestionError, before the model is asked, for one that has none, or a choice that is never right.
    """
    rules, vocabulary = reader.asked.rules, Vocabulary()
    labels = np.stack([history.labels(rule) for rule in rules])
    for rule, label in zip(rules, labels, strict=True):
        counts = np.bincount(label[label != UNDEFINED], minlength=len(rule.choices))
        if not counts.all():
            missing = ", ".join(c for c, n in zip(rule.choices, counts, strict=True) if not n)
            raise QuestionError(f"{rule.name}: {missing} is right at none of {int(counts.sum()):,} bars")
    logits: list[list[Floats]] = [[] for _ in rules]
    features: list[list[Floats]] = [[] for _ in rules]
    rng = np.random.default_rng(0)  # readers may draw an order of questions; ours do not
    for number, end in enumerate(history.ends.tolist()):
        wanted = np.flatnonzero(labels[:, number] != UNDEFINED)
        if not len(wanted):
            continue
        x, header = history.shown(end)
        drawn = Drawn(x, np.array([vocabulary.encode(header)]), np.array([number]))
        read_of = plain_features(x)[0, -1]
        for read in reader.read(drawn, setting, np.array([history.window - 1]), wanted, rng):
            logits[read.question].append(read.chosen[0, :-1])
            features[read.question].append(read_of)
        progress((number + 1) / len(history.ends))
    return [
        _decisions(history, rule, label, np.array(a), np.array(b))
        for rule, label, a, b in zip(rules, labels, logits, features, strict=True)
    ]


def _decisions(history: History, rule: Rule, label: Ints, logits: Floats, features: Floats) -> Decisions:
    known = label != UNDEFINED
    bar = history.ends[known]
    at = history.bars["ts_last_event"][bar].astype(np.int64)
    return Decisions(
        rule.name, rule.text, rule.choices, max(rule.horizon, 1), bar, at, logits, label[known], features
    )


def fit_ahead(
    decisions: list[Decisions], history: History, numbered: bool = False
) -> list[QuestionCalibration]:
    """Calibrations of all that is known at the history's end; questions with too few labels have none."""
    found = []
    until = int(history.bars["ts_last_event"][-1])
    for each in decisions:
        fitted = fit_in_time(each, np.arange(len(each.label)), numbered)
        if fitted is not None:
            found.append(msgspec.structs.replace(fitted, fitted_until=time_text(until)))
    return found
