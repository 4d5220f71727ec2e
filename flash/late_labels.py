"""Labels that arrive later: a session's latest judged answers, and the coverage that their labels adapt.

A label tells what the right choice was at an earlier data version. Whether the choice set of that time had it
is what its reader wants to know. `AdaptiveCoverage` gets another fact: whether the set of the same logits
would have it at the coverage asked for now. So its bound holds in the order of the labels, however late they
come and however many at once.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec

from flash.acting import ActDecision, SessionActingState
from flash.confidence import AdaptiveCoverage, QuestionCalibration
from flash.learnt_calibration import LearntState


class LabelError(ValueError):
    """A label of no use; ``code`` and message say why."""

    def __init__(
        self, code: Literal["bad_request", "unknown_version", "not_calibrated", "repeated"], message: str
    ) -> None:
        super().__init__(message)
        self.code = code


class JudgedAnswer(NamedTuple):
    """An answer as it was judged: ``logits`` of the choices in order, and the number of the ``given`` one.

    ``fitted``: None where its question has no calibration of a file or a pack. ``choice_set``: None where it
    had none. ``decided``: whether it was to be acted on; None where its question has no `max_error`.
    """

    fitted: QuestionCalibration | None
    choices: tuple[str, ...]
    numbered: bool
    logits: tuple[float, ...]
    given: int
    choice_set: tuple[str, ...] | None
    decided: ActDecision | None = None


class Labelled(NamedTuple):
    """What a label says of an answer."""

    right: bool
    covered: bool | None
    """The choice set, as it was published, had the right choice; None where there was none."""
    coverage: float
    """Asked for from now on."""


class AdaptationState(msgspec.Struct, frozen=True):
    """The coverage asked for by the hash of each labelled question, and the ``target`` that it is to keep.

    ``acting``: what labels tell of acting on answers; ``learnt``: for calibrations.
    """

    target: float
    asked: dict[str, float]
    acting: SessionActingState = SessionActingState()
    learnt: tuple[LearntState, ...] = ()


class WaitingAnswer(msgspec.Struct, frozen=True):
    """An answer that waits for its label, as it is saved; what was fitted goes by name and choices.

    ``name`` is "" where nothing was.
    """

    question: str
    version: int
    name: str
    choices: tuple[str, ...]
    numbered: bool
    logits: tuple[float, ...]
    given: int
    choice_set: tuple[str, ...] | None
    decided: ActDecision | None = None


class LateLabels:
    """One session's answers that wait for labels, at most ``most``, and the coverage of its questions.

    Questions go by their hash.
    """

    def __init__(self, target: float, most: int) -> None:
        self._target, self._most = target, most
        self._answers: OrderedDict[tuple[str, int], JudgedAnswer | None] = OrderedDict()
        """None: has its label."""
        self._adapted: dict[str, AdaptiveCoverage] = {}

    def coverage(self, question: str) -> float:
        """The coverage to ask for: the target, until labels of this question come."""
        return min(1.0, max(0.0, self._state(question).asked))

    @property
    def largest(self) -> float:
        """The largest coverage of a question with labels; the target without any."""
        return max(map(self.coverage, self._adapted), default=self._target)

    def keep(self, most: int) -> None:
        """Remember this number of answers from now on."""
        self._most = most
        self._forget()

    def cut(self) -> AdaptationState:
        """What labels have adapted. The answers that wait for theirs are not in it."""
        return AdaptationState(self._target, {name: state.asked for name, state in self._adapted.items()})

    def restore(self, cut: AdaptationState) -> None:
        """Go on from a cut; one with another target says nothing about this one."""
        if cut.target == self._target:
            begun = AdaptiveCoverage.of(self._target)
            self._adapted = {question: replace(begun, asked=asked) for question, asked in cut.asked.items()}

    def remember(self, question: str, version: int, answer: JudgedAnswer) -> None:
        """Remember an answer; the oldest one may be forgotten."""
        self._answers[question, version] = answer
        self._forget()

    def waiting(self, question: str, version: int) -> JudgedAnswer | None:
        """An answer that has no label yet."""
        return self._answers.get((question, version))

    def label(self, question: str, version: int, choice: str) -> Labelled:
        """Tell the right choice of an answer. Raises LabelError, with nothing changed."""
        key = question, version
        if key not in self._answers:
            raise LabelError(
                "unknown_version",
                f"no answer of version {version} is remembered: it was not asked or is not answered, or the "
                f"session's latest {self._most} judged answers, since the engine started, are newer",
            )
        answer = self._answers[key]
        if answer is None:
            raise LabelError("repeated", f"the answer of version {version} has its label")
        fitted, choices = answer.fitted, answer.choices
        if choice not in choices:
            raise LabelError("bad_request", f"{choice!r} is no choice; there are: {', '.join(choices)}")
        if fitted is not None:
            state = self._state(question)
            self._adapted[question] = state.after(choice in fitted.choice_set(answer.logits, state.asked))
        self._answers[key] = None
        covered = None if answer.choice_set is None else choice in answer.choice_set
        return Labelled(choice == choices[answer.given], covered, self.coverage(question))

    def _forget(self) -> None:
        while len(self._answers) > self._most:
            self._answers.popitem(last=False)

    def _state(self, question: str) -> AdaptiveCoverage:
        return self._adapted.get(question) or AdaptiveCoverage.of(self._target)
