"""Questions behind the daemon's scheduler and worker: during an `exact` session's refresh, and in a flood.

Each question arrives at a random moment of a pass, waits for it, and may share its own pass with other work.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from bench.engine.contenders import Regions, embedded, engine_for, model_of
from bench.engine.scenario import Size, make_scenario
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.run import SuiteRun
from engine.device import in_own_thread
from engine.model.loaded import LoadedModel
from regions.tape import Retention, Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems
from scheduler.worker import Worker

Bars = Sequence[Sequence[int]]
_WAIT_S = 120.0


class Served(Observer):
    """A session of ``records`` bars behind the daemon's scheduler; asks questions of the ``asked`` classes.

    ``evicted``: bars before its window; ``spare``: tokens of the pool for other work. ``passes``: the ns of
    each pass without the asked classes; ``tokens``: of all passes, by class.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits,
        records: int,
        *asked: PriorityClass,
        evicted: int = 0,
        spare: int = 0,
    ) -> None:
        self.scenario = make_scenario(loaded, Size(records + evicted, 0, 0))
        self._retention = Retention(self.scenario.tokens, records)
        self.engine = engine_for(loaded, 4 * self.scenario.tokens + spare + 4096, frame_limit=8192)
        self.limits, self._asked, self.passes = limits, asked, list[int]()
        self.tokens = dict.fromkeys(PriorityClass, 0)
        self.scheduler = Scheduler(self.engine, self.engine.pool, limits, time.monotonic_ns, self)
        self._tapes: list[Tape] = []
        self.tape = self.open_tape("asked", self.scenario.first)

    def open_tape(self, session: str, bars: Bars = ()) -> Tape:
        """A session's tape that has read ``bars``."""
        regions = Regions(self.engine, self.scenario.frozen, self._retention, session)
        regions.fill(bars)
        self._tapes.append(regions.tape)
        return regions.tape

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """A pass was run."""
        for cls, n in tokens.items():
            self.tokens[cls] += n
        if not any(tokens.get(cls) for cls in self._asked):
            self.passes.append(forward_ns)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the worker; afterwards, release the tapes."""
        worker = Worker(self.scheduler)
        worker.start()
        try:
            yield
        finally:
            worker.stop(1.0)
            for tape in self._tapes:
                tape.release()

    def wait_for(self, make: Callable[..., RequestSpec]) -> int:
        """ns from submitting what ``make`` returns, given its `on_done`, to its end. Raises RuntimeError."""
        done = threading.Event()
        request = Request(make(on_done=lambda request: done.set()))
        began = time.perf_counter_ns()
        self.scheduler.submit(request)
        if not done.wait(_WAIT_S) or request.error is not None:
            raise RuntimeError(f"no answer: {request.error or 'the scheduler makes no progress'}")
        return time.perf_counter_ns() - began

    def ask(self, n: int) -> list[list[int]]:
        """ns to the answer token of ``n`` questions of each class in turn, after one that does not count."""
        pause, question = random.Random(5), self.scenario.question
        times: dict[PriorityClass, list[int]] = {cls: [] for cls in self._asked}
        for _, cls in product(range(n + 1), self._asked):
            time.sleep(pause.uniform(0.0, 0.1))  # so that questions arrive at any moment of a pass
            times[cls].append(self.wait_for(partial(RequestSpec, cls, "asked", question, 1, tape=self.tape)))
        return [taken[1:] for taken in times.values()]

    def refresh(self) -> int:
        """Prefill the window again, and drop it; the ns it took."""
        fresh = self.tape.fresh_window()
        spec = partial(RequestSpec, PriorityClass.STREAM, "asked", self.tape.window, 0, background=True)
        took = self.wait_for(partial(spec, reader=fresh))
        self.scheduler.run_between(fresh.release)
        return took


def bounded(
    name: str, setting: Setting, ns: Sequence[int], idle: Sequence[int], times: float, batch_ns: float
) -> Iterator[Figure]:
    """Questions under load next to idle ones, and to a bound: ``times`` the idle P99, and a batch."""
    yield from latency(name, ns, setting, "", "idle", idle, paired=False)
    p99, idle_p99 = (quantiles(each, 0.99)[0] for each in (ns, idle))
    bound = (times * idle_p99 + batch_ns) / 1e6
    yield Figure(f"{name} P99", p99 / 1e6, "ms", "", setting, "bound", bound, goal=Goal(1.0))


def refresh(run: SuiteRun) -> Iterator[Figure]:
    """Questions through the real scheduler, alone and while the session's window is prefilled again in
    the background. *Bound*: 1.1 times the idle P99 plus the longest batch of the refresh.
    """
    records, evicted, questions = run.sized((256, 55, 40), (20, 5, 4))
    served = Served(model_of(run)[0], Limits(), records, PriorityClass.SESSION, evicted=evicted)
    ended, stop = list[int](), threading.Event()

    def refresh_again() -> None:
        while not stop.is_set():
            ended.append(served.refresh())

    background = threading.Thread(target=refresh_again)
    with served.running():
        (idle,) = served.ask(questions)
        alone = served.refresh()
        background.start()
        (during,) = served.ask(questions)
        stop.set()
        background.join()
        window = len(served.tape.window)
    setting: Setting = {"tokens in the window": window, "tokens a chunk": served.limits.chunk_min}
    batch_ns = max(served.passes)
    yield from bounded("question during refreshes", setting, during, idle, 1.1, batch_ns)
    figure = partial(Figure, setting=setting)
    yield figure("longest batch of a refresh", batch_ns / 1e6, "ms")
    yield figure("one refresh alone", alone / 1e6, "ms")
    yield figure("refreshes that ended meanwhile", len(ended))


@dataclass
class Flood:
    """A tape on which bars always wait, and prompts always in progress, once started."""

    served: Served
    tape: Tape
    prompt_tokens: int
    answer: int
    flowing: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def start(self, backlog: int, prompts: int) -> None:
        """From here on there are always bars to read and prompts to compute."""
        self.flowing = True
        self.served.scheduler.subscribe(self.on_commit)
        for _ in range(prompts):
            self._prompt()
        self._append(backlog)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Replace what was read, so that the backlog stays constant."""
        self._append(len(records))

    def _append(self, n: int) -> None:
        if self.flowing:
            bars = self.served.scenario.first
            items: list[TapeItem[None]] = [TapeItem(self.rng.choice(bars)) for _ in range(n)]
            self.served.scheduler.append(self.tape, items)

    def _prompt(self, ended: Request | None = None) -> None:
        if self.flowing and (ended is None or ended.error is None):
            engine = self.served.engine
            high = engine.model.model.config.vocab_size
            tokens = [self.rng.randrange(high) for _ in range(self.prompt_tokens)]
            of = partial(RequestSpec, PriorityClass.POOL, "", open_prompt=engine.open_prompt)
            self.served.scheduler.submit(Request(of(tokens, self.answer, self._prompt)))


def flood(run: SuiteRun) -> Iterator[Figure]:
    """Standing questions (FLASH) and asks (SESSION) of one session, alone and while another session's
    tape (STREAM) and prompts (POOL) always have more, on the embedded model. *Bound*: 1.5 times the idle
    P99 plus the P99 of a pass of the flood without a question. The last table has what each class
    computed meanwhile: STREAM, too, waits for POOL and the questions.
    """
    bars, questions, batch_tokens = run.sized((256, 100, 1024), (12, 3, 128))
    prompts, prompt_tokens, answer = run.sized((16, 1024, 8), (3, 64, 2))
    loaded, limits = embedded(run), Limits(max_batch_tokens=batch_tokens)
    asked, spare = (PriorityClass.FLASH, PriorityClass.SESSION), 2 * prompts * (prompt_tokens + answer)
    served = in_own_thread(lambda: Served(loaded, limits, bars, *asked, spare=spare))
    flood = Flood(served, in_own_thread(lambda: served.open_tape("flooded")), prompt_tokens, answer)
    with served.running():
        idle = served.ask(questions)
        flood.start(bars, prompts)
        while len(served.passes) < 3:
            time.sleep(0.01)
        served.passes.clear()
        before, began = dict(served.tokens), time.perf_counter()
        flooded = served.ask(questions)
        seconds, passes = time.perf_counter() - began, list(served.passes)
        # now: the worker reads the backlog when it stops
        computed = {cls: served.tokens[cls] - before[cls] for cls in PriorityClass}
        flood.flowing = False
    setting: Setting = {"prompts waiting": prompts, "bars waiting": bars, "tokens a pass": batch_tokens}
    for cls, ns, alone in zip(asked, flooded, idle, strict=True):
        by_class = {**setting, "class": cls.name}
        yield from bounded("in the flood", by_class, ns, alone, 1.5, quantiles(passes, 0.99)[0])
    yield from latency("pass without a question", passes, setting, "Passes of the flood")
    for cls, tokens in computed.items():
        figure = partial(Figure, table="Computed meanwhile", setting={"class": cls.name})
        yield figure("tokens a second", tokens / seconds)
        yield figure("part of all", tokens / sum(computed.values()), "share")
