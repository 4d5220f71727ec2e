"""Which questions the model of a session can answer; known without loading it."""

from functools import lru_cache
from pathlib import Path

from daemon.config.schema import UNTRAINED, ModelConfig
from engine.model.terse import TAPE_MODEL, Terse, terse_in
from flash.question import PAPER_SIX, Question


def terse_of(model: ModelConfig) -> Terse | None:
    """What a model says of itself that answers its own questions only; None for one that reads words.

    A directory that cannot be read is None, too: loading it says what is wrong.
    """
    return _terse(model.path)


@lru_cache(maxsize=64)
def _terse(path: str) -> Terse | None:
    if path == UNTRAINED or path.endswith(".gguf"):
        return None
    return terse_in(Path(path) if path else TAPE_MODEL)


def terse_text(question: Question) -> str:
    """The text that a terse model knows ``question`` by: the paper's are for models that read."""
    return _terse_text(question.text)


@lru_cache(maxsize=1024)
def _terse_text(text: str) -> str:
    paper = {_worded(each.text): each.name for each in PAPER_SIX}
    return paper.get(_worded(text), text)


def refusal_of(model: ModelConfig, question: Question) -> str:
    """Why the model cannot answer ``question``; "" where it can."""
    terse = terse_of(model)
    if question.pack:
        return "" if terse is not None else "a question pack is for the tape model, and this one reads words"
    if terse is None:
        return ""
    try:
        own = terse.find(terse_text(question))
    except ValueError as error:
        return str(error)
    if unknown := [choice for choice in question.choices or () if choice not in (*own.choices, terse.none)]:
        return f"this model does not answer {unknown}; its answers are {[*own.choices, terse.none]}"
    return ""


def _worded(text: str) -> str:
    """Identity of a question's words alone."""
    return Question(text, text, None).hash
