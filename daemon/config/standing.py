"""Each session's standing questions, as configured."""

from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import NamedTuple

from daemon.config.question_sets import SETS
from daemon.config.schema import Config, QuestionConfig
from feeds.decimals import parse_fixed
from feeds.durations import Duration
from flash.question import Question


class StandingQuestion(NamedTuple):
    """A standing question of one session. ``key`` names the setting that declares it."""

    key: str
    session: str
    question: Question


def questions_of(config: Config) -> Iterator[StandingQuestion]:
    """In the order they are asked."""
    preset = SETS[config.standing]
    for session in config.sessions:
        for question in preset:
            yield StandingQuestion("standing", session.name, question)
        for index, asked in enumerate(config.questions):
            if not asked.sessions or any(fnmatchcase(session.name, each) for each in asked.sessions):
                yield StandingQuestion(f"questions[{index}]", session.name, question_of(asked))


def question_of(asked: QuestionConfig) -> Question:
    """The question that a table declares."""
    members = {f.name: getattr(asked, f.name) for f in fields(Question) if hasattr(asked, f.name)}
    changed = {
        "choices": asked.choices or None,
        "level": str(asked.level),
        "ask_every_ns": int(asked.ask_every),
        "answer_within_ns": int(asked.answer_within),
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
