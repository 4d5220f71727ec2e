"""The standing questions of every session, prepared once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flash.question import Prepare, PreparedQuestion, Question


class BadQuestion(ValueError):
    """A question that cannot be registered; the message says why. ``member``: the invalid member."""

    def __init__(
        self, message: str, member: Literal["name", "text", "choices", "max_error"] = "choices"
    ) -> None:
        super().__init__(message)
        self.member = member


Key = tuple[str, str]
"""Name and hash of a question."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A question registered for a session."""

    session: str
    question: Question
    question_hash: str
    prepared: PreparedQuestion

    @property
    def key(self) -> Key:
        """Identity within the session."""
        return self.question.name, self.question_hash


class Registry:
    """Standing questions by session, in order of registration."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._standing: dict[str, tuple[Standing, ...]] = {}

    def register(self, session: str, question: Question) -> Standing:
        """Register a question from the session's next data version on. Idempotent.

        Raises BadQuestion as `made` does.
        """
        asked = [each.question for each in self.standing(session)]
        if question not in asked:
            self.replace(session, self.made(session, [*asked, question]))
        return next(each for each in self.standing(session) if each.question == question)

    def made(self, session: str, questions: Sequence[Question]) -> tuple[Standing, ...]:
        """Prepare ``questions`` for `replace`, which is for another thread.

        Raises BadQuestion when two choices begin with the same token, when two questions have one name, or
        ask the same within another `max_error`, and when `prepare` raises ValueError.
        """
        known = {each.question: each for each in self.standing(session)}
        made: list[Standing] = []
        for question in questions:
            if any(question.name == other.question.name for other in made):
                raise BadQuestion(
                    f"session {session!r} already has another question named {question.name!r}", "name"
                )
            new = known.get(question) or self._made(session, question)
            for other in (each.question for each in made if each.question_hash == new.question_hash):
                if other.max_error != question.max_error:  # they share answers, labels and debts
                    why = f"asks the same as {other.name!r}: give both one max_error, or remove one"
                    raise BadQuestion(f"question {question.name!r} {why}", "max_error")
            made.append(new)
        return tuple(made)

    def replace(self, session: str, standing: tuple[Standing, ...]) -> None:
        """Let the session have exactly these questions, from its next data version on."""
        self._standing[session] = standing

    def remove(self, session: str) -> None:
        """Forget a session."""
        self._standing.pop(session, None)

    def _made(self, session: str, question: Question) -> Standing:
        try:
            prepared = self._prepare(question)
        except BadQuestion:
            raise
        except ValueError as error:
            raise BadQuestion(f"question {question.name!r}: {error}") from error
        check_choices(question, prepared)
        return Standing(session, question, question.hash, prepared)

    def standing(self, session: str) -> tuple[Standing, ...]:
        """The session's questions."""
        return self._standing.get(session, ())


def check_choices(question: Question, prepared: PreparedQuestion) -> None:
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
            f"question {question.name!r}: the choices {alike[:8]} begin with the same token, "
            "so answers cannot tell them apart; reword them"
        )
