"""An engine behind the daemon's scheduler and worker thread, and questions to it at random moments."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

from engine.engine import Engine
from regions.tape import Tape
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.types import Limits, PriorityClass
from scheduler.worker import Worker

_WAIT_S = 120.0


class Passes(Observer):
    """Keeps how long each pass took that had none of the ``asked`` classes, ns, and all tokens by class."""

    def __init__(self, asked: tuple[PriorityClass, ...]) -> None:
        self.asked, self.ns = asked, list[int]()
        self.tokens = dict.fromkeys(PriorityClass, 0)

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A pass was run."""
        for cls, n in tokens.items():
            self.tokens[cls] += n
        if not any(tokens.get(cls) for cls in self.asked):
            self.ns.append(forward_ns)


class Served:
    """Asks questions of the ``asked`` classes. The caller starts and stops the ``worker``."""

    def __init__(self, engine: Engine, limits: Limits, *asked: PriorityClass) -> None:
        self.engine, self.limits = engine, limits
        self.passes = Passes(asked)
        self.scheduler = Scheduler(engine, engine.pool, limits, time.monotonic_ns, self.passes)
        self.worker = Worker(self.scheduler)

    def wait_for(self, make: Callable[[Callable[[Request], None]], RequestSpec]) -> int:
        """ns from submitting what ``make`` returns, given its `on_done`, to its end. Raises RuntimeError."""
        done = threading.Event()
        request = Request(make(lambda request: done.set()))
        began = time.perf_counter_ns()
        self.scheduler.submit(request)
        if not done.wait(_WAIT_S) or request.error is not None:
            raise RuntimeError(f"no answer: {request.error or 'the scheduler stands still'}")
        return time.perf_counter_ns() - began

    def ask(self, cls: PriorityClass, tape: Tape, question: tuple[int, ...]) -> int:
        """ns from asking to the answer token."""
        return self.wait_for(lambda done: RequestSpec(cls, "asked", question, 1, done, tape=tape))

    def ask_all(self, tape: Tape, question: tuple[int, ...], n: int) -> dict[PriorityClass, list[int]]:
        """ns of ``n`` questions of each class in turn, after one that does not count."""
        pause = random.Random(5)
        for cls in self.passes.asked:
            self.ask(cls, tape, question)
        times: dict[PriorityClass, list[int]] = {cls: [] for cls in self.passes.asked}
        for _ in range(n):
            for cls in self.passes.asked:
                time.sleep(pause.uniform(0.0, 0.1))  # so that a question comes at any moment of a pass
                times[cls].append(self.ask(cls, tape, question))
        return times
