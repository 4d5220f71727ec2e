"""The question packs that one model answers by, each loaded when a question first asks for it."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from daemon.config.taught import mismatch
from engine.engine import Engine
from engine.model.adapted import adapted
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptFormat
from engine.model.question_pack import PackError, PackHead, located, read_pinned
from flash.confidence import QuestionCalibration
from flash.question import PreparedQuestion, Question
from flash.registry import BadQuestion


class Installed(NamedTuple):
    """A pack whose rows the engine runs; ``tokens`` ask its question."""

    head: PackHead
    tokens: tuple[int, ...]
    calibrations: tuple[QuestionCalibration, ...]


class EnginePacks:
    """Packs by revision. ``calibrates``: their calibrations count. ``most``: each holds a second set of the
    model's layers' weights.
    """

    def __init__(
        self, engine: Engine, directory: Path, prompt: PromptFormat, *, calibrates: bool, most: int
    ) -> None:
        self._engine, self._directory, self._prompt = engine, directory, prompt
        self._calibrates, self._most = calibrates, most
        self._installed: dict[str, Installed] = {}
        self._lock = threading.Lock()

    def prepared(self, question: Question) -> PreparedQuestion:
        """What asks a question with a pack. Raises BadQuestion where the pack does not answer it."""
        found = self._of(question)
        if why := mismatch(found.head, question.text, question.choices or ()):
            raise BadQuestion(f"question {question.name!r}: {why}", "text")
        tokens = dict(zip(self.answers(question), found.head.answers, strict=True))
        choices = tuple(tokens[choice] for choice in question.choices or ())
        return PreparedQuestion(found.tokens, choices, self._prompt.stop_ids, 1)

    def answers(self, question: Question) -> tuple[str, ...]:
        """All answers to a question with a pack. Raises BadQuestion."""
        head = self._of(question).head
        return *head.choices, head.none

    def text_of(self, tokens: Sequence[int]) -> str:
        """The question that these tokens of a pack ask; "" for tokens of the model."""
        asked = tuple(tokens)
        return next((each.head.text for each in self._installed.values() if each.tokens == asked), "")

    def fitted(self, question: Question) -> QuestionCalibration | None:
        """The calibration of a question with a pack, whose tokens have been asked for; None without one."""
        found = self._installed.get(located(question.pack)[1])
        return None if found is None else _chosen(found, question.choices or ())

    def find(self, name: str, choices: Sequence[str]) -> QuestionCalibration | None:
        """The calibration of this name, which names its pack's revision, with these choices."""
        found = self._installed.get(name.rpartition("@")[2])
        return None if found is None else _chosen(found, choices)

    def _of(self, question: Question) -> Installed:
        revision = located(question.pack)[1]
        with self._lock:
            found = self._installed.get(revision)
            if found is None:
                try:
                    found = self._installed[revision] = self._load(question.pack)
                except (PackError, ModelError, msgspec.ValidationError) as error:
                    raise BadQuestion(f"question {question.name!r}: {error}", "text") from error
        return found

    def _load(self, asked: str) -> Installed:
        """``asked``: FILE@REVISION."""
        path, revision = located(asked)
        if self._prompt.terse is None:
            raise ModelError("a question pack is for the tape model, and this one reads words")
        if len(self._installed) >= self._most:
            raise ModelError(f"a model answers by at most {self._most} question packs (flash.max_packs)")
        pack = read_pinned(asked)
        try:
            weights = adapted(self._engine.model, self._directory, pack)
        except ModelError as error:
            raise ModelError(f"{path} {error}") from error
        name = f"{pack.head.name}@{revision}"
        fitted = [msgspec.convert(each, QuestionCalibration) for each in pack.head.calibrations]
        named = tuple(msgspec.structs.replace(each, name=name) for each in fitted)
        first = self._engine.install(weights)
        tokens = tuple(range(first, first + pack.tokens))
        return Installed(pack.head, tokens, named if self._calibrates else ())


def _chosen(found: Installed, choices: Sequence[str]) -> QuestionCalibration | None:
    return next((each for each in found.calibrations if each.choices == list(choices)), None)
