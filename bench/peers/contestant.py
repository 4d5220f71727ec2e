"""The process of one contestant: it answers the conductor's messages until its input ends.

Only the standard library (see `bench.peers.protocol`). An exception ends the process; its traceback is what
the conductor reports.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from typing import Protocol, TextIO

from bench.peers.protocol import Answered, Ask, Opened, Opening, Record, Took, Update, decode, send

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


def serve(contestant: Contestant, messages: TextIO, replies: TextIO) -> None:
    """Answer every line of ``messages``."""
    for line in messages:
        message = decode(line)
        if isinstance(message, Opening):
            try:
                reply: Opened | Took | Answered = Opened(contestant.open(message))
            except ModuleNotFoundError as error:
                reply = Opened(absent=f"no module {error.name} in {sys.prefix}")
        elif isinstance(message, Update):
            began = time.perf_counter_ns()
            done = contestant.read(message.records)
            reply = Took(time.perf_counter_ns() - began if done else None)
        else:
            reply = contestant.ask(message)
        send(replies, reply)


def main(target: str) -> None:
    """Serve the contestant of ``target``, "module:class", on the standard streams.

    What the engine prints goes to the log. The kernel ends this process if the conductor dies without ending
    it; a stopped process would not notice otherwise.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    serve(getattr(importlib.import_module(module), name)(), sys.stdin, replies)
