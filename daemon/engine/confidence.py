"""What a calibration says of answers, and how far the logit gaps of standing ones have moved from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from daemon.config.schema import Config, ModelConfig
from engine.model.prompt import PromptFormat
from engine.model.revision import CALIBRATION
from feeds.connector import SettingError
from flash.confidence import (
    Calibration,
    CalibrationError,
    Judged,
    QuestionCalibration,
    judge,
    read_calibration,
)
from flash.questions import Question
from metrics.store import MetricStore

MEMORY = 256
"""Answers over which a session's mean gap is taken, with weights that fall exponentially."""


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
        self, config: Config, prompt: PromptFormat, calibration: Calibration | None, store: MetricStore
    ) -> None:
        self._settings, self._prompt, self._calibration = config.model, prompt, calibration
        self._store = store
        self._gap_ratio: dict[str, float] = {}

    def of(self, question: Question, logits: Sequence[float], given: str | None) -> Judged | None:
        """Probability, choice set and abstention; None for a question that was not calibrated.

        ``logits`` of the choices in their order; ``given``: the chosen one.
        """
        fitted = self._fitted(question)
        return None if fitted is None else self._judge(fitted, logits, given)

    def of_standing(
        self, session: str, question: Question, logits: Sequence[float], given: str | None
    ) -> Judged | None:
        """As `of`, and counted: asks would tell more of their clients than of the market."""
        fitted = self._fitted(question)
        if fitted is None:
            return None
        found = self._judge(fitted, logits, given)
        best, second = sorted(logits, reverse=True)[:2]
        ratio = (best - second) / fitted.mean_gap if fitted.mean_gap else 1.0
        mean = self._gap_ratio.get(session, ratio)
        self._gap_ratio[session] = mean + (ratio - mean) / MEMORY
        self._store.set("foretick_gap_ratio", self._gap_ratio[session], session=session)
        size = ("empty", "one", "several")[min(len(found.choice_set), 2)]
        self._store.inc("foretick_choice_sets_total", session=session, size=size)
        return found

    def _judge(self, fitted: QuestionCalibration, logits: Sequence[float], given: str | None) -> Judged:
        assert given is not None  # a question with choices is answered by one
        settings = self._settings
        return judge(fitted, logits, fitted.choices.index(given), settings.coverage, settings.abstain_below)

    def _fitted(self, question: Question) -> QuestionCalibration | None:
        """What was fitted for a question with choices."""
        if self._calibration is None or not question.choices:
            return None
        return self._calibration.find(self._asked(question), question.choices)

    def _asked(self, question: Question) -> str:
        """As the calibration lists it: a terse model knows questions by name too."""
        terse = self._prompt.terse
        if terse is None:
            return question.text
        for asked in (question.text, question.name):
            try:
                return terse.find(asked).text
            except ValueError:
                continue
        return question.text
