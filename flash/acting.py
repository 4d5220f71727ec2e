"""Acting within an error: which answers may be acted on, so that at most a given share of those is wrong.

1. **Risk.** 1 less the probability of the choice at the calibration's temperature. Its odds are multiplied by
   what labels found in the same *case*: wrong answers over expected ones (online recalibration, as in Foster
   and Hart's "Calibeating", 2023). A case is whether the answer equals the newest label known, and whether
   that label's own answer was wrong: most errors are where the right answer changes.
2. **Limit.** A leaky bucket counts errors by regime (`flash.regimes`) and in all: a wrong answer that was
   acted on adds 1 to its *debt*, each label of one that was takes `_RATE` of the error off. The larger the
   debt, the smaller the risk that is acted on (online risk control: Gibbs and Candes, 2021; Feldman et al.,
   2023). A regime begins with a debt of `_BEGIN`, so it is acted in with care before its labels come.
3. **Budget.** From a debt of `FULL` - 1 on nothing is acted on. Meanwhile labels of almost certain answers
   take from the debt in place of those acted on, so that it ends. So whatever the data do, the errors of m
   labels in a row that moved the debt are `_RATE` * ``max_error`` * m + `FULL` at most, and those that waited
   for their label at once: at an error of 0.02, 20 of a thousand. See `Acting.label`.

All is plain arithmetic on labels in their order, and saved with the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import Literal, NamedTuple

import msgspec

from flash.confidence import QuestionCalibration
from flash.regimes import RegimeTracker

AbstainReason = Literal["low_confidence", "few_labels", "error_budget"]
"""Why an answer is not to be acted on."""
WINDOW = 1_000
"""Labelled answers that were acted on, of which the share wrong is shown."""
FULL = 8.0
"""Errors of a debt that no error may add to."""
_BEGIN = 4.0
_RATE = 0.6
"""Share of the error that each label of an answer that was acted on takes off a debt."""
_TOP, _SOFT = 15.0, 2.0
"""Risk that is acted on without debt, in errors; debt that divides it by e."""
_CERTAIN = 0.25
"""Risk of almost certain answers, in errors."""
_MEMORY, _PRIOR = 4_000, 2.0
"""Labels over which a case is known, with weights that fall exponentially; errors taken for granted."""
_ALL = ""
"""Whose debt is that of all regimes."""
PAUSED = 256
"""Questions of a session that are not asked, whose state is kept; beyond, the first one is forgotten."""


class ActDecision(NamedTuple):
    """Whether to act on an answer, and the ``reason`` not to; what its label needs to know.

    ``risk``: the calibration's, of choice number ``given``, in a ``case``. ``certain``: almost, by labels.
    """

    act: bool
    reason: AbstainReason | None
    regime: str
    given: int
    risk: float
    case: int
    certain: bool


class NewestLabel(msgspec.Struct, frozen=True, array_like=True):
    """The label of the newest version: the ``right`` choice, and whether the answer was ``wrong``."""

    version: int
    right: int
    wrong: bool


class ActingState(msgspec.Struct):
    """What labels told of one question.

    ``debts``: by regime, in errors. ``expected``, ``wrong``: errors by case. ``acted``: labelled answers that
    were acted on; ``errors``: the ordinals of those that were wrong, of the last `WINDOW`.
    """

    max_error: float
    debts: dict[str, float] = {}
    expected: list[float] = msgspec.field(default_factory=lambda: [0.0] * 5)
    wrong: list[float] = msgspec.field(default_factory=lambda: [0.0] * 5)
    newest: NewestLabel | None = None
    acted: int = 0
    errors: list[int] = []


class SessionActingState(msgspec.Struct, frozen=True):
    """A session's, as it is saved; ``questions`` by their hash."""

    regime: RegimeTracker = RegimeTracker()
    questions: dict[str, ActingState] = {}


def risk_of(fitted: QuestionCalibration, logits: Sequence[float], given: int) -> float:
    """1 less the probability of choice number ``given``."""
    scaled = fitted.scaled(logits)
    return sum(p for number, p in enumerate(scaled) if number != given)


class Acting:
    """One question's state in one session, under the error ``max_error``."""

    def __init__(self, max_error: float) -> None:
        self._state = ActingState(max_error)

    @property
    def max_error(self) -> float:
        """The share of those acted on that may be wrong."""
        return self._state.max_error

    @property
    def error(self) -> float | None:
        """Share wrong of the last labelled answers that were acted on, at most `WINDOW`; None without any."""
        state = self._state
        return len(state.errors) / min(state.acted, WINDOW) if state.acted else None

    def cut(self) -> ActingState:
        """The state, to be saved."""
        return msgspec.convert(msgspec.to_builtins(self._state), type=ActingState)

    def restore(self, cut: ActingState) -> None:
        """Go on from a cut; one for another error says nothing."""
        if cut.max_error == self.max_error:
            self._state = msgspec.convert(msgspec.to_builtins(cut), type=ActingState)

    def decide(self, risk: float, regime: str, given: int) -> ActDecision:
        """Whether to act on an answer of this risk, choice number ``given``, in a regime."""
        state, newest = self._state, self._state.newest
        case = 0 if newest is None else 1 + 2 * (given == newest.right) + newest.wrong
        odds = risk * (_PRIOR + state.wrong[case]) / (_PRIOR + state.expected[case])
        known = odds / (1 - risk + odds)
        debt = max(state.debts.get(name, _BEGIN) for name in (regime, _ALL))
        limit = _TOP * self.max_error
        reason: AbstainReason | None = None
        if debt > FULL - 1:
            reason = "error_budget"
        elif known > limit * exp(-debt / _SOFT):
            reason = "few_labels" if known <= limit and regime not in state.debts else "low_confidence"
        return ActDecision(
            reason is None, reason, regime, given, risk, case, known <= _CERTAIN * self.max_error
        )

    def label(self, decided: ActDecision, version: int, right: int) -> None:
        """Count the label of a version's answer: the number of the right choice.

        A debt is 0 at least, so it is never below the errors of the last m labels that moved it, less what
        these took off. It is `FULL` - 1 at most where an answer is acted on, hence the bound above. Almost
        certain answers that are wrong make it `FULL` at most, so that it ends soon after a bad spell.
        """
        state, wrong = self._state, right != decided.given
        for counts, more in ((state.expected, decided.risk), (state.wrong, float(wrong))):
            counts[decided.case] += more - counts[decided.case] / _MEMORY
        if decided.act or decided.certain:
            for name in (decided.regime, _ALL):
                before = state.debts.get(name, _BEGIN)
                debt = max(before + wrong - _RATE * self.max_error, 0.0)
                state.debts[name] = debt if decided.act else min(debt, max(before, FULL))
        if decided.act:
            state.acted += 1
            if wrong:
                state.errors.append(state.acted)
            state.errors = [each for each in state.errors if each > state.acted - WINDOW]
        if state.newest is None or version >= state.newest.version:
            state.newest = NewestLabel(version, right, wrong)


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
    def error(self) -> float | None:
        """The largest error among those acted on of a question; None without labels of such."""
        known = (each.error for each in self._questions.values())
        return max((each for each in known if each is not None), default=None)

    def bar(self, at: int, high: int, low: int, close: int, *, gap: bool) -> None:
        """A bar closed; see `RegimeTracker.after`."""
        self._tracker = self._tracker.after(at, high, low, close, gap=gap)

    def question(self, asked: str, max_error: float) -> Acting:
        """The state of a question, which begins again where its error changes."""
        known = self._questions.get(asked)
        if known is None or known.max_error != max_error:
            known = Acting(max_error)
            if (saved := self._saved.pop(asked, None)) is not None:
                known.restore(saved)
            self._questions[asked] = known
        return known

    def known(self, asked: str) -> Acting | None:
        """The state of a question that was asked before; None of others."""
        return self._questions.get(asked)

    def keep(self, asked: Mapping[str, float]) -> None:
        """These questions are asked, within their error; the state of others, such as paused ones, waits."""
        for name in [name for name in self._questions if name not in asked]:
            self._saved[name] = self._questions.pop(name).cut()
        for name in [name for name in self._saved if name not in asked][:-PAUSED]:
            del self._saved[name]
        for name, max_error in asked.items():
            self.question(name, max_error)

    def cut(self) -> SessionActingState:
        """The state, to be saved."""
        questions = self._saved | {name: each.cut() for name, each in self._questions.items()}
        return SessionActingState(self._tracker, questions)

    def restore(self, cut: SessionActingState) -> None:
        """Go on from a cut."""
        self._tracker, self._saved, self._questions = cut.regime, dict(cut.questions), {}
