"""A scheduler in virtual time: passes cost by token, and input arrives meanwhile."""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from engine.step import Chunk, SampledToken
from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.policies import NAMES, Ordering
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import (
    Answers,
    FakeExecutor,
    FakeMemory,
    FakePrompt,
    FakeReader,
    FakeTape,
    FakeTier,
)
from tests.kit.scheduler.simulated import LinearCosts

COSTS = LinearCosts(block_ns=15)
ORDERINGS = [Ordering(name, k=3) for name in NAMES]


class SavedPromptsIndex:
    """Exact match lengths with the saved prompts, by comparing them all."""

    def __init__(self, saved_prompts: list[tuple[int, ...]]) -> None:
        self.saved_prompts = saved_prompts
        self.watched: dict[int, tuple[list[int], int]] = {}

    def watch(self, key: int, tokens: Sequence[int], salt: str) -> int:
        self.watched[key] = list(tokens), self._match(tokens)
        return self.watched[key][1]

    def forget(self, key: int) -> None:
        del self.watched[key]

    def changes(self) -> list[tuple[int, int]]:
        changed = [
            (key, self._match(tokens))
            for key, (tokens, match) in self.watched.items()
            if self._match(tokens) != match
        ]
        for key, match in changed:
            self.watched[key] = self.watched[key][0], match
        return changed

    def _match(self, tokens: Sequence[int]) -> int:
        most = 0
        for saved in self.saved_prompts:
            common = 0
            while common < min(len(saved), len(tokens) - 1) and saved[common] == tokens[common]:
                common += 1
            most = max(most, common)
        return most


class Device(FakeExecutor):
    """A `FakeExecutor` that advances the clock and triggers the events that fall due."""

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        super().__init__(max_tokens, max_rows)
        self.now = 0
        self.began: list[int] = []
        self.took: list[int] = []
        """What each pass took, ns."""
        self._agenda: list[tuple[int, int, Callable[[], object]]] = []
        self._number = count()

    def clock(self) -> int:
        return self.now

    def at(self, when: int, what: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (when, next(self._number), what))

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        rows = super().execute(batch)
        self.took.append(COSTS.batch_ns([(0, len(chunk.tokens)) for chunk in batch]))
        self.began.append(self.now)
        self.until(self.now + self.took[-1])
        return rows

    def until(self, then: int) -> None:
        while self._agenda and self._agenda[0][0] <= then:
            self.now, _, what = heapq.heappop(self._agenda)
            what()
        self.now = then

    def sleep(self) -> bool:
        """Advance to the next event; False when there is none."""
        if self._agenda:
            self.until(self._agenda[0][0])
            return True
        return False


class FakeWorld:
    """The environment of a scheduler. A second one behaves exactly like the first."""

    def __init__(self, limits: Limits, blocks: int = 200, host_blocks: int = 0, block_size: int = 4) -> None:
        self.limits = limits
        self.memory = FakeMemory(blocks, block_size)
        self.executor = Device(limits.max_batch_tokens, limits.max_batch_requests)
        self.costs = COSTS
        self.tier: Any = FakeTier(host_blocks)  # it swaps fakes only
        self.saved_prompts: list[tuple[int, ...]] = []
        self.index: Any = SavedPromptsIndex(self.saved_prompts)  # it finds what fakes saved
        self.tapes: dict[str, FakeTape] = {}
        self.answers = Answers(self.memory)
        self.done = self.answers.done

    def tape(self, name: str) -> FakeTape:
        if name not in self.tapes:
            self.tapes[name] = FakeTape(self.memory, name, retention=24)
        return self.tapes[name]

    def reader(self, session: str) -> FakeReader:
        return self.tape(session).fork() if session else FakeReader(self.memory)

    def prompt(self, salt: str) -> FakePrompt:
        return FakePrompt(self.memory, self.saved_prompts)

    def request(
        self,
        cls: PriorityClass,
        prompt: Sequence[int],
        max_tokens: int,
        session: str = "",
        *,
        complete: bool = True,
        salt: str = "",
    ) -> Request:
        """A POOL request reads a prompt of its own, all others a session (or nothing)."""
        source = self.tape(session) if session else FakeTape(self.memory, "")
        own = {"open_prompt": lambda: self.prompt(salt)} if cls is PriorityClass.POOL else {}
        spec = {"session": session, "complete": complete, "salt": salt, **own}
        return self.answers.request(list(prompt), max_tokens, cls, source, **spec)


class Run:
    """Runs a scheduler over a world until no work is left and none will come."""

    def __init__(self, over: FakeWorld, ordering: Ordering = ORDERINGS[1]) -> None:
        self.world = over
        self.scheduler = Scheduler(
            over.executor,
            over.memory,
            over.limits,
            over.executor.clock,
            ordering=ordering,
            costs=over.costs,
            tier=over.tier,
            index=over.index,
            rng=random.Random(1),
        )
        self.scheduler.subscribe(self.on_commit, self.on_drop)
        self.late: list[int] = []
        """How long each record of a tape with a bound was queued when it was committed, less the bound."""
        self._queued: dict[str, list[int]] = defaultdict(list)

    def feed(self, name: str, sizes: Sequence[int]) -> None:
        self._queued[name] += [self.world.executor.now] * len(sizes)
        self.scheduler.append((self.world.tape(name), records(*sizes)))

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem]) -> None:
        for _ in records:
            waited = self.world.executor.now - self._queued[tape.name].pop(0)
            if tape.staleness_ns:
                self.late.append(waited - tape.staleness_ns)

    def on_drop(self, tape: Tape, records: Sequence[TapeItem], failure: object) -> None:
        raise AssertionError(failure)

    def run(self, steps: int = 20_000) -> None:
        for _ in range(steps):
            if not self.scheduler.step() and not self.world.executor.sleep():
                return
        raise AssertionError(f"not at rest after {steps} steps")


def records(*sizes: int) -> list[TapeItem]:
    return [TapeItem(tuple(range(size))) for size in sizes]
