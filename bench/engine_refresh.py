"""`exact` sessions: what prefilling a window anew costs, and what a question notices of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.contenders import engine_for, read
from bench.engine_result import Refresh
from bench.figures import Latency, latency
from bench.scenario import Size, make_scenario
from engine.model.loading import LoadedModel
from engine.model.prompt import PromptFormat
from regions.tape import Retention, Tape
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.types import Limits, PriorityClass
from scheduler.worker import Worker

_WAIT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """``records`` in the window, ``evicted`` before them; ``questions`` asked in each condition."""

    records: int = 256
    evicted: int = 55
    questions: int = 40


class Longest(Observer):
    """Keeps the longest batch that only prefilled, ns."""

    def __init__(self) -> None:
        self.ns = 0

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, ns: int) -> None:
        """A pass was run."""
        if not tokens.get(PriorityClass.SESSION):
            self.ns = max(self.ns, ns)


class Session:
    """One session behind the real scheduler and its worker thread."""

    def __init__(self, plan: Plan, loaded: LoadedModel) -> None:
        prompt = PromptFormat.of(loaded.tokenizer)
        scenario = make_scenario(prompt, Size(plan.records + plan.evicted, 0, 0))
        engine = engine_for(loaded, 3 * scenario.tokens + 4096, frame_limit=8192)
        self.question = scenario.question
        self.tape: Tape = engine.open_tape("bench", scenario.frozen, Retention(6144, plan.records))
        for first in range(0, len(scenario.first), 55):
            read(engine, self.tape, scenario.first[first : first + 55])
        self.limits = Limits()
        self.longest = Longest()
        self.scheduler = Scheduler(engine, engine.pool, self.limits, time.monotonic_ns, self.longest)
        self.worker = Worker(self.scheduler)
        self.worker.start()

    def submit(self, request: Request, done: threading.Event) -> None:
        """Queue ``request``, whose `on_done` sets ``done``."""
        self.scheduler.submit(request)
        if not done.wait(_WAIT_S):
            raise RuntimeError("the scheduler did not answer")

    def ask(self) -> int:
        """ns from asking to the answer token."""
        done = threading.Event()
        began = time.perf_counter_ns()
        self.submit(
            Request(
                RequestSpec(
                    cls=PriorityClass.SESSION,
                    session="bench",
                    prompt=self.question,
                    max_tokens=1,
                    on_done=lambda request: done.set(),
                    tape=self.tape,
                )
            ),
            done,
        )
        return time.perf_counter_ns() - began

    def refresh(self) -> None:
        """Prefill the window anew, and drop it."""
        done = threading.Event()
        fresh = self.tape.fresh_window()
        self.submit(
            Request(
                RequestSpec(
                    cls=PriorityClass.STREAM,
                    session="bench",
                    prompt=self.tape.window,
                    max_tokens=0,
                    on_done=lambda request: done.set(),
                    reader=fresh,
                )
            ),
            done,
        )
        self.scheduler.run_between(fresh.release)


def measure(plan: Plan, loaded: LoadedModel) -> Refresh:
    """Questions with pauses of random length, first alone, then while one refresh follows another."""
    session = Session(plan, loaded)
    try:
        idle = _asked(session, plan.questions)
        began = time.perf_counter()
        session.refresh()
        alone = time.perf_counter() - began
        stop, count = threading.Event(), [0]

        def keep_refreshing() -> None:
            while not stop.is_set():
                session.refresh()
                count[0] += 1

        background = threading.Thread(target=keep_refreshing)
        background.start()
        during = _asked(session, plan.questions)
        stop.set()
        background.join()
    finally:
        session.worker.stop(1.0)
        session.tape.release()
    return Refresh(
        len(session.tape.window),
        session.limits.chunk_min,
        1e3 * alone,
        session.longest.ns / 1e6,
        idle,
        during,
        count[0],
    )


def _asked(session: Session, questions: int) -> Latency:
    session.ask()
    pause = random.Random(5)
    times = []
    for _ in range(questions):
        time.sleep(pause.uniform(0.0, 0.1))  # so that a question comes at any moment of a batch
        times.append(session.ask())
    return latency(times)
