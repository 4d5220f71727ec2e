"""Acting within an error: which answers may be acted on, so that at most a given share of those is wrong.

An answer's *risk* is 1 less the probability of its choice at the calibration's temperature. Three rules say
whether to act on it; each works by regime (`flash.regimes`), and by the coarser ones that it is part of.

1. **Evidence.** Of labelled answers, right and wrong ones are counted by risk, in bins. The *cut* is the
   largest risk up to which the counted error, with one more wrong answer added, is within the aim: conformal
   risk control (Angelopoulos et al., 2024) of the error among those acted on. Where a regime has few labels,
   those of the coarser one fill up; where there are none, the calibration's do, with its errors doubled.
2. **Offset.** Each label of an answer that was acted on moves the cut: down after a wrong one, a little up
   after a right one (online risk control: Gibbs and Candes, 2021; Feldman et al., 2023). So whatever the data
   do, the error is within the aim in the long run; see `Acting.label`.
3. **Budget.** Of the last `WINDOW` labelled answers that were acted on, at most the share ``max_error`` may
   be wrong. As it is used up the cut falls, and when it is, nothing is acted on. Meanwhile answers that would
   be almost certain enter the window by their labels in place of those acted on, so that it moves on.

All is plain arithmetic on labels in their order, and saved with the session. Counts are in 1 / `ONE` labels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import log2
from typing import Literal, NamedTuple

import msgspec

from flash.confidence import QuestionCalibration
from flash.regimes import EVERYTHING, RegimeTracker, coarser

AbstainReason = Literal["low_confidence", "few_labels", "error_budget"]
"""Why an answer is not to be acted on."""
WINDOW = 1_000
"""Labelled answers that were acted on, of which the share wrong is kept."""
BINS = 64
_PER_OCTAVE = 3
ONE = 256
MEMORY = 2_000
"""Labels of a regime, at which all its counts are halved."""
_BORROWED, _PRIOR = 400, 2_000
"""Labels that count of the coarser regime, and of the calibration."""
_DOUBT = 2
"""How often an error of the calibration counts."""
_AIM = 0.75
"""Share of the error that is aimed at."""
_STEP = 2.0
"""Bins that a wrong answer which was acted on moves the cut."""
_LEAST = 250
"""Answers acted on that a budget takes for granted."""
PAUSED = 256
"""Questions of a session that are not asked, whose state is kept; beyond, the first one is forgotten."""
_TIGHT, _CERTAIN = 0.3, 0.25
"""Share of a budget that is left, below which the aim falls, and answers that are not acted on enter the
window, too: those with this share of the error at most."""


class ActDecision(NamedTuple):
    """Whether to act on an answer, and the ``reason`` not to; its ``regime``, and the ``bin`` of its risk."""

    act: bool
    reason: AbstainReason | None
    regime: str
    bin: int


class RegimeState(msgspec.Struct):
    """What labels told of one regime.

    ``seen``, ``wrong``: counts by bin. ``offset``: bins. ``acted``: labelled answers that were acted on;
    ``errors``: the ordinals of those that were wrong, of the last `WINDOW`.
    """

    seen: list[int] = msgspec.field(default_factory=lambda: [0] * BINS)
    wrong: list[int] = msgspec.field(default_factory=lambda: [0] * BINS)
    offset: float = 0.0
    acted: int = 0
    errors: list[int] = msgspec.field(default_factory=list)

    def budget_left(self, max_error: float) -> float:
        """Share of the budget for errors that is left: below 0 where one more would be too many."""
        allowed = max_error * min(max(self.acted, _LEAST), WINDOW)
        return (allowed - len(self.errors) - 1) / max(allowed, 1.0)

    def count(self, at: int, *, wrong: bool) -> None:
        """Count a label of an answer in this bin."""
        self.seen[at] += ONE
        self.wrong[at] += ONE * wrong
        if sum(self.seen) >= ONE * MEMORY:
            self.seen = [each >> 1 for each in self.seen]
            self.wrong = [each >> 1 for each in self.wrong]

    def enter(self, *, wrong: bool) -> None:
        """An answer enters the window."""
        self.acted += 1
        if wrong:
            self.errors.append(self.acted)
        while self.errors and self.errors[0] <= self.acted - WINDOW:
            self.errors.pop(0)


class ActingState(msgspec.Struct, frozen=True):
    """One question's, as it is saved; one for another ``max_error`` says nothing."""

    max_error: float
    regimes: dict[str, RegimeState]


class SessionActingState(msgspec.Struct, frozen=True):
    """A session's, as it is saved; ``questions`` by their hash."""

    regime: RegimeTracker = RegimeTracker()
    questions: dict[str, ActingState] = {}


def bin_of(risk: float) -> int:
    """The bin of a risk: 0 has those next to 1, each later one those of a third of an octave below."""
    return min(int(-log2(max(risk, 1e-12)) * _PER_OCTAVE), BINS - 1)


def risk_of(fitted: QuestionCalibration, logits: Sequence[float], given: int) -> float:
    """1 less the probability of choice number ``given``."""
    scaled = fitted.scaled(logits)
    return sum(p for number, p in enumerate(scaled) if number != given)


def prior_of(fitted: QuestionCalibration) -> RegimeState:
    """What a calibration says, with its errors counted twice.

    A score is the risk of the right choice. Below one half that choice was given. Above, another one was, at
    a risk of 1 less the score at least: it is counted as wrong there.
    """
    found = RegimeState()
    weight = min(fitted.labels, _PRIOR) / len(fitted.scores)
    for score in fitted.scores:
        is_wrong = score >= 0.5
        at = bin_of(1 - score if is_wrong else score)
        found.seen[at] += round(ONE * weight)
        found.wrong[at] += round(_DOUBT * ONE * weight) * is_wrong
    return found


class Acting:
    """One question's state in one session, under the error ``max_error``."""

    def __init__(self, max_error: float, fitted: QuestionCalibration) -> None:
        self.max_error, self._prior = max_error, prior_of(fitted)
        self._regimes: dict[str, RegimeState] = {}

    @property
    def error(self) -> float:
        """Share wrong of the last labelled answers that were acted on, at most `WINDOW`."""
        found = self._regimes.get(EVERYTHING)
        return len(found.errors) / min(found.acted, WINDOW) if found and found.acted else 0.0

    def cut(self) -> ActingState:
        """The state, to be saved."""
        return msgspec.convert(
            msgspec.to_builtins(ActingState(self.max_error, self._regimes)), type=ActingState
        )

    def restore(self, cut: ActingState) -> None:
        """Go on from a cut; one for another error says nothing."""
        if cut.max_error == self.max_error:
            self._regimes = msgspec.convert(msgspec.to_builtins(cut.regimes), type=dict[str, RegimeState])

    def decide(self, risk: float, regime: str) -> ActDecision:
        """Whether to act on an answer of this risk in a regime."""
        at, levels = bin_of(risk), self._levels(regime)
        left = min(each.budget_left(self.max_error) for each in levels)
        if left < 0:
            return ActDecision(False, "error_budget", regime, at)
        aim, evidence = _AIM * self.max_error, _evidence(levels, self._prior)
        limit = _least_bin(evidence, aim * min(1.0, left / _TIGHT))
        if limit is None:
            reason: AbstainReason = "few_labels" if _least_bin(evidence, aim) is None else "error_budget"
            return ActDecision(False, reason, regime, at)
        act = at >= limit + int(max(each.offset for each in levels))
        return ActDecision(act, None if act else "low_confidence", regime, at)

    def label(self, decided: ActDecision, *, wrong: bool) -> None:
        """Count a label of an answer that was decided about.

        An offset is 0 at least, and from BINS on nothing is acted on. So of n labels in a regime at most
        aim * n + BINS / _STEP + 1 are of wrong answers that were acted on, and as many more as waited for
        their label at once: whatever the data do.
        """
        levels, at = self._levels(decided.regime), decided.bin
        certain = _least_bin(_evidence(levels, self._prior), _CERTAIN * self.max_error)
        aim = _AIM * self.max_error
        for each in levels:
            tight = each.budget_left(self.max_error) < _TIGHT
            if decided.act or (tight and certain is not None and at >= certain):
                each.enter(wrong=wrong)
            each.offset = max(each.offset + _STEP * ((decided.act and wrong) - aim), 0.0)
        for name, each in zip(coarser(decided.regime), levels, strict=True):
            each.count(at, wrong=wrong)
            self._regimes[name] = each

    def _levels(self, regime: str) -> list[RegimeState]:
        return [self._regimes.get(name) or RegimeState() for name in coarser(regime)]


class SessionActing:
    """One session's regime, and the state of its questions with a `max_error`, by their hash."""

    def __init__(self) -> None:
        self._tracker = RegimeTracker()
        self._questions: dict[str, Acting] = {}
        self._saved: dict[str, ActingState] = {}
        """Of questions that were not asked since, or are paused."""

    @property
    def regime(self) -> str:
        """The regime of the newest bar."""
        return self._tracker.name

    @property
    def error(self) -> float:
        """The largest error among those acted on of a question."""
        return max((each.error for each in self._questions.values()), default=0.0)

    def bar(self, at: int, high: int, low: int, close: int, *, gap: bool) -> None:
        """A bar closed; see `RegimeTracker.after`."""
        self._tracker = self._tracker.after(at, high, low, close, gap=gap)

    def question(self, asked: str, max_error: float, fitted: QuestionCalibration) -> Acting:
        """The state of a question, which begins again where its error changes."""
        known = self._questions.get(asked)
        if known is None or known.max_error != max_error:
            known = Acting(max_error, fitted)
            if (saved := self._saved.pop(asked, None)) is not None:
                known.restore(saved)
            self._questions[asked] = known
        return known

    def known(self, asked: str) -> Acting | None:
        """The state of a question that was asked before; None of others."""
        return self._questions.get(asked)

    def keep(self, asked: Collection[str]) -> None:
        """These questions are asked; the state of others, such as paused ones, waits until they are again."""
        for name in [name for name in self._questions if name not in asked]:
            self._saved[name] = self._questions.pop(name).cut()
        for name in [name for name in self._saved if name not in asked][:-PAUSED]:
            del self._saved[name]

    def cut(self) -> SessionActingState:
        """The state, to be saved."""
        questions = self._saved | {name: each.cut() for name, each in self._questions.items()}
        return SessionActingState(self._tracker, questions)

    def restore(self, cut: SessionActingState) -> None:
        """Go on from a cut."""
        self._tracker, self._saved, self._questions = cut.regime, dict(cut.questions), {}


class _Evidence(NamedTuple):
    """Labels, in all and of wrong answers, by bin."""

    seen: list[float]
    wrong: list[float]


def _evidence(levels: Sequence[RegimeState], prior: RegimeState) -> _Evidence:
    """What labels say of a regime; what comes from a coarser regime, or the calibration, is scaled down."""
    seen: list[float] = [*prior.seen]
    wrong: list[float] = [*prior.wrong]
    for each in reversed(levels):
        share = min(1.0, _BORROWED * ONE / max(sum(seen), 1.0))
        seen = [own + share * under for own, under in zip(each.seen, seen, strict=True)]
        wrong = [own + share * under for own, under in zip(each.wrong, wrong, strict=True)]
    return _Evidence(seen, wrong)


def _least_bin(evidence: _Evidence, aim: float) -> int | None:
    """The first bin from which on the error counted is within ``aim``; None: there is none."""
    all_seen = all_wrong = 0.0
    found = None
    for at in range(BINS - 1, -1, -1):
        all_seen += evidence.seen[at]
        all_wrong += evidence.wrong[at]
        if all_wrong + ONE <= aim * (all_seen + ONE):
            found = at
    return found
