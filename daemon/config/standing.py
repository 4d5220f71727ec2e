"""The standing questions of every session, as the configuration declares them."""

from __future__ import annotations

from collections.abc import Iterator

from daemon.config.schema import Config
from flash.questions import PAPER_SIX, Question


def questions_of(config: Config) -> Iterator[tuple[str, Question]]:
    """(session name, question), in the order they are asked."""
    preset = PAPER_SIX if config.standing == "paper_six" else ()
    for session in config.sessions:
        for question in preset:
            yield session.name, question
        for asked in config.questions:
            if not asked.sessions or session.name in asked.sessions:
                yield (
                    session.name,
                    Question(asked.name, asked.text, asked.choices or None, asked.max_tokens),
                )
