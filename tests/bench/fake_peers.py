"""Contestants for tests: they answer with what they were told, die, or leave a process behind."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain

from bench.peers.contestant import Clock
from bench.peers.protocol import Answered, Ask, Opening, Record


class Echo:
    """Answers a question with the tokens it has seen of its session, and the question's last."""

    def open(self, opening: Opening) -> str:
        print("printed, not a reply")
        self.seen = [len(opening.frozen)] * opening.sessions
        return f"echo, threads {os.environ.get('OMP_NUM_THREADS')}"

    def read(self, records: list[list[Record]]) -> bool:
        for session, own in enumerate(records):
            self.seen[session] += len(list(chain.from_iterable(own)))
        return True

    def ask(self, ask: Ask) -> Answered:
        clock = Clock()
        clock.first()
        answers = [[self.seen[session], question[-1]][: ask.tokens] for session, question in ask.questions]
        return clock.answered(answers, [1.0] * len(answers))


class Lazy(Echo):
    """Reads only when asked."""

    def read(self, records: list[list[Record]]) -> bool:
        super().read(records)
        return False


class Cold(Echo):
    """Its first answers, one of each length, are others."""

    asked = 0

    def ask(self, ask: Ask) -> Answered:
        self.asked += 1
        answered = super().ask(ask)
        return replace(answered, answers=[[0] * ask.tokens]) if self.asked < 3 else answered


class Dies(Echo):
    """Fails at its second update, and leaves a process behind that holds its output open."""

    updates = 0

    def read(self, records: list[list[Record]]) -> bool:
        self.updates += 1
        if self.updates == 2:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            raise RuntimeError("the engine is gone")
        return super().read(records)


class Absent(Echo):
    """Its engine is not installed."""

    def open(self, opening: Opening) -> str:
        import an_engine_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

        return ""


class Slow(Echo):
    """Never answers."""

    def ask(self, ask: Ask) -> Answered:
        time.sleep(600)
        raise AssertionError
