"""The process of one contestant: it answers the conductor's messages until their pipe ends.

Only the standard library (see `bench.peers.protocol`). An exception ends the process; its traceback is what
the conductor reports.
"""

import ctypes
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Protocol

from bench.peers.protocol import Answered, Ask, Message, Opened, Opening, Record, Reply, Took, Update

_PR_SET_PDEATHSIG = 1


class Contestant(Protocol):
    """An engine with open sessions."""

    def open(self, opening: Opening) -> str:
        """Load the model and open the sessions; returns the engine's name and versions.

        Raises ModuleNotFoundError where it cannot take part.
        """

    def read(self, records: list[list[Record]]) -> bool:
        """New bars of every session; False where the engine does nothing before a question comes."""

    def ask(self, ask: Ask) -> Answered:
        """Answer questions that come at once; the sessions stay as they were."""


class Clock:
    """Notes when every question has its first token."""

    def __init__(self) -> None:
        self._began = time.perf_counter_ns()
        self._first: int | None = None

    def first(self) -> None:
        """All questions have their first token; later calls do not count."""
        if self._first is None:
            self._first = time.perf_counter_ns() - self._began

    def answered(self, answers: list[list[int]], leads: list[float] | None = None) -> Answered:
        """All answers are complete now. Raises AssertionError before `first`."""
        total = time.perf_counter_ns() - self._began
        assert self._first is not None
        return Answered(answers, self._first, total, leads)


class OneByOne:
    """Sessions and questions take turns; of several, each only has one token."""

    def answer(self, session: int, question: list[int], tokens: int) -> Iterator[tuple[int, float]]:
        """Greedy tokens of an answer, and each one's lead over the second best; then the question is gone."""
        raise NotImplementedError

    def ask(self, ask: Ask) -> Answered:
        """One question after the other."""
        clock, answers, leads = Clock(), list[list[int]](), list[float]()
        for session, question in ask.questions:
            answer = list[int]()
            for token, lead in self.answer(session, question, ask.tokens):
                if not answer:
                    leads.append(lead)
                    if len(leads) == len(ask.questions):
                        clock.first()
                answer.append(token)
            answers.append(answer)
        return clock.answered(answers, leads)


def reply_to(contestant: Contestant, message: Message) -> Reply:
    """What the contestant does and says."""
    if isinstance(message, Opening):
        try:
            return Opened(contestant.open(message))
        except ModuleNotFoundError as error:
            return Opened(absent=f"no module {error.name} in {sys.prefix}")
    if isinstance(message, Update):
        began = time.perf_counter_ns()
        done = contestant.read(message.records)
        return Took(time.perf_counter_ns() - began if done else None)
    return contestant.ask(message)


def main(target: str, pipe: int) -> None:
    """Serve the contestant of ``target``, "module:class", on the pipe of this descriptor.

    The kernel ends this process if the conductor dies without ending it; a stopped process would not notice
    otherwise.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    contestant = resolve_name(target)()
    with Connection(pipe) as conductor, suppress(EOFError):
        while True:
            conductor.send(reply_to(contestant, conductor.recv()))
