"""`exact` sessions: what prefilling a window again costs, and what a question notices of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.engine import models
from bench.engine.contenders import engine_for, read
from bench.engine.scenario import Size, make_scenario
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.run import Run
from engine.model.loading import LoadedModel
from engine.model.prompt import PromptFormat
from regions.tape import Retention, Tape
from scheduler.observer import Observer
from scheduler.request import Request
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


QUICK = Plan(20, 5, 4)


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
                cls=PriorityClass.SESSION,
                session="bench",
                prompt=self.question,
                max_tokens=1,
                on_done=lambda request: done.set(),
                open_reader=self.tape.fork,
            ),
            done,
        )
        return time.perf_counter_ns() - began

    def refresh(self) -> None:
        """Prefill the window again, and drop it."""
        done = threading.Event()
        fresh = self.tape.anew()
        self.submit(
            Request(
                cls=PriorityClass.STREAM,
                session="bench",
                prompt=self.tape.window,
                max_tokens=0,
                on_done=lambda request: done.set(),
                reader=fresh,
            ),
            done,
        )
        self.scheduler.run_between(fresh.release)


def measure(run: Run) -> Iterator[Figure]:
    """Questions through the real scheduler, alone and while the session's window is prefilled again in the
    background. *Bound*: 1.1 times the idle P99 plus the longest batch of the refresh.
    """
    plan = QUICK if run.quick else Plan()
    session = Session(plan, models.of(run)[0])
    try:
        idle = _asked(session, plan.questions)
        began = time.perf_counter_ns()
        session.refresh()
        alone = time.perf_counter_ns() - began
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
    setting: Setting = {
        "tokens in the window": len(session.tape.window), "tokens a chunk": session.limits.chunk_min,
    }  # fmt: skip
    yield from figures(idle, during, session.longest.ns, setting)
    yield Figure("one refresh alone", alone / 1e6, "ms", "", setting)
    yield Figure("refreshes that ended meanwhile", count[0], "", "", setting)


def figures(
    idle: Sequence[int], during: Sequence[int], batch_ns: float, setting: Setting
) -> Iterator[Figure]:
    """Questions during refreshes beside idle ones (ns), and their P99 beside its bound."""
    yield from latency("question during refreshes", during, setting, "", "idle", idle, paired=False)
    p99 = quantiles(during, 0.99)[0] / 1e6
    bound = (1.1 * quantiles(idle, 0.99)[0] + batch_ns) / 1e6
    yield Figure("question during refreshes P99", p99, "ms", "", setting, "bound", bound, goal=Goal(1.0))
    yield Figure("longest batch of a refresh", batch_ns / 1e6, "ms", "", setting)


def _asked(session: Session, questions: int) -> list[int]:
    session.ask()
    pause = random.Random(5)
    times = []
    for _ in range(questions):
        time.sleep(pause.uniform(0.0, 0.1))  # so that a question comes at any moment of a batch
        times.append(session.ask())
    return times
