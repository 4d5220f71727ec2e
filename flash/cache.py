"""The newest answers by (session, question hash), each of a data version (*Attention Once* equation 10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[str, str]


class AnswerCache(Generic[T]):
    """Keeps every question's newest answer; `when` calls back as soon as one is new enough. One thread."""

    def __init__(self) -> None:
        self._answers: dict[Key, tuple[int, T]] = {}
        self._waiting: defaultdict[Key, dict[object, tuple[int, Callable[[T], None]]]] = defaultdict(dict)

    def put(self, session: str, question_hash: str, version: int, answer: T) -> None:
        """Store an answer, and call those who wait for this version or an older one."""
        key = (session, question_hash)
        if version >= self._version(key):
            self._answers[key] = version, answer
        waiting = self._waiting.get(key, {})
        for ticket, (least, call) in list(waiting.items()):
            if least <= version:
                del waiting[ticket]
                call(answer)

    def latest(self, session: str, question_hash: str) -> T | None:
        """The answer of the highest version."""
        found = self._answers.get((session, question_hash))
        return None if found is None else found[1]

    def when(
        self, session: str, question_hash: str, version: int, call: Callable[[T], None]
    ) -> Callable[[], None]:
        """Call once with an answer of at least `version`: now if there is one, else from `put`.

        Returns a function that gives up waiting; calling it late does nothing.
        """
        key, ticket = (session, question_hash), object()
        if self._version(key) >= version:
            call(self._answers[key][1])
        else:
            self._waiting[key][ticket] = (version, call)
        return lambda: self._give_up(key, ticket)

    def _version(self, key: Key) -> int:
        return self._answers[key][0] if key in self._answers else -1

    def _give_up(self, key: Key, ticket: object) -> None:
        self._waiting[key].pop(ticket, None)
