"""The frozen prefix of each session: what its lines mean and, in frozen placement, its numbered questions.

A question is asked by its number only of a version whose prefix has it. Until a prefix with a new question is
adopted, the question is asked in full.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.model.prompt import PromptFormat
from flash.questions import Question
from flash.registry import Standing
from ingest.compact import WIDEST
from regions.ephemeral import Fork


class Listing(NamedTuple):
    """What one frozen prefix says. ``asked``: the tokens that ask each numbered question, by its text."""

    prefix: tuple[int, ...]
    asked: Mapping[str, tuple[int, ...]]


class Prefixes:
    """Makes prefixes, and remembers those that may still be read. Called from several threads.

    ``text_of`` gives a question as the model knows it. ``headers``, by session, say what compact lines mean
    (None: decimal lines). ``questions``: those to number where the model answers by number, None: none ever.
    ``several``: sessions of several symbols.
    """

    def __init__(
        self,
        prompt: PromptFormat,
        text_of: Callable[[Question], str],
        headers: Mapping[str, str | None],
        questions: Mapping[str, Sequence[Question]] | None,
        several: Iterable[str] = (),
    ) -> None:
        self._several = set(several)
        self._prompt, self._text_of = prompt, text_of
        self._headers = dict(headers)
        self.numbers = questions is not None
        """Questions are numbered."""
        self._questions: dict[str, tuple[Question, ...]] = {}
        self._listings: defaultdict[str, deque[Listing]] = defaultdict(deque)  # oldest first
        self._lock = threading.Lock()
        for name, header in headers.items():
            self.add(name, header, (questions or {}).get(name, ()), several=name in self._several)

    def add(
        self, session: str, header: str | None, questions: Sequence[Question], *, several: bool = False
    ) -> None:
        """Make the first prefix of a session. Raises ValueError, with nothing changed, as `frozen` does."""
        with self._lock:
            if several:
                self._several.add(session)
            try:
                listing = self._made(session, header, tuple(questions) if self.numbers else ())
            except ValueError:
                self._several.discard(session)
                raise
            self._headers[session], self._questions[session] = header, tuple(questions)
            self._listings[session] = deque([listing])

    def remove(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._several.discard(session)
            for kept in (self._headers, self._questions, self._listings):
                kept.pop(session, None)

    def newest(self, session: str) -> tuple[int, ...]:
        """The prefix that the session has or is about to get."""
        return self._listings[session][-1].prefix

    def anchor(self, session: str, header: str, use: Callable[[tuple[int, ...]], None]) -> None:
        """Make a prefix with another ``header`` and call ``use`` with it, in the order of all changes.

        Nothing changes when ``use`` raises.
        """
        with self._lock:
            self._change(session, header, self._questions[session], use)

    def number(
        self, session: str, questions: Sequence[Question], use: Callable[[tuple[int, ...]], None]
    ) -> None:
        """As `anchor`, with other ``questions``; does nothing where questions are not numbered.

        ``use`` is not called where the prefix stays the same.
        """
        with self._lock:
            texts = [list(map(self._text_of, each)) for each in (questions, self._questions[session])]
            if self.numbers and texts[0] != texts[1]:
                self._change(session, self._headers[session], tuple(questions), use)

    def longest(self, session: str, questions: Sequence[Question]) -> int:
        """Most tokens of a prefix with these ``questions``, whatever anchor the session gets."""
        header = None if self._headers[session] is None else WIDEST.header
        return len(self._made(session, header, tuple(questions) if self.numbers else ()).prefix)

    def asked(self, standing: Standing, reader: Fork) -> Sequence[int]:
        """The tokens that ask ``standing`` of ``reader``, by its number if its prefix has one."""
        return self.asked_behind(standing, reader.prefix)

    def asked_behind(self, standing: Standing, prefix: tuple[int, ...]) -> Sequence[int]:
        """As `asked`, for the newest version's ``prefix``: older ones are forgotten."""
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

    def _change(
        self,
        session: str,
        header: str | None,
        questions: tuple[Question, ...],
        use: Callable[[tuple[int, ...]], None],
    ) -> None:
        listing = self._made(session, header, questions)
        use(listing.prefix)
        self._headers[session], self._questions[session] = header, questions
        if not self.numbers:
            self._listings[session].clear()  # nobody asks by number
        self._listings[session].append(listing)

    def _made(self, session: str, header: str | None, questions: tuple[Question, ...]) -> Listing:
        questions = tuple(each for each in questions if self._prompt.answers_by_number(self._text_of(each)))
        texts = list(map(self._text_of, questions))
        prefix = self._prompt.frozen(header, texts, symbols=session in self._several)
        asked = {question.text: tuple(self._prompt.numbered(n)) for n, question in enumerate(questions, 1)}
        return Listing(prefix, asked)
