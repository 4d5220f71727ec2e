"""Ad hoc questions that come often: which become standing questions, and for how long.

A question of a session becomes standing with the `asks`-th ask within the window, and ends when
the last two windows had fewer. What is remembered is bounded: the questions
of each session that were asked last.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from flash.question import Question

PREFIX = "asked-"
"""How the names of such questions begin."""
REMEMBERED = 256
"""Questions of a session whose asks are counted."""


def named(question: Question) -> Question:
    """An ad hoc question as a standing one, which is not published; its name follows from its hash."""
    return replace(question, name=f"{PREFIX}{question.hash[:12]}", publish_when="never")


@dataclass
class _Asked:
    """A question's newest asks, ns: at most as many as make it standing."""

    question: Question
    at: deque[int]
    standing: bool = False


@dataclass
class _Session:
    asked: OrderedDict[str, _Asked] = field(default_factory=OrderedDict)

    @property
    def standing(self) -> list[_Asked]:
        """Those that stand."""
        return [each for each in self.asked.values() if each.standing]


def is_frequent(question: Question) -> bool:
    """Whether a standing question is one for as long as it comes often."""
    return question.name.startswith(PREFIX) and question.publish_when == "never"


class FrequentQuestions:
    """Counts asks by session and question. ``clock``: monotonic ns; ``most``: that stand in a session."""

    def __init__(self, asks: int, window_ns: int, most: int, clock: Callable[[], int]) -> None:
        self._asks, self._window_ns, self._most, self._clock = asks, window_ns, most, clock
        self._sessions: dict[str, _Session] = {}

    def ask(self, session: str, question: Question) -> Question | None:
        """A question was asked; the question to let stand from now on, if it is one."""
        found, key = self._sessions.setdefault(session, _Session()), question.hash
        asked = found.asked.get(key)
        if asked is None:
            asked = found.asked[key] = _Asked(named(question), deque(maxlen=self._asks))
        found.asked.move_to_end(key)
        now = self._clock()
        asked.at.append(now)
        if len(found.asked) > REMEMBERED:
            del found.asked[next(key for key, each in found.asked.items() if not each.standing)]
        is_often = len(asked.at) == self._asks and asked.at[0] > now - self._window_ns
        if asked.standing or not is_often or len(found.standing) >= self._most:
            return None
        asked.standing = True
        return asked.question

    def rarer(self) -> list[tuple[str, Question]]:
        """Sessions and questions that are asked too seldom by now, and stand no longer."""
        since = self._clock() - 2 * self._window_ns
        found = []
        for name, session in self._sessions.items():
            for each in session.standing:
                if each.at[0] <= since:
                    each.standing = False
                    found.append((name, each.question))
        return found

    def standing(self) -> list[tuple[str, Question]]:
        """Sessions and questions that stand."""
        return [(name, e.question) for name, session in self._sessions.items() for e in session.standing]

    def drop(self, session: str, question: Question) -> None:
        """A question does not stand after all."""
        found = self._sessions.get(session, _Session())
        if (asked := found.asked.get(question.hash)) is not None:
            asked.standing = False
            asked.at.clear()

    def keep(self, sessions: Container[str]) -> None:
        """Forget all other sessions."""
        self._sessions = {name: each for name, each in self._sessions.items() if name in sessions}
