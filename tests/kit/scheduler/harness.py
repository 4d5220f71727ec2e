"""A scheduler over the fakes, with shared shorthand."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.queues import Queues
from scheduler.request import Failure, LifecycleEvent, Request
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeAppend, TapeItem
from tests.kit.scheduler.fakes import Answers, FakeClock, FakeExecutor, FakeMemory, FakePrompt, FakeTape


def queues_of(work: Iterable[Request | TapeAppend]) -> Queues:
    """Queues of exactly this work."""
    queues = Queues()
    for item in work:
        if isinstance(item, Request):
            queues.requests[item.id] = item
        queues.update(item)
    return queues


SMALL = Limits(max_batch_tokens=24, max_batch_requests=6, chunk_min=3, chunk_max=8)


class Log:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, int, list[TapeItem]]] = []
        self.drops: list[tuple[str, list[TapeItem], Failure]] = []

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem]) -> None:
        self.commits.append((tape.name, version, list(records)))

    def on_drop(self, tape: Tape, records: Sequence[TapeItem], failure: Failure) -> None:
        self.drops.append((tape.name, list(records), failure))


class Harness:
    def __init__(
        self,
        blocks: int = 64,
        limits: Limits = SMALL,
        observer: Observer | None = None,
        block_size: int = 4,
        *,
        executor: FakeExecutor | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.memory = FakeMemory(blocks, block_size)
        self.executor = executor or FakeExecutor(limits.max_batch_tokens, limits.max_batch_requests)
        self.scheduler = Scheduler(self.executor, self.memory, limits, clock or FakeClock(), observer)
        self.log = Log()
        self.scheduler.subscribe(self.log.on_commit, self.log.on_drop)
        self.answers = Answers(self.memory)
        self.done, self.contexts, self.check = self.answers.done, self.answers.contexts, self.answers.check

    def tape(self, name: str = "T", retention: int = 40) -> FakeTape:
        return FakeTape(self.memory, name, retention)

    def ask(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 1,
        cls: PriorityClass = PriorityClass.SESSION,
        tape: FakeTape | None = None,
        *,
        forked: bool = False,
        **spec: Any,
    ) -> Request:
        """Submit a request on a tape's newest version (or stateless), or on a fork taken now."""
        source = tape or FakeTape(self.memory, "")
        if forked:
            spec["reader"] = source.fork()
        request = self.answers.request(tuple(prompt), max_tokens, cls, source, **spec)
        self.scheduler.submit(request)
        return request

    def prompt(self, prompt: Sequence[int], max_tokens: int = 3, **spec: Any) -> Request:
        """Submit a POOL request with a prompt of its own."""
        open_prompt = partial(FakePrompt, self.memory)
        return self.ask(prompt, max_tokens, PriorityClass.POOL, open_prompt=open_prompt, **spec)

    def feed(self, tape: FakeTape, *records: Sequence[int]) -> None:
        self.scheduler.append((tape, self.items(*records)))

    @staticmethod
    def items(*records: Sequence[int]) -> list[TapeItem]:
        """Each record as an item that carries itself."""
        return [TapeItem(tuple(record), payload=tuple(record)) for record in records]

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.scheduler.step()

    def run(self, steps: int = 10_000) -> int:
        """Step until idle; the number of steps. Fails when the scheduler does not come to rest."""
        for done in range(steps):
            if not self.scheduler.step():
                return done
        raise AssertionError(f"not at rest after {steps} steps")


def started(request: Request) -> int:
    at = request.first(LifecycleEvent.SCHEDULED)
    assert at is not None
    return at


def events(request: Request) -> list[LifecycleEvent]:
    return [event for event, _ in request.events]


def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.002)
    return False
