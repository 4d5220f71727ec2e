"""Which standing question a client means: by its name or its text, whatever else the request says.

Every transport and every API looks a question up here, before it looks at any other member of a request. So
a temperature, a stop sequence or a number of answers never makes another question of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flash.question import Question, worded


@dataclass(frozen=True, slots=True)
class Known:
    """A standing question of a session, and its hash, which names its ready answer."""

    question: Question
    hash: str


@dataclass(frozen=True)
class Lookup:
    """The standing questions of a session, paused ones among them, by name and by text."""

    by_name: Mapping[str, Known]
    by_text: Mapping[str, tuple[Known, ...]]

    @classmethod
    def of(cls, questions: Iterable[Question]) -> Lookup:
        """Index ``questions``, in their order; of those with one name, the first has it."""
        by_name: dict[str, Known] = {}
        by_text: dict[str, list[Known]] = {}
        for each in questions:
            known = Known(each, each.hash)
            by_name.setdefault(each.name, known)
            by_text.setdefault(worded(each.text), []).append(known)
        return cls(by_name, {text: tuple(found) for text, found in by_text.items()})

    def named(self, asked: str) -> tuple[Known, ...]:
        """The questions with this name or text: the one with the name first, then in their order."""
        found = self._exactly(asked)
        return found or self._exactly(worded(asked))

    def find(self, asked: str, choices: tuple[str, ...] = ()) -> Known | None:
        """The standing question that is asked by its name or text; None where it is the client's own.

        Without ``choices`` it is answered as it stands. Of several with one text it is then the one without
        choices, else the first; one that reads open bars comes last. With ``choices`` it must have these.
        """
        found = self.named(asked)
        if not found:
            return None
        if choices:
            return next((each for each in found if _alike(each.question.choices or (), choices)), None)
        if found[0].question.name in (asked, worded(asked)):
            return found[0]
        return min(found, key=lambda each: (each.question.provisional, each.question.choices is not None))

    def text_of(self, asked: str) -> str:
        """What is asked with choices of the client's own: the text of the question with this name, if any."""
        found = self.by_name.get(asked) or self.by_name.get(worded(asked))
        return asked if found is None else found.question.text

    def _exactly(self, asked: str) -> tuple[Known, ...]:
        name, texts = self.by_name.get(asked), self.by_text.get(asked, ())
        return texts if name is None else (name, *(each for each in texts if each is not name))


def _alike(mine: tuple[str, ...], given: tuple[str, ...]) -> bool:
    """Whether two lists of choices are one, as a question's hash has it."""
    return tuple(map(worded, mine)) == tuple(map(worded, given))
