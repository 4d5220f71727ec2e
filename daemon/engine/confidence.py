"""What a calibration says of standing answers, and how far their logit gaps have moved from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from daemon.config.schema import Config, ModelConfig
from engine.model.prompt import PromptFormat
from engine.model.revision import CALIBRATION
from feeds.connector import SettingError
from flash.confidence import Calibration, CalibrationError, Judged, judge, read_calibration
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
    """Judges answers, as the only writer of their metrics; on the scheduler's thread."""

    def __init__(
        self, config: Config, prompt: PromptFormat, calibration: Calibration | None, store: MetricStore
    ) -> None:
        self._settings, self._prompt, self._calibration = config.model, prompt, calibration
        self._store = store
        self._gap_ratio: dict[str, float] = {}

    def of(
        self, session: str, question: Question, logits: Sequence[float], given: str | None
    ) -> Judged | None:
        """Probability, choice set and abstention; None for a question that was not calibrated.

        ``logits`` of the choices in their order; ``given``: the chosen one.
        """
        choices = question.choices
        if self._calibration is None or not choices or given is None or len(logits) != len(choices):
            return None
        fitted = self._calibration.find(self._asked(question), choices)
        if fitted is None:
            return None
        settings = self._settings
        found = judge(fitted, logits, choices.index(given), settings.coverage, settings.abstain_below)
        best, second = sorted(logits, reverse=True)[:2]
        ratio = (best - second) / fitted.mean_gap if fitted.mean_gap else 1.0
        mean = self._gap_ratio.get(session, ratio)
        self._gap_ratio[session] = mean + (ratio - mean) / MEMORY
        self._store.set("foretick_gap_ratio", self._gap_ratio[session], session=session)
        size = ("empty", "one", "several")[min(len(found.choice_set), 2)]
        self._store.inc("foretick_choice_sets_total", session=session, size=size)
        return found

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
