"""Runs a scheduler over a `FakeWorld` until no work is left, and checks its answers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from regions.tape import Tape
from scheduler.policies import Ordering
from scheduler.request import Request, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from tests.scheduler.fakes import one_by_one
from tests.scheduler.worlds import ORDERINGS, FakeWorld, records


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
        self.scheduler.append(self.world.tape(name), records(*sizes))

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


def answered(over: FakeWorld, request: Request) -> None:
    assert request.state is State.FINISHED, (request.id, request.error)
    expected = one_by_one(over.contexts[request.id], request.prompt, request.spec.max_tokens)
    assert request.output == [row.token for row in expected]
