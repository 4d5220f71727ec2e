"""Standing questions and asks while a tape and prompts flood the real engine behind the real scheduler.

Each question arrives at a random moment of a pass. It may wait for the current pass, and its own pass may
hold other work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from bench.engine.contenders import embedded, engine_for, read
from bench.engine.scenario import Size, make_scenario
from bench.engine.served import Served
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.run import SuiteRun
from engine.device import in_own_thread
from engine.model.loading import LoadedModel
from engine.model.prompt import PromptFormat
from regions.tape import Retention, Tape
from scheduler.request import Request, RequestSpec
from scheduler.tapes import TapeItem, TapeItems
from scheduler.types import Limits, PriorityClass

_ASKED = (PriorityClass.FLASH, PriorityClass.SESSION)


@dataclass(frozen=True)
class FloodSizes:
    """``records`` in either window; ``questions`` of either class in each condition.

    ``backlog``: bars that always wait; ``prompts`` of ``prompt_tokens`` in progress, each with an answer of
    ``answer`` tokens.
    """

    records: int = 256
    questions: int = 100
    backlog: int = 256
    prompts: int = 16
    prompt_tokens: int = 1024
    answer: int = 8
    batch_tokens: int = 1024


class FloodWorld(Served):
    """Two sessions; `flood` starts the flood."""

    def __init__(self, sizes: FloodSizes, loaded: LoadedModel) -> None:
        scenario = make_scenario(PromptFormat.of(loaded.tokenizer), Size(sizes.records, 0, 0))
        private = sizes.prompts * (sizes.prompt_tokens + sizes.answer)
        engine = engine_for(loaded, 4 * scenario.tokens + 2 * private + 4096, frame_limit=8192)
        super().__init__(engine, Limits(max_batch_tokens=sizes.batch_tokens), *_ASKED)
        self.sizes, self.bars, self.question = sizes, scenario.first, scenario.question
        retention = Retention(scenario.tokens, sizes.records)
        self.asked = engine.open_tape("asked", scenario.frozen, retention)
        self.flooded = engine.open_tape("flooded", scenario.frozen, retention)
        read(engine, self.asked, self.bars)
        self.scheduler.subscribe(self.on_commit)
        self.flowing = False
        self._rng = random.Random(3)

    def flood(self) -> None:
        """From here on there is always more to read, and prompts to compute."""
        self.flowing = True
        for _ in range(self.sizes.prompts):
            self._prompt()
        self.scheduler.append(self.flooded, self._records(self.sizes.backlog))

    def stop(self) -> None:
        """End the current work and release everything."""
        self.flowing = False
        self.worker.stop(1.0)
        self.asked.release()
        self.flooded.release()

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Replace what was read, so that the backlog stays constant."""
        if self.flowing:
            self.scheduler.append(self.flooded, self._records(len(records)))

    def _prompt(self) -> None:
        vocabulary = self.engine.model.model.config.vocab_size
        tokens = [self._rng.randrange(vocabulary) for _ in range(self.sizes.prompt_tokens)]
        of = partial(RequestSpec, PriorityClass.POOL, "", open_prompt=self.engine.open_prompt)
        self.scheduler.submit(Request(of(tokens, self.sizes.answer, self._prompted)))

    def _prompted(self, request: Request) -> None:
        if self.flowing:
            self._prompt()

    def _records(self, n: int) -> list[TapeItem[None]]:
        return [TapeItem(self._rng.choice(self.bars)) for _ in range(n)]


QUICK = FloodSizes(
    records=12, questions=3, backlog=12, prompts=3, prompt_tokens=64, answer=2, batch_tokens=128
)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Standing questions (FLASH) and asks (SESSION) of one session, alone and while another session's
    tape (STREAM) and prompts (POOL) always have more, on the embedded model. *Bound*: 1.5 times the idle
    P99 plus the P99 of a pass of the flood without a question. What each class computed meanwhile stands
    below: STREAM, too, waits for POOL and the questions.
    """
    sizes, loaded = QUICK if run.quick else FloodSizes(), embedded(run)
    world = in_own_thread(lambda: FloodWorld(sizes, loaded))
    try:
        world.worker.start()
        idle = world.ask_all(world.asked, world.question, sizes.questions)
        world.flood()
        while len(world.passes.ns) < 3:
            time.sleep(0.01)
        world.passes.ns.clear()
        read_before = dict(world.passes.tokens)
        began = time.perf_counter()
        flooded = world.ask_all(world.asked, world.question, sizes.questions)
        seconds = time.perf_counter() - began
        passes = list(world.passes.ns)
    finally:
        world.stop()
    setting: Setting = {
        "prompts waiting": sizes.prompts, "bars waiting": sizes.backlog, "tokens a pass": sizes.batch_tokens,
    }  # fmt: skip
    batch = quantiles(passes, 0.99)[0]
    for cls in _ASKED:
        mine = {**setting, "class": cls.name}
        yield from latency("in the flood", flooded[cls], mine, "", "idle", idle[cls], paired=False)
        yield bounded(quantiles(flooded[cls], 0.99)[0], quantiles(idle[cls], 0.99)[0], batch, mine)
    yield from latency("pass without a question", passes, setting, "Passes of the flood")
    computed = {cls: world.passes.tokens[cls] - read_before[cls] for cls in PriorityClass}
    for cls, tokens in computed.items():
        figure = partial(Figure, table="Computed meanwhile", setting={"class": cls.name})
        yield figure("tokens a second", tokens / seconds)
        yield figure("part of all", tokens / sum(computed.values()), "share")


def bounded(p99_ns: float, idle_p99_ns: float, batch_ns: float, setting: Setting) -> Figure:
    """The P99 in the flood next to 1.5 times the idle one plus one batch."""
    bound = (1.5 * idle_p99_ns + batch_ns) / 1e6
    return Figure("in the flood P99", p99_ns / 1e6, "ms", "", setting, "bound", bound, goal=Goal(1.0))
