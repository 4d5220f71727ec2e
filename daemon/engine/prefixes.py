"""The frozen prefix of each session: what its lines mean and, in frozen placement, its numbered questions.

Behind it a session may have a rollup, which is part of the prefix then: all that stands before the window.
A question is asked by its number only of a version whose prefix has it. Until a prefix with a new question is
adopted, the question is asked in full.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from daemon.config.schema import SessionConfig
from engine.model.chat_format import PromptFormat
from engine.model.terse import Lines
from flash.question import Question
from flash.registry import Standing
from ingest.compact import WIDEST


class QuestionList(NamedTuple):
    """What one frozen prefix says. ``asked``: the tokens that ask each numbered question, by its text."""

    prefix: tuple[int, ...]
    asked: Mapping[str, tuple[int, ...]]


class Explanation(NamedTuple):
    """What a prefix says of ``lines`` that are not compact.

    ``about``: see `daemon.engine.described`; ``turns``: see `daemon.engine.example_turns`.
    """

    lines: Lines = "decimal"
    about: str = ""
    turns: tuple[tuple[str, str], ...] = ()


class _Parts(NamedTuple):
    """What the newest prefix of a session is made of. ``longest``: tokens of its longest rollup."""

    header: str | None
    questions: tuple[Question, ...]
    several: bool
    longest: int
    explained: Explanation
    rollup: tuple[int, ...] = ()


class EnginePrefixes:
    """Makes prefixes, and remembers those that may still be read. Called from several threads.

    ``text_of`` gives a question as the model knows it. ``numbers``: questions are numbered, where the model
    answers by number.
    """

    def __init__(self, prompt: PromptFormat, text_of: Callable[[Question], str], *, numbers: bool) -> None:
        self._prompt, self._text_of, self.numbers = prompt, text_of, numbers
        self._parts: dict[str, _Parts] = {}
        self._listings: dict[str, deque[QuestionList]] = {}  # oldest first
        self._lock = threading.Lock()

    def add(
        self, session: SessionConfig, header: str | None, questions: Sequence[Question], said: Explanation
    ) -> None:
        """Make the first prefix of a session. Raises ValueError, with nothing changed, as `frozen` does.

        ``header``: what compact lines mean; None: ``said`` has what others mean.
        """
        asked = tuple(questions) if self.numbers else ()  # the prefix of a later anchor has them, too
        with self._lock:
            parts = _Parts(header, asked, bool(session.more_symbols), session.summed_tokens, said)
            self._begin(session.name, parts)

    def restore(self, session: str, header: str | None, rollup: tuple[int, ...]) -> None:
        """Have a session begin with this header and rollup; its questions stay."""
        with self._lock:
            self._begin(session, self._parts[session]._replace(header=header, rollup=rollup))

    def parts(self, session: str) -> tuple[str | None, tuple[int, ...]]:
        """Header and rollup of the prefix that the session has or is about to get."""
        parts = self._parts[session]
        return parts.header, parts.rollup

    def remove(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._parts.pop(session, None)
            self._listings.pop(session, None)

    def newest(self, session: str) -> tuple[int, ...]:
        """The prefix that the session has or is about to get."""
        return self._listings[session][-1].prefix

    def anchor(self, session: str, header: str | None, use: Callable[[tuple[int, ...]], None]) -> None:
        """Make a prefix with this ``header`` and call ``use`` with it, in the order of all changes.

        ``header``: None of other lines. Nothing changes when ``use`` raises.
        """
        with self._lock:
            self._change(session, self._parts[session]._replace(header=header), use)

    def sum_up(self, session: str, rollup: tuple[int, ...], use: Callable[[tuple[int, ...]], None]) -> None:
        """As `anchor`, with another ``rollup``."""
        with self._lock:
            self._change(session, self._parts[session]._replace(rollup=rollup), use)

    def number(
        self, session: str, questions: Sequence[Question], use: Callable[[tuple[int, ...]], None]
    ) -> None:
        """As `anchor`, with other ``questions``; does nothing where questions are not numbered.

        ``use`` is not called where the prefix stays the same.
        """
        with self._lock:
            parts = self._parts[session]
            texts = [list(map(self._text_of, each)) for each in (questions, parts.questions)]
            if self.numbers and texts[0] != texts[1]:
                self._change(session, parts._replace(questions=tuple(questions)), use)

    def longest(self, session: str, questions: Sequence[Question]) -> int:
        """Most tokens of a prefix with these ``questions``, whatever anchor and rollup the session gets."""
        parts = self._parts[session]
        header = None if parts.header is None else WIDEST.header
        asked = tuple(questions) if self.numbers else ()
        made = self._made(_Parts(header, asked, parts.several, 0, parts.explained))
        return len(made.prefix) + parts.longest

    def asked(self, standing: Standing, prefix: tuple[int, ...]) -> Sequence[int]:
        """The tokens that ask ``standing`` behind ``prefix``, by its number if the prefix has one.

        ``prefix`` is the newest version's: older ones are forgotten.
        """
        whole = standing.prepared.prompt_tokens
        if not self.numbers:
            return whole
        with self._lock:
            listings = self._listings[standing.session]
            # identity first: comparing thousands of tokens for each question would cost a millisecond
            alike = (n for n, each in enumerate(listings) if each.prefix is prefix or each.prefix == prefix)
            found = next(alike, None)
            if found is None:
                return whole
            for _ in range(found):
                listings.popleft()
            return listings[0].asked.get(standing.question.text, whole)

    def tokens(self, standing: Standing, prefix: tuple[int, ...]) -> int:
        """How many tokens ask ``standing`` behind ``prefix``; no listing is forgotten."""
        with self._lock:
            listings = self._listings.get(standing.session, ()) if self.numbers else ()
            found = next((each for each in listings if each.prefix is prefix), None)
        whole = standing.prepared.prompt_tokens
        return len(whole if found is None else found.asked.get(standing.question.text, whole))

    def by_number(self, question: Question) -> bool:
        """Whether it is asked by its number, once the prefix has one. Raises ValueError as `frozen` does."""
        if not self.numbers or question.pack:  # a pack's tokens ask its question
            return False
        return self._prompt.answers_by_number(self._text_of(question))

    def _begin(self, session: str, parts: _Parts) -> None:
        self._listings[session] = deque([self._made(parts)])
        self._parts[session] = parts

    def _change(self, session: str, parts: _Parts, use: Callable[[tuple[int, ...]], None]) -> None:
        listing = self._made(parts)
        use(listing.prefix)
        self._parts[session] = parts
        if not self.numbers:
            self._listings[session].clear()  # no question is asked by number
        self._listings[session].append(listing)

    def _made(self, parts: _Parts) -> QuestionList:
        listed = [(each.text, self._text_of(each)) for each in parts.questions if self.by_number(each)]
        texts = [own for _, own in listed]
        said = parts.explained._asdict()
        prefix = self._prompt.frozen(parts.header, texts, symbols=parts.several, **said)
        asked = {text: tuple(self._prompt.numbered(n)) for n, (text, _) in enumerate(listed, 1)}
        return QuestionList(prefix + parts.rollup, asked)
