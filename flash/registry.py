"""The standing questions of every session, prepared once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from flash.questions import Prepare, Prepared, Question


class BadQuestion(ValueError):
    """A question that cannot be registered; the message says why. ``member``: the invalid member."""

    def __init__(self, message: str, member: Literal["name", "choices"] = "choices") -> None:
        super().__init__(message)
        self.member = member


@dataclass(frozen=True, slots=True)
class Standing:
    """A question registered for a session."""

    session: str
    question: Question
    question_hash: str
    prepared: Prepared


class Registry:
    """Standing questions by session, in order of registration."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._standing: dict[str, tuple[Standing, ...]] = {}

    def register(self, session: str, question: Question) -> Standing:
        """Register a question from the session's next data version on. Idempotent.

        Raises BadQuestion when two choices begin with the same token, when another question of the session
        has the name, and when `prepare` raises ValueError.
        """
        try:
            prepared = self._prepare(question)
        except ValueError as error:
            raise BadQuestion(f"question {question.name!r}: {error}") from error
        check_choices(question, prepared)
        new = Standing(session, question, question.hash, prepared)
        standing = self.standing(session)
        for old in standing:
            if old.question == question:
                return old
            if old.question.name == question.name:
                raise BadQuestion(
                    f"session {session!r} already has another question named {question.name!r}", "name"
                )
        self._standing[session] = (*standing, new)
        return new

    def standing(self, session: str) -> tuple[Standing, ...]:
        """The session's questions."""
        return self._standing.get(session, ())


def check_choices(question: Question, prepared: Prepared) -> None:
    """Raise BadQuestion unless the first token of an answer identifies the choice."""
    choices, tokens = question.choices or (), prepared.choice_tokens or ()
    if len(tokens) != len(choices):
        raise BadQuestion(
            f"question {question.name!r}: {len(choices)} choices were prepared as {len(tokens)} tokens"
        )
    repeated = {token for token, count in Counter(tokens).items() if count > 1}
    if repeated:
        alike = [choice for choice, token in zip(choices, tokens, strict=True) if token in repeated]
        raise BadQuestion(
            f"question {question.name!r}: the choices {alike} begin with the same token, "
            "so answers cannot tell them apart; reword them"
        )
