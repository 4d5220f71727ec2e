"""The newest answers by (session, question hash) and data version (*Attention Once* equation 10).

`when` calls back as soon as an answer is new enough, so an event loop waits without a thread. Safe from any
thread.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[str, str]


class AnswerCache(Generic[T]):
    """Keeps each question's answers to the last `keep` versions. Raises ValueError for `keep` below 1."""

    def __init__(self, keep: int = 16) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._keep = keep
        self._lock = threading.Lock()
        self._answers: dict[Key, dict[int, T]] = {}
        self._waiting: defaultdict[Key, dict[object, tuple[int, Callable[[T], None]]]] = defaultdict(dict)

    def put(self, session: str, question_hash: str, version: int, answer: T) -> None:
        """Store an answer and call those who wait for this version or an older one, on this thread."""
        key = (session, question_hash)
        with self._lock:
            answers = self._answers.setdefault(key, {})
            answers[version] = answer
            for old in sorted(answers)[: -self._keep]:
                del answers[old]
            waiting = self._waiting.pop(key, {})
            later = {ticket: item for ticket, item in waiting.items() if item[0] > version}
            if later:
                self._waiting[key] = later
        for ticket, (_, call) in waiting.items():
            if ticket not in later:
                call(answer)

    def latest(self, session: str, question_hash: str) -> T | None:
        """The answer of the highest version."""
        with self._lock:
            return self._latest((session, question_hash), 0)

    def when(
        self, session: str, question_hash: str, version: int, call: Callable[[T], None]
    ) -> Callable[[], None]:
        """Call once with an answer of at least `version`: now if there is one, else from `put`.

        Returns a function that gives up waiting; calling it late does nothing.
        """
        key, ticket = (session, question_hash), object()
        with self._lock:
            answer = self._latest(key, version)
            if answer is None:
                self._waiting[key][ticket] = (version, call)
        if answer is not None:
            call(answer)
        return lambda: self._give_up(key, ticket)

    def _latest(self, key: Key, least: int) -> T | None:
        answers = self._answers.get(key)
        newest = max(answers) if answers else None
        return answers[newest] if answers and newest is not None and newest >= least else None

    def _give_up(self, key: Key, ticket: object) -> None:
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.pop(ticket, None)
                if not waiting:
                    del self._waiting[key]
