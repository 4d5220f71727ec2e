"""Standing questions and asks while a tape and prompts flood the real engine behind the real scheduler.

One session is asked; another one's tape always has a backlog, and so many prompts are always being
computed. Each question comes at a random moment of a pass. It may wait for the pass under way, and its own
pass may hold other work besides.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.contenders import engine_for, read
from bench.figures import latency
from bench.scenario import Size, make_scenario
from bench.scheduler_result import Asked, Flood
from engine.device import in_own_thread
from engine.model.loading import LoadedModel
from engine.model.prompt import PromptFormat
from regions.tape import Retention
from scheduler.observer import Observer
from scheduler.request import Failure, Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.tapes import Record, Records
from scheduler.types import Limits, PriorityClass, Tape
from scheduler.worker import Worker

_WAIT_S = 120.0
_ASKED = (PriorityClass.FLASH, PriorityClass.SESSION)


@dataclass(frozen=True)
class Sizes:
    """``records`` in either window; ``questions`` of either class in each condition.

    ``backlog``: bars that always wait; ``prompts`` of ``prompt_tokens`` under way, each with an answer of
    ``answer`` tokens.
    """

    records: int = 256
    questions: int = 100
    backlog: int = 256
    prompts: int = 16
    prompt_tokens: int = 1024
    answer: int = 8
    batch_tokens: int = 1024


class Passes(Observer):
    """Keeps how long each pass took that had none of the asked classes, ns."""

    def __init__(self) -> None:
        self.ns: list[int] = []
        self.tokens: dict[PriorityClass, int] = dict.fromkeys(PriorityClass, 0)

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A pass was run."""
        for cls, n in tokens.items():
            self.tokens[cls] += n
        if not any(tokens.get(cls) for cls in _ASKED):
            self.ns.append(forward_ns)


class World:
    """Two sessions and their scheduler; the flood is let in with `flood`."""

    def __init__(self, sizes: Sizes, loaded: LoadedModel) -> None:
        self.sizes = sizes
        scenario = make_scenario(PromptFormat.of(loaded.tokenizer), Size(sizes.records, 0, 0))
        private = sizes.prompts * (sizes.prompt_tokens + sizes.answer)
        self.engine = engine_for(loaded, 4 * scenario.tokens + 2 * private + 4096, frame_limit=8192)
        self.bars, self.question = scenario.first, scenario.question
        retention = Retention(scenario.tokens, sizes.records)
        self.asked = self.engine.open_tape("asked", scenario.frozen, retention)
        self.flooded = self.engine.open_tape("flooded", scenario.frozen, retention)
        read(self.engine, self.asked, self.bars)
        self.passes = Passes()
        limits = Limits(max_batch_tokens=sizes.batch_tokens)
        self.scheduler = Scheduler(self.engine, self.engine.pool, limits, time.monotonic_ns, self.passes)
        self.scheduler.subscribe(self)
        self.worker = Worker(self.scheduler)
        self.flowing = False
        self._rng = random.Random(3)

    def flood(self) -> None:
        """From here on there is always more to read, and prompts to compute."""
        self.flowing = True
        for _ in range(self.sizes.prompts):
            self._prompt()
        self.scheduler.append(self.flooded, self._records(self.sizes.backlog))

    def ask(self, cls: PriorityClass) -> int:
        """ns from asking to the answer token. Raises RuntimeError when there is none."""
        done = threading.Event()
        request = Request(
            RequestSpec(cls, "asked", self.question, 1, lambda request: done.set(), tape=self.asked)
        )
        began = time.perf_counter_ns()
        self.scheduler.submit(request)
        if not done.wait(_WAIT_S) or request.error is not None:
            raise RuntimeError(f"no answer: {request.error or 'the scheduler stands still'}")
        return time.perf_counter_ns() - began

    def stop(self) -> None:
        """End what is under way and give everything back."""
        self.flowing = False
        self.worker.stop(1.0)
        self.asked.release()
        self.flooded.release()

    def on_commit(self, tape: Tape, version: int, records: Records) -> None:
        """What was read is replaced, so that as much waits as before."""
        if self.flowing:
            self.scheduler.append(self.flooded, self._records(len(records)))

    def on_drop(self, tape: Tape, records: Records, failure: Failure) -> None:
        """The engine is stopping, or the run is not what it should be, which the asks will show."""

    def _prompt(self) -> None:
        vocabulary = self.engine.model.model.config.vocab_size
        tokens = [self._rng.randrange(vocabulary) for _ in range(self.sizes.prompt_tokens)]
        self.scheduler.submit(
            Request(
                RequestSpec(
                    PriorityClass.POOL,
                    "",
                    tokens,
                    self.sizes.answer,
                    self._prompted,
                    open_prompt=lambda: self.engine.open_stream(),
                )
            )
        )

    def _prompted(self, request: Request) -> None:
        if self.flowing:
            self._prompt()

    def _records(self, n: int) -> list[Record[None]]:
        return [Record(self._rng.choice(self.bars)) for _ in range(n)]


def run(sizes: Sizes, loaded: LoadedModel) -> Flood:
    """Questions with pauses of random length, first alone, then in the flood."""
    world = in_own_thread(lambda: World(sizes, loaded))
    try:
        world.worker.start()
        idle = _ask(world)
        world.flood()
        while len(world.passes.ns) < 3:
            time.sleep(0.01)
        world.passes.ns.clear()
        read_before = dict(world.passes.tokens)
        began = time.perf_counter()
        flooded = _ask(world)
        seconds = time.perf_counter() - began
        passes = latency(list(world.passes.ns))
    finally:
        world.stop()
    return Flood(
        asked=[Asked(cls.name, latency(idle[cls]), latency(flooded[cls]), passes.p99_ms) for cls in _ASKED],
        passes=passes,
        batch_tokens=sizes.batch_tokens,
        prompts=sizes.prompts,
        backlog=sizes.backlog,
        tokens_a_second={
            cls.name: (world.passes.tokens[cls] - read_before[cls]) / seconds for cls in PriorityClass
        },
    )


def _ask(world: World) -> dict[PriorityClass, list[int]]:
    """ns of each question, by class in turn."""
    pause = random.Random(5)
    times: dict[PriorityClass, list[int]] = {cls: [] for cls in _ASKED}
    for cls in _ASKED:
        world.ask(cls)
    for _ in range(world.sizes.questions):
        for cls in _ASKED:
            time.sleep(pause.uniform(0.0, 0.1))  # so that a question comes at any moment of a pass
            times[cls].append(world.ask(cls))
    return times
