"""What a calibration says of answers, how far their logit gaps have moved from it, and what labels tell."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import nan
from pathlib import Path

from msgspec.structs import replace

from daemon import protocol
from daemon.config.schema import Config, ModelConfig
from daemon.config.standing import StandingQuestion, questions_of
from daemon.engine.question_packs import EnginePacks
from engine.model.chat_format import PromptFormat
from engine.model.revision import CALIBRATION
from engine.model.terse import Terse
from feeds.connector import SettingError
from flash.acting import ActDecision, Acting, SessionActing, risk_of
from flash.confidence import (
    Calibration,
    CalibrationError,
    Judged,
    QuestionCalibration,
    judge,
    read_calibration,
)
from flash.late_labels import (
    AdaptationState,
    JudgedAnswer,
    LabelError,
    Labelled,
    LateLabels,
    WaitingAnswer,
)
from flash.learnt_calibration import AdaptedCalibration, LearntCalibrations
from flash.question import Question
from flash.registry import BadQuestion, Standing
from ingest.bar_kernel import AMENDS, EVENT, GAP, INCOMPLETE, JUMP, ROLLED
from ingest.plane import TapeRecord
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.tapes import TapeItem

log = logging.getLogger(__name__)

MEMORY = 256
"""Answers over which a session's mean gap is taken, with weights that fall exponentially."""
_KNOWN = 1_024
"""Questions whose text in the calibration is remembered."""


def calibration_of(
    settings: ModelConfig, directory: Path, revision: str, lines: Collection[str]
) -> Calibration | None:
    """The configured calibration, or the one in the model's directory; None where there is none.

    ``lines`` are those of the sessions. Raises SettingError for a file that is not for this model and them.
    """
    if settings.calibration == "off":
        return None
    file = Path(settings.calibration) if settings.calibration else directory / CALIBRATION
    if not settings.calibration and not file.exists():
        return None
    found = None
    try:
        for each in sorted(lines):
            found = read_calibration(file, revision, each)
    except CalibrationError as error:
        raise SettingError("model.calibration", f"{error}; or set it to off") from error
    return found


class Confidence:
    """Judges answers of standing questions, as the only writer of their metrics, and replies to asks.

    On the scheduler's thread.
    """

    def __init__(
        self,
        config: Config,
        prompt: PromptFormat,
        calibration: Calibration | None,
        store: MetricStore,
        emit: Callable[[protocol.Labelled], None] = lambda event: None,
        packs: EnginePacks | None = None,
    ) -> None:
        """``emit``: tells of a label."""
        self._settings, self._calibration = config.model, calibration
        self._listed = lru_cache(_KNOWN)(partial(_listed, prompt.terse))
        self._store, self._emit, self._packs = store, emit, packs
        self._gap_ratio: dict[str, float] = {}
        self._not_calibrated: set[tuple[str, str]] = set()  # session and hash, by the latest answer
        self._labels: dict[str, LateLabels] = {}
        self._acting: dict[str, SessionActing] = {}
        self._learnt: dict[str, LearntCalibrations] = {}
        for session in config.sessions:
            self.add(session.name)

    def add(self, session: str) -> None:
        """There is another session."""
        self._labels[session] = LateLabels(self._settings.coverage, 0)
        self._acting[session] = SessionActing()
        self._learnt[session] = LearntCalibrations()
        self._share()
        self._show_acted(session)

    def remove(self, session: str) -> None:
        """A session is removed."""
        self._labels.pop(session, None)
        self._acting.pop(session, None)
        self._learnt.pop(session, None)
        self._share()
        self._gap_ratio.pop(session, None)
        self._not_calibrated = {key for key in self._not_calibrated if key[0] != session}

    def _share(self) -> None:
        for labels in self._labels.values():
            labels.keep(self._settings.remembered_answers // len(self._labels))

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem[TapeRecord]]) -> None:
        """Follow the regime of a session by the bars of its first symbol."""
        acting = self._acting.get(tape.name)
        if acting is None:
            return
        for record in (each.payload for each in records):
            if not record.flags & (AMENDS | EVENT) and not record.bar.leg:
                gap = bool(record.flags & (GAP | JUMP | ROLLED | INCOMPLETE))
                acting.bar(record.ts_last_event, record.bar.high, record.bar.low, record.bar.close, gap=gap)

    def check(self, question: Question) -> None:
        """Raise BadQuestion for one with a `max_error` whose answers nothing can calibrate."""
        if question.max_error is not None and self._settings.calibration == "off":
            why = "max_error needs a calibration: remove calibration = 'off' of the model, or max_error"
            raise BadQuestion(f"question {question.name!r}: {why}", "max_error")

    def keep(self, session: str, standing: Iterable[Standing]) -> None:
        """A session has these questions: others are not marked until they are asked again."""
        limits = ((each.question_hash, each.question.max_error) for each in standing)
        self._acting[session].keep({asked: limit for asked, limit in limits if limit is not None})
        self._show_acted(session)

    def cut(self, session: str) -> AdaptationState:
        """What the labels of a session have adapted."""
        acting, learnt = self._acting[session].cut(), self._learnt[session].cut()
        return replace(self._labels[session].cut(), acting=acting, learnt=learnt)

    def restore(self, session: str, cut: AdaptationState) -> None:
        """Go on from a cut."""
        self._labels[session].restore(cut)
        self._acting[session].restore(cut.acting)
        self._learnt[session] = LearntCalibrations(() if self._settings.calibration == "off" else cut.learnt)
        if cut.asked:
            self._store.set("foretick_adapted_coverage", self._labels[session].largest, session=session)

    def awaits(self, session: str, question: str, version: int) -> bool:
        """Whether an answer to the question of this hash waits for its label."""
        return self._labels[session].waiting(question, version) is not None

    def waiting(self, session: str, keys: Iterable[tuple[str, int]]) -> tuple[WaitingAnswer, ...]:
        """Those of these answers (hash of the question, version) that wait for their label."""
        found = []
        for question, version in keys:
            answer = self._labels[session].waiting(question, version)
            if answer is not None:
                name = "" if answer.fitted is None else answer.fitted.name
                found.append(WaitingAnswer(question, version, name, *answer[1:]))
        return tuple(found)

    def remember(self, session: str, answers: Iterable[WaitingAnswer]) -> None:
        """Let answers of an earlier engine wait, but for those whose question has no calibration any more."""
        for each in answers:
            known = self._calibration and self._calibration.find(each.name, each.choices, each.numbered)
            fitted = known or (self._packs and self._packs.find(each.name, each.choices)) or None
            if fitted or not each.name:
                said = each.choices, each.numbered, each.logits, each.given, each.choice_set, each.decided
                self._labels[session].remember(each.question, each.version, JudgedAnswer(fitted, *said))

    def of(
        self, session: str, question: Question, logits: Sequence[float], given: str | None
    ) -> Judged | None:
        """Probability, choice set and abstention; None for a question that was not calibrated.

        ``logits`` of the choices in their order; ``given``: the chosen one.
        """
        asked = question.hash
        known = self._known(session, asked, self._fitted(question))
        if known is None or given is None:
            return None
        return self._judge(known, session, asked, logits, given, self._acting[session].known(asked))[0]

    def uncalibrated(self, question: Question | None) -> str:
        """Why an answer of closed bars to it was not judged: a key of `UNCALIBRATED`."""
        if question is None or not question.choices:
            return "no_session" if question is None else "free_text"
        if self._settings.calibration == "off":
            return "off"
        return "by_number" if self._fitted(question) else "not_calibrated"

    def unjudged(self, config: Config, by_number: Callable[[Question], bool]) -> dict[tuple[str, str], str]:
        """The standing questions of ``config`` whose answers have no probability, by session and name.

        The values are keys of `UNCALIBRATED`. ``by_number``: whether a question is asked by its number.
        """
        found = {}
        for _, session, question in questions_of(replace(config, sessions=config.all_sessions)):
            if question.pack:  # it has a calibration of its own
                continue
            numbered = by_number(question)
            if not self._known(session, question.hash, self._fitted(question, numbered), numbered):
                found[session, question.name] = self.uncalibrated(question)
        return found

    def of_standing(
        self,
        standing: Standing,
        version: int | None,
        logits: Sequence[float],
        given: str | None,
        prompt: Sequence[int],
    ) -> Judged | None:
        """As `of`, and remembered for its label, and counted: asks would tell more of their clients.

        ``version``: None for an answer that was given before, which is neither. ``prompt``: the tokens that
        asked, the question's own or its number.
        """
        numbered = tuple(prompt) != tuple(standing.prepared.prompt_tokens)
        fitted = self._fitted(standing.question, numbered)
        session, asked = standing.session, standing.question_hash
        choices = standing.question.choices
        if fitted is None and (not choices or self._settings.calibration == "off"):
            self._not_calibrated.add((session, asked))
            return None
        self._not_calibrated.discard((session, asked))
        if given is None or choices is None:
            return None
        known = self._known(session, asked, fitted, numbered)
        limit = standing.question.max_error
        acting: Acting | None = None
        found: Judged | None = None
        decided: ActDecision | None = None
        if known is not None:
            if limit is not None:
                acting = self._acting[session].question(asked, limit)
            found, decided = self._judge(known, session, asked, logits, given, acting)
        if version is not None:
            choice_set = found.choice_set if found else None
            said = choices, numbered, tuple(logits), choices.index(given), choice_set, decided
            self._labels[session].remember(asked, version, JudgedAnswer(fitted, *said))
        if version is None or known is None or found is None:
            return found
        if decided is not None:
            self._count(session, decided)
        best, second = sorted(logits, reverse=True)[:2]
        ratio = (best - second) / known.mean_gap if known.mean_gap else 1.0
        mean = self._gap_ratio.get(session, ratio)
        self._gap_ratio[session] = mean + (ratio - mean) / MEMORY
        self._store.set("foretick_gap_ratio", self._gap_ratio[session], session=session)
        size = ("empty", "one", "several")[min(len(found.choice_set), 2)]
        self._store.inc("foretick_choice_sets_total", session=session, size=size)
        return found

    def label(self, standing: Standing, version: int, choice: str) -> Labelled:
        """Tell the right choice of an answer. Raises LabelError, with nothing changed."""
        session, name = standing.session, standing.question.name
        try:
            answer = self._labels[session].waiting(standing.question_hash, version)
            found = self._labels[session].label(standing.question_hash, version, choice)
        except LabelError as error:
            if error.code == "unknown_version" and (session, standing.question_hash) in self._not_calibrated:
                why = f"{session}/{name} has no calibration with its choices, as it is asked"
                raise LabelError("not_calibrated", why) from None
            raise LabelError(error.code, f"{session}/{name}: {error}") from None
        assert answer is not None  # or it was refused
        if found.covered is not None:
            covered = "yes" if found.covered else "no"
            self._store.inc("foretick_labelled_sets_total", session=session, covered=covered)
            self._store.inc("foretick_labelled_right_total", int(found.right), session=session)
        self._store.set("foretick_adapted_coverage", self._labels[session].largest, session=session)
        self._emit(protocol.Labelled(session, name, version, choice))
        limit, right = standing.question.max_error, answer.choices.index(choice)
        self._learn(standing, answer, right)
        if answer.decided is not None and limit is not None:
            acting = self._acting[session].question(standing.question_hash, limit)
            acting.label(answer.decided, version, right)
            self._show_acted(session)
        return found

    def _show_acted(self, session: str) -> None:
        error = self._acting[session].error
        self._store.set("foretick_acted_error_ratio", nan if error is None else error, session=session)

    def _learn(self, standing: Standing, answer: JudgedAnswer, right: int) -> None:
        """From a label; and name the question whose fitted calibration it begins or ceases to adapt."""
        session, learnt = standing.session, self._learnt[standing.session]
        own = standing.question_hash, answer.numbered
        before = learnt.find(*own, answer.fitted)
        learnt.label(*own, answer.choices, answer.logits, right, answer.fitted)
        self._store.set("foretick_adapted_calibrations", learnt.adapted, session=session)
        adapted = isinstance(learnt.find(*own, answer.fitted), AdaptedCalibration)
        if adapted != isinstance(before, AdaptedCalibration):
            said = "adapted by labels" if adapted else "those of the calibration"
            log.info("probabilities of %s/%s are now %s", session, standing.question.name, said)

    def _judge(
        self,
        known: QuestionCalibration,
        session: str,
        asked: str,
        logits: Sequence[float],
        given: str,
        acting: Acting | None,
    ) -> tuple[Judged, ActDecision | None]:
        """``asked``: hash of the question. None: nothing is to be acted on within an error."""
        number, coverage = known.choices.index(given), self._labels[session].coverage(asked)
        judged = judge(known, logits, number, coverage, self._settings.abstain_below)
        if acting is None:
            return judged, None
        regime = self._acting[session].regime
        decided = acting.decide(risk_of(known, logits, number), regime, number)
        if judged.abstained and decided.act:
            decided = decided._replace(act=False, reason="low_confidence", certain=False)
        return judged._replace(act=decided.act, abstain_reason=decided.reason), decided

    def _count(self, session: str, decided: ActDecision) -> None:
        if decided.act:
            self._store.inc("foretick_acted_total", session=session)
        elif decided.reason is not None:
            self._store.inc("foretick_act_abstained_total", session=session, reason=decided.reason)

    def _fitted(self, question: Question, numbered: bool = False) -> QuestionCalibration | None:
        """What was fitted for a question with choices, asked so."""
        if question.pack and question.choices:
            return self._packs.fitted(question) if self._packs else None
        if self._calibration is None or not question.choices:
            return None
        return self._calibration.find(self._listed(question.text, question.name), question.choices, numbered)

    def _known(
        self, session: str, asked: str, fitted: QuestionCalibration | None, numbered: bool = False
    ) -> QuestionCalibration | None:
        """What was fitted for the question of this hash, asked so, or what labels made of it."""
        learnt = self._learnt.get(session)
        return fitted if learnt is None else learnt.find(asked, numbered, fitted)


def check_error(confidence: Confidence, asked: StandingQuestion) -> None:
    """Raise SettingError for a declared question as `Confidence.check` does."""
    try:
        confidence.check(asked.question)
    except BadQuestion as error:
        raise SettingError(f"{asked.key}.{error.member}", str(error)) from error


def _listed(terse: Terse | None, text: str, name: str) -> str:
    """A question's text as the calibration lists it: a terse model knows questions by name too."""
    if terse is not None:
        for asked in (text, name):
            with suppress(ValueError):
                return terse.find(asked).text
    return text
