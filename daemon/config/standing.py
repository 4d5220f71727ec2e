"""Each session's standing questions, as configured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from daemon.config.schema import Config
from flash.questions import PAPER_SIX, Question


class Asked(NamedTuple):
    """A standing question of one session. ``key`` names the setting that declares it."""

    key: str
    session: str
    question: Question


def questions_of(config: Config) -> Iterator[Asked]:
    """In the order they are asked."""
    preset = PAPER_SIX if config.standing == "paper_six" else ()
    for session in config.sessions:
        for question in preset:
            yield Asked("standing", session.name, question)
        for index, asked in enumerate(config.questions):
            if not asked.sessions or session.name in asked.sessions:
                question = Question(asked.name, asked.text, asked.choices or None, asked.max_tokens)
                yield Asked(f"questions[{index}]", session.name, question)
