"""Sessions whose windows are prefilled again in the background, over the real engine."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.divergence import Divergence, Probe, probe
from engine.engine import Engine
from engine.model.canary import dense_logits
from engine.step import Chunk, OutOfMemory, SampledToken
from regions.ephemeral import Fork
from regions.tape import Retention, Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.refresh import Comparison, Refresher
from scheduler.refresh_policy import RefreshPolicy
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler as Steps
from scheduler.tapes import TapeItem
from tests.engine.oracle import VOCABULARY, tiny
from tests.kit import tolerance
from tests.kit.scheduler.fakes import HeldClock

FROZEN = list(range(3, 14))
RETENTION = 60
LIMITS = Limits(max_batch_tokens=40, chunk_min=8, chunk_max=40)
QUESTIONS: list[Probe] = [((5, 6, 7), None), ((9, 4), (20, 30))]
MODEL = tiny("llama", layers=2)


class Recorder:
    """The real executor; records the (target, tokens) of each pass."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.passes: list[list[tuple[Any, int]]] = []
        self.fail_next = self.out_of_memory = 0

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("device lost")
        if self.out_of_memory:
            self.out_of_memory -= 1
            raise OutOfMemory("none left")
        self.passes.append([(chunk.target, len(chunk.tokens)) for chunk in batch])
        return self._engine.execute(batch)


class Counts(Observer):
    """Counts the refresher's reports."""

    def __init__(self) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()
        self.kl: dict[str, float] = {}

    def refreshed(self, session: str) -> None:
        self.totals["refreshes", session] += 1

    def refresh_restarted(self) -> None:
        self.totals["refresh_restarts", ""] += 1

    def refresh_failed(self, session: str) -> None:
        self.totals["refresh_failures", session] += 1

    def compared(self, session: str, found: Sequence[Divergence]) -> None:
        self.totals["divergence_samples", session] += len(found)
        self.totals["divergence_agreements", session] += sum(one.agrees for one in found)
        self.kl[session] = sum(one.kl_nats for one in found) / len(found)


Session = tuple[str, RefreshPolicy]


class World:
    """Sessions over a real scheduler and engine, stepped by the test."""

    def __init__(
        self,
        *sessions: Session,
        blocks: int = 150,
        frame_limit: int = 400,
        ask_both: Callable[..., Sequence[Divergence]] = probe,
    ) -> None:
        self.rng = random.Random(2)
        self.engine = Engine(MODEL, blocks=blocks, block_size=4, frame_limit=frame_limit)
        self.executor, self.clock = Recorder(self.engine), HeldClock()
        self.catching_up = Recorder(self.engine)
        self.steps = Steps(self.executor, self.engine.pool, LIMITS, self.clock)
        self.tapes = [self.engine.open_tape(name, FROZEN, Retention(RETENTION)) for name, _ in sessions]
        self.tape = self.tapes[0]
        self.counts = Counts()
        self.questions = QUESTIONS
        self.refresher = Refresher(
            self.steps,
            self.catching_up,
            self.engine,
            [(tape, policy) for tape, (_, policy) in zip(self.tapes, sessions, strict=True)],
            Comparison(lambda _: self.questions, partial(ask_both, self.engine), LIMITS.max_batch_tokens),
            self.counts,
            self.clock,
            frame_limit=frame_limit,
            catch_up_tokens=LIMITS.chunk_min,
        )

    def feed(self, n: int = 1, tape: Tape | None = None, length: int = 6) -> None:
        """Queue ``n`` records."""
        for _ in range(n):
            record = tuple(self.rng.randrange(3, VOCABULARY) for _ in range(length))
            self.steps.append((tape or self.tape, [TapeItem(record)]))

    def step(self, n: int) -> None:
        for _ in range(n):
            self.steps.step()

    def run(self) -> None:
        for _ in range(1000):
            if not self.steps.step():
                return
        raise AssertionError("the scheduler does not come to rest")

    def feed_one_by_one(self, n: int, tape: Tape | None = None) -> None:
        for _ in range(n):
            self.feed(1, tape)
            self.run()

    def evict(self, n: int, tape: Tape | None = None) -> None:
        """Feed until so many more records are evicted."""
        tape = tape or self.tape
        until_ = tape.evicted_records + n
        while tape.evicted_records < until_:
            self.feed(1, tape)
            self.steps.step()
            while tape.live_tokens % 6 or tape in self.steps.queues.appends:
                self.steps.step()

    def answer(self, tape: Tape | None = None, fork: Fork | None = None) -> torch.Tensor:
        """Next-token logits of the first question; ``fork`` keeps its own."""
        fork = fork or (tape or self.tape).fork()
        assert fork.acquire(3)
        logits = self.engine.logits([Chunk(fork, QUESTIONS[0][0])])[-1]
        fork.release()
        return logits

    def dense(self, tape: Tape | None = None) -> torch.Tensor:
        """The same of the unmodified model on frozen prefix and window."""
        tape = tape or self.tape
        return dense_logits(MODEL, [*tape.prefix, *tape.window, *QUESTIONS[0][0]])[-1]

    def off(self, tape: Tape | None = None) -> float:
        """How far the answer is from the dense model's, in units of what rounding may do."""
        expected = self.dense(tape)
        bound = tolerance.of_model(MODEL, tolerance.largest(expected))
        return tolerance.apart(self.answer(tape), expected) / bound

    def ask(self, cls: PriorityClass = PriorityClass.SESSION) -> Request:
        request = Request(RequestSpec(cls, self.tape.name, (5, 6, 7), 1, lambda _: None, tape=self.tape))
        self.steps.submit(request)
        return request

    def total(self, name: str, session: str = "a") -> int:
        return self.counts.totals[name, "" if name == "refresh_restarts" else session]

    def close(self) -> None:
        """Everything ends, and every block but the cached prefix is free again."""
        self.steps.close()
        for tape in self.tapes:
            tape.release()
        self.engine.cache.reclaim(10**6)
        assert self.engine.pool.blocks.free_blocks == self.engine.pool.total_blocks


def exact(name: str = "a", every: int = 5, idle_s: int = 0) -> Session:
    return name, RefreshPolicy(exact=True, every_records=every, idle_ns=idle_s * 10**9)


def carry(name: str = "a", every_s: int = 0) -> Session:
    return name, RefreshPolicy(exact=False, compare_ns=every_s * 10**9)
