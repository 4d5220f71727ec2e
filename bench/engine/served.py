"""An engine behind the daemon's scheduler and worker; the cost of refreshing an `exact` session there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from bench.engine.contenders import engine_for, model_of, read
from bench.engine.scenario import Size, make_scenario
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.run import SuiteRun
from engine.engine import Engine
from engine.model.prompt import PromptFormat
from regions.tape import Retention, Tape
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.types import Limits, PriorityClass
from scheduler.worker import Worker

_WAIT_S = 120.0


class PassLog(Observer):
    """Logs the duration (ns) of each pass without the ``asked`` classes, and counts all tokens by class."""

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
        self.passes = PassLog(asked)
        self.scheduler = Scheduler(engine, engine.pool, limits, time.monotonic_ns, self.passes)
        self.worker = Worker(self.scheduler)

    def wait_for(self, make: Callable[..., RequestSpec]) -> int:
        """ns from submitting what ``make`` returns, given its `on_done`, to its end. Raises RuntimeError."""
        done = threading.Event()
        request = Request(make(on_done=lambda request: done.set()))
        began = time.perf_counter_ns()
        self.scheduler.submit(request)
        if not done.wait(_WAIT_S) or request.error is not None:
            raise RuntimeError(f"no answer: {request.error or 'the scheduler makes no progress'}")
        return time.perf_counter_ns() - began

    def ask_all(self, tape: Tape, question: tuple[int, ...], n: int) -> dict[PriorityClass, list[int]]:
        """ns to the answer token of ``n`` questions of each class in turn, after one that does not count."""
        pause = random.Random(5)
        times: dict[PriorityClass, list[int]] = {cls: [] for cls in self.passes.asked}
        for _, cls in product(range(n + 1), self.passes.asked):
            time.sleep(pause.uniform(0.0, 0.1))  # so that questions arrive at any moment of a pass
            asked = partial(RequestSpec, cls, "asked", question, 1, tape=tape)
            times[cls].append(self.wait_for(asked))
        return {cls: taken[1:] for cls, taken in times.items()}


@dataclass(frozen=True)
class RefreshPlan:
    """``records`` in the window, ``evicted`` before them; ``questions`` asked in each condition."""

    records: int = 256
    evicted: int = 55
    questions: int = 40


QUICK = RefreshPlan(20, 5, 4)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Questions through the real scheduler, alone and while the session's window is prefilled again in
    the background. *Bound*: 1.1 times the idle P99 plus the longest batch of the refresh.
    """
    plan, loaded = QUICK if run.quick else RefreshPlan(), model_of(run)[0]
    scenario = make_scenario(PromptFormat.of(loaded.tokenizer), Size(plan.records + plan.evicted, 0, 0))
    engine = engine_for(loaded, 3 * scenario.tokens + 4096, frame_limit=8192)
    tape = engine.open_tape("bench", scenario.frozen, Retention(6144, plan.records))
    for first in range(0, len(scenario.first), 55):
        read(engine, tape, scenario.first[first : first + 55])
    served = Served(engine, Limits(), PriorityClass.SESSION)
    served.worker.start()
    ended: list[int] = []
    stop = threading.Event()

    def refresh_again() -> None:
        while not stop.is_set():
            ended.append(refresh(served, tape))

    background = threading.Thread(target=refresh_again)
    try:
        idle = served.ask_all(tape, scenario.question, plan.questions)
        alone = refresh(served, tape)
        background.start()
        during = served.ask_all(tape, scenario.question, plan.questions)
        stop.set()
        background.join()
    finally:
        served.worker.stop(1.0)
        tape.release()
    setting: Setting = {"tokens in the window": len(tape.window), "tokens a chunk": served.limits.chunk_min}
    (idle_ns,), (during_ns,), batch_ns = idle.values(), during.values(), max(served.passes.ns)
    name = "question during refreshes"
    yield from latency(name, during_ns, setting, "", "idle", idle_ns, paired=False)
    p99 = quantiles(during_ns, 0.99)[0] / 1e6
    bound = (1.1 * quantiles(idle_ns, 0.99)[0] + batch_ns) / 1e6
    figure = partial(Figure, setting=setting)
    yield figure(f"{name} P99", p99, "ms", against="bound", reference=bound, goal=Goal(1.0))
    yield figure("longest batch of a refresh", batch_ns / 1e6, "ms")
    yield figure("one refresh alone", alone / 1e6, "ms")
    yield figure("refreshes that ended meanwhile", len(ended))


def refresh(served: Served, tape: Tape) -> int:
    """Prefill the window again, and drop it; the ns it took."""
    fresh = tape.fresh_window()
    took = served.wait_for(partial(RequestSpec, PriorityClass.STREAM, "bench", tape.window, 0, reader=fresh))
    served.scheduler.run_between(fresh.release)
    return took
