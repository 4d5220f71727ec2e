"""Equal inputs give equal decisions, byte for byte: recorded runs are replayed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.step import Chunk, Executor, OutOfMemory, SampledToken
from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.policies import Ordering
from scheduler.request import Request, RequestSpec, State
from scheduler.tapes import TapeItem
from scheduler.worker import Worker
from tests.scheduler.fakes import FakeClock
from tests.scheduler.recording import Failed, Recorder, Step, replay
from tests.scheduler.worlds import ORDERINGS, FakeWorld, records

FLASH, SESSION, POOL, STREAM = PriorityClass
LIMITS = Limits(
    max_batch_tokens=24,
    max_batch_requests=6,
    chunk_min=3,
    chunk_max=8,
    cell_budget_fraction=1.0,
    high_water=1.0,
)


def world(limits: Limits = LIMITS) -> FakeWorld:
    made = FakeWorld(limits, blocks=22, host_blocks=6)
    made.tape("A").staleness_ns = 400
    made.tape("B")
    return made


def recorded(
    over: FakeWorld,
    write: Callable[[bytes], object],
    ordering: Ordering,
    clock: Callable[[], int] | None = None,
    executor: Executor | None = None,
) -> Recorder:
    return Recorder(write, over, over.limits, clock or over.executor.clock, ordering, 7, executor=executor)


def steps_of(journal: bytes) -> list[Step]:
    return [msgspec.json.decode(line, type=Step) for line in journal.splitlines()[1:]]


def perturbed(journal: bytes, change: Callable[[list[Step]], None]) -> bytes:
    """The journal with other inputs; its decisions are those of the first run."""
    steps = steps_of(journal)
    change(steps)
    header = journal.splitlines(keepends=True)[0]
    return header + b"".join(msgspec.json.encode(step) + b"\n" for step in steps)


def decisions(journal: bytes) -> list[object]:
    return [what for step in steps_of(journal) for what in step.decided]


class Asking:
    """A listener that asks again at every commit, as standing questions do: on the stepping thread."""

    def __init__(self, scheduler: Recorder, over: FakeWorld) -> None:
        self.scheduler, self.world = scheduler, over

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem]) -> None:
        self.scheduler.submit(self.world.request(FLASH, [version % 90, 1], 1, tape.name))


def clients(scheduler: Recorder, over: FakeWorld, seed: int, pause_s: float = 0.0) -> Callable[[], None]:
    """One thread's random work."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randint(1, most))]

    def run() -> None:
        mine: list[int] = []
        for _ in range(20):
            match rng.randrange(8):
                case 0:
                    scheduler.append(over.tape(rng.choice("AB")), records(*map(len, [tokens(5), tokens(5)])))
                case 1:
                    request = over.request(SESSION, tokens(12), rng.randint(1, 5), rng.choice("AB"))
                    mine.append(scheduler.submit(request))
                case 2 | 3:
                    request = over.request(POOL, tokens(20), rng.randint(1, 6), salt=rng.choice("ab"))
                    mine.append(scheduler.submit(request))
                case 4:
                    request = over.request(POOL, tokens(9), rng.randint(1, 4), complete=False)
                    mine.append(scheduler.submit(request))
                case 5 if mine:
                    scheduler.extend(rng.choice(mine), tokens(6))
                case 6 if mine:
                    scheduler.replace(rng.choice(mine), tokens(12))
                case 7 if mine:
                    rng.choice([scheduler.finish, scheduler.cancel])(rng.choice(mine))
            if pause_s and rng.random() < 0.3:
                time.sleep(pause_s)
        for number in mine:
            scheduler.finish(number)

    return run


@pytest.mark.parametrize("ordering", ORDERINGS, ids=lambda ordering: ordering.name)
def test_what_many_threads_asked_for_is_decided_alike_again(ordering: Ordering) -> None:
    lines: list[bytes] = []
    first = world()
    ticking, lock = FakeClock(), threading.Lock()

    def clock() -> int:
        with lock:
            return ticking()

    scheduler = recorded(first, lines.append, ordering, clock)
    scheduler.subscribe(Asking(scheduler, first).on_commit)
    worker = Worker(scheduler)
    worker.start()
    threads = [threading.Thread(target=clients(scheduler, first, seed, 0.0005)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worker.stop(20.0)
    assert worker.failures == 0
    journal = b"".join(lines)
    assert {request.state for request in first.done} >= {State.FINISHED, State.CANCELLED}
    kinds = {str(what[0]) for step in steps_of(journal) for what in step.decided}
    assert kinds >= {"batch", "left", "ended", "committed"}
    assert replay(journal, world()) == journal
    assert replay(journal, world()) == journal


class Unreliable:
    """Some passes find no memory, some raise."""

    def __init__(self, over: FakeWorld, seed: int) -> None:
        self.inner, self.rng = over.executor, random.Random(seed)

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        chance = self.rng.random()
        if chance < 0.1:
            raise OutOfMemory("no memory")
        if chance < 0.15:
            raise ConnectionError("the device is gone")
        return self.inner.execute(batch)


def journal_of(seed: int, *, unreliable: bool = False) -> bytes:
    """A random load in virtual time, on one thread, to the end."""
    lines: list[bytes] = []
    over, rng = world(), random.Random(seed)
    flaky = Unreliable(over, seed) if unreliable else None
    scheduler = recorded(over, lines.append, rng.choice(ORDERINGS), executor=flaky)
    for n in range(4):
        over.executor.at(rng.randrange(4000), clients(scheduler, over, seed * 10 + n))
    while scheduler.step() or over.executor.sleep():
        pass
    scheduler.close()
    return b"".join(lines)


@settings(max_examples=10, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 10**6), st.booleans())
def test_any_run_is_decided_alike_again(seed: int, unreliable: bool) -> None:
    journal = journal_of(seed, unreliable=unreliable)
    assert replay(journal, world()) == journal


def test_another_row_gives_other_decisions() -> None:
    journal = journal_of(1)

    def change(steps: list[Step]) -> None:
        rows = next(rows for step in steps for rows in step.passes if isinstance(rows, list) and any(rows))
        at = next(at for at, row in enumerate(rows) if row)
        rows[at] = [96]

    assert decisions(replay(perturbed(journal, change), world())) != decisions(journal)


def test_a_pass_without_memory_gives_other_decisions() -> None:
    journal = journal_of(2)

    def change(steps: list[Step]) -> None:
        next(step for step in steps if step.passes).passes[0] = Failed("OutOfMemory", "full")

    assert decisions(replay(perturbed(journal, change), world())) != decisions(journal)


def test_another_reading_of_the_clock_at_a_deadline_gives_other_decisions() -> None:
    """A tape behind a question until its bound is near: read later, the clock puts it in front."""
    limits = Limits(max_batch_tokens=24, max_batch_requests=1)
    lines: list[bytes] = []
    first = world(limits)
    first.tape("A").staleness_ns = 5000
    scheduler = recorded(first, lines.append, Ordering())
    scheduler.append(first.tape("A"), records(4))
    scheduler.submit(first.request(SESSION, [1, 2], 3))
    while scheduler.step():
        pass
    journal = b"".join(lines)

    def again(change: Callable[[list[Step]], None]) -> list[object]:
        second = world(limits)
        second.tape("A").staleness_ns = 5000
        return decisions(replay(perturbed(journal, change), second))

    def later(steps: list[Step], by: int) -> None:
        steps[0].clock[0] += by

    assert decisions(journal)[0] == ("batch", [[2, 2, []]])
    assert again(partial(later, by=0)) == decisions(journal)
    assert again(partial(later, by=4900))[0] == ("batch", [["A", 4, []]])


def test_a_request_that_was_cancelled_a_step_later_gives_other_decisions() -> None:
    lines: list[bytes] = []
    first = world()
    scheduler = recorded(first, lines.append, Ordering())
    number = scheduler.submit(first.request(POOL, [1] * 20, 4))
    scheduler.step()
    scheduler.cancel(number)
    scheduler.submit(first.request(POOL, [2] * 20, 4))
    while scheduler.step():
        pass
    journal = b"".join(lines)

    def change(steps: list[Step]) -> None:
        steps[2].inputs.append(steps[1].inputs.pop(0))

    assert replay(journal, world()) == journal
    assert decisions(replay(perturbed(journal, change), world())) != decisions(journal)


def test_a_fork_taken_on_the_stepping_thread_is_taken_again() -> None:
    """Readers bound to one version, such as standing questions and windows."""
    lines: list[bytes] = []
    first = world()
    scheduler = recorded(first, lines.append, Ordering())
    scheduler.append(first.tape("B"), records(3, 3))
    scheduler.step()
    ended: list[Request] = []
    forked = Request(
        RequestSpec(FLASH, "B", [5, 6], 2, ended.append, reader=first.reader("B"), stop_ids=frozenset([3]))
    )
    scheduler.submit(forked)
    scheduler.step()
    scheduler.step()
    assert ended[0].version == 1
    assert replay(b"".join(lines), world()) == b"".join(lines)
