"""Each session's standing questions, as configured."""

from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

from msgspec import structs

from daemon.config.answerable import refusal_of
from daemon.config.errors import ConfigError
from daemon.config.question_sets import SETS
from daemon.config.schema import Config, ModelConfig, QuestionConfig
from feeds.decimals import parse_fixed
from feeds.durations import Duration
from flash.question import Question


class StandingQuestion(NamedTuple):
    """A standing question of one session. ``key`` names the setting that declares it."""

    key: str
    session: str
    question: Question


def questions_of(config: Config) -> Iterator[StandingQuestion]:
    """In the order they are asked. Of several models, one is not asked what it cannot answer."""
    preset = SETS[config.standing]
    for session in config.sessions:
        model = config.model_of(session)
        own = (
            (f"questions[{index}]", question_of(asked))
            for index, asked in enumerate(config.questions)
            if is_asked(asked, session.name)
        )
        for key, question in chain((("standing", each) for each in preset), own):
            if not config.models or not refusal_of(model, question):
                yield StandingQuestion(key, session.name, question)


def is_asked(asked: QuestionConfig, session: str) -> bool:
    """Whether the table says that the session of this name is asked."""
    return not asked.sessions or any(fnmatchcase(session, each) for each in asked.sessions)


def refusal_by(model: ModelConfig, asked: QuestionConfig) -> str:
    """Why the model cannot answer it; "" where it can, and for a table that declares no question."""
    try:
        return refusal_of(model, question_of(asked))
    except ValueError:
        return ""


def question_of(asked: QuestionConfig) -> Question:
    """The question that a table declares. Raises ValueError, also where its pack cannot be read."""
    members = {f.name: getattr(asked, f.name) for f in fields(Question) if hasattr(asked, f.name)}
    changed = {
        "choices": asked.choices or None,
        "level": str(asked.level),
        "ask_every_ns": int(asked.ask_every),
        "answer_within_ns": int(asked.answer_within),
        "pack": _pinned(asked.pack) if asked.pack else "",
    }
    return Question(**members | changed)


def table_of(question: Question, session: str) -> QuestionConfig:
    """The table that declares ``question`` for one session."""
    members = {f.name: getattr(question, f.name) for f in fields(Question) if not f.name.endswith("_ns")}
    changed = {
        "choices": question.choices or (),
        "level": parse_fixed(question.level),
        "ask_every": Duration(question.ask_every_ns),
        "answer_within": Duration(question.answer_within_ns),
    }
    return QuestionConfig(**members | changed, sessions=(session,))


def with_revisions(config: Config) -> Config:
    """``config`` whose questions name the revisions of their packs: they stay those, whatever becomes of the
    files. Raises ConfigError.
    """
    if not any(asked.pack for asked in config.questions):
        return config
    found = []
    for index, asked in enumerate(config.questions):
        try:
            pack = _pinned(asked.pack) if asked.pack else ""
        except ValueError as error:
            raise ConfigError.of(f"questions[{index}].pack", str(error)) from None
        found.append(asked if pack == asked.pack else structs.replace(asked, pack=pack))
    return structs.replace(config, questions=tuple(found))


def _pinned(pack: str) -> str:
    """With its revision, for which the file of one that has none is read. Raises ValueError."""
    # imported here: few configurations need it
    from engine.model.question_pack import located, pinned

    return pack if located(pack)[1] else pinned(pack)
