"""`exact` sessions: what prefilling a window again costs, and what a question notices of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bench.engine.contenders import engine_for, model_of, read
from bench.engine.scenario import Size, make_scenario
from bench.engine.served import Served
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.run import Run
from engine.model.prompt import PromptFormat
from regions.tape import Retention, Tape
from scheduler.request import Request, RequestSpec
from scheduler.types import Limits, PriorityClass


@dataclass(frozen=True)
class Plan:
    """``records`` in the window, ``evicted`` before them; ``questions`` asked in each condition."""

    records: int = 256
    evicted: int = 55
    questions: int = 40


QUICK = Plan(20, 5, 4)


def measure(run: Run) -> Iterator[Figure]:
    """Questions through the real scheduler, alone and while the session's window is prefilled again in
    the background. *Bound*: 1.1 times the idle P99 plus the longest batch of the refresh.
    """
    plan, loaded = QUICK if run.quick else Plan(), model_of(run)[0]
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

    def prefill(done: Callable[[Request], None]) -> RequestSpec:
        return RequestSpec(PriorityClass.STREAM, "bench", tape.window, 0, done, reader=fresh)

    took = served.wait_for(prefill)
    served.scheduler.run_between(fresh.release)
    return took
