"""The frozen prefix of each session: what its lines mean and, in frozen placement, its numbered questions.

Behind it a session may have a rollup, which is part of the prefix then: all that stands before the window.
A question is asked by its number only of a version whose prefix has it. Until a prefix with a new question is
adopted, the question is asked in full.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.model.chat_format import PromptFormat
from flash.question import Question
from flash.registry import Standing
from ingest.compact import WIDEST
from regions.ephemeral import Fork


class QuestionList(NamedTuple):
    """What one frozen prefix says. ``asked``: the tokens that ask each numbered question, by its text."""

    prefix: tuple[int, ...]
    asked: Mapping[str, tuple[int, ...]]


class EnginePrefixes:
    """Makes prefixes, and remembers those that may still be read. Called from several threads.

    ``text_of`` gives a question as the model knows it. ``headers``, by session, say what compact lines mean
    (None: decimal lines). ``questions``: those to number where the model answers by number, None: none ever.
    ``several``: sessions of several symbols. ``rollups``: the longest rollup of sessions that have one, in
    tokens.
    """

    def __init__(
        self,
        prompt: PromptFormat,
        text_of: Callable[[Question], str],
        headers: Mapping[str, str | None],
        questions: Mapping[str, Sequence[Question]] | None,
        several: Iterable[str] = (),
        rollups: Mapping[str, int] | None = None,
    ) -> None:
        self._several = set(several)
        self._longest_rollups: dict[str, int] = {}
        self._rollups: dict[str, tuple[int, ...]] = {}
        self._prompt, self._text_of = prompt, text_of
        self._headers = dict(headers)
        self.numbers = questions is not None
        """Questions are numbered."""
        self._questions: dict[str, tuple[Question, ...]] = {}
        self._listings: defaultdict[str, deque[QuestionList]] = defaultdict(deque)  # oldest first
        self._lock = threading.Lock()
        for name, header in headers.items():
            asked, rollup = (questions or {}).get(name, ()), (rollups or {}).get(name, 0)
            self.add(name, header, asked, several=name in self._several, rollup=rollup)

    def add(
        self,
        session: str,
        header: str | None,
        questions: Sequence[Question],
        *,
        several: bool = False,
        rollup: int = 0,
    ) -> None:
        """Make the first prefix of a session. Raises ValueError, with nothing changed, as `frozen` does."""
        asked = tuple(questions) if self.numbers else ()  # the prefix of a later anchor has them, too
        with self._lock:
            if several:
                self._several.add(session)
            try:
                listing = self._made(session, header, asked, ())
            except ValueError:
                self._several.discard(session)
                raise
            self._headers[session], self._questions[session] = header, asked
            self._longest_rollups[session], self._rollups[session] = rollup, ()
            self._listings[session] = deque([listing])

    def restore(self, session: str, header: str | None, rollup: tuple[int, ...]) -> None:
        """Have a session begin with this header and rollup; its questions stay."""
        with self._lock:
            self._listings[session] = deque([self._made(session, header, self._questions[session], rollup)])
            self._headers[session], self._rollups[session] = header, rollup

    def parts(self, session: str) -> tuple[str | None, tuple[int, ...]]:
        """Header and rollup of the prefix that the session has or is about to get."""
        with self._lock:
            return self._headers[session], self._rollups[session]

    def remove(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._several.discard(session)
            self._longest_rollups.pop(session, None)
            for kept in (self._headers, self._questions, self._listings, self._rollups):
                kept.pop(session, None)

    def newest(self, session: str) -> tuple[int, ...]:
        """The prefix that the session has or is about to get."""
        return self._listings[session][-1].prefix

    def anchor(self, session: str, header: str, use: Callable[[tuple[int, ...]], None]) -> None:
        """Make a prefix with another ``header`` and call ``use`` with it, in the order of all changes.

        Nothing changes when ``use`` raises.
        """
        with self._lock:
            self._change(session, header, self._questions[session], self._rollups[session], use)

    def sum_up(self, session: str, rollup: tuple[int, ...], use: Callable[[tuple[int, ...]], None]) -> None:
        """As `anchor`, with another ``rollup``."""
        with self._lock:
            self._change(session, self._headers[session], self._questions[session], rollup, use)

    def number(
        self, session: str, questions: Sequence[Question], use: Callable[[tuple[int, ...]], None]
    ) -> None:
        """As `anchor`, with other ``questions``; does nothing where questions are not numbered.

        ``use`` is not called where the prefix stays the same.
        """
        with self._lock:
            texts = [list(map(self._text_of, each)) for each in (questions, self._questions[session])]
            if self.numbers and texts[0] != texts[1]:
                header, rollup = self._headers[session], self._rollups[session]
                self._change(session, header, tuple(questions), rollup, use)

    def longest(self, session: str, questions: Sequence[Question]) -> int:
        """Most tokens of a prefix with these ``questions``, whatever anchor and rollup the session gets."""
        header = None if self._headers[session] is None else WIDEST.header
        listing = self._made(session, header, tuple(questions) if self.numbers else (), ())
        return len(listing.prefix) + self._longest_rollups[session]

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
        rollup: tuple[int, ...],
        use: Callable[[tuple[int, ...]], None],
    ) -> None:
        listing = self._made(session, header, questions, rollup)
        use(listing.prefix)
        self._headers[session], self._questions[session] = header, questions
        self._rollups[session] = rollup
        if not self.numbers:
            self._listings[session].clear()  # no question is asked by number
        self._listings[session].append(listing)

    def _made(
        self, session: str, header: str | None, questions: tuple[Question, ...], rollup: tuple[int, ...]
    ) -> QuestionList:
        questions = tuple(each for each in questions if self._prompt.answers_by_number(self._text_of(each)))
        texts = list(map(self._text_of, questions))
        prefix = self._prompt.frozen(header, texts, symbols=session in self._several)
        asked = {question.text: tuple(self._prompt.numbered(n)) for n, question in enumerate(questions, 1)}
        return QuestionList(prefix + rollup, asked)
