"""Times calls beside each other, on a machine that may be busy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Call = Callable[[], object]
Measure = Callable[[Sequence[Call]], Sequence[float]]
"""Seconds of each call; they are to be taken alternately, so that all meet the same load."""


@dataclass(frozen=True)
class Stopwatch:
    """Takes the least seconds of each call, over rounds that run each of them once.

    The first round does not count. At least ``rounds`` of them follow, and more, up to ``max_rounds``, as
    long as all took less than ``budget_s`` of wall time.

    It is CPU time of this thread, which takes its part of every product: other processes then count for less,
    and the least of several rounds is what a call takes undisturbed.
    """

    rounds: int
    max_rounds: int
    budget_s: float

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        """Return the least seconds of each of ``calls``."""
        best = [float("inf")] * len(calls)
        began = time.monotonic()
        for number in range(self.max_rounds + 1):
            if number > self.rounds and time.monotonic() - began > self.budget_s:
                break
            for at, call in enumerate(calls):
                start = time.thread_time_ns()
                call()
                if number:
                    best[at] = min(best[at], (time.thread_time_ns() - start) / 1e9)
        return best
