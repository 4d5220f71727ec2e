"""Equal inputs give equal decisions: recorded runs are replayed."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.step import Chunk, OutOfMemory, SampledToken
from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.policies import Ordering
from scheduler.request import Request, RequestSpec, State
from scheduler.tapes import TapeItem
from scheduler.worker import Worker
from tests.kit.scheduler.fakes import FakeClock
from tests.kit.scheduler.worlds import ORDERINGS, FakeWorld, records
from tests.scheduler.recording import Recorder, Step, replay

FLASH, SESSION, POOL, STREAM = PriorityClass
FCFS = Ordering()
LIMITS = Limits(
    max_batch_tokens=24,
    max_batch_requests=6,
    chunk_min=3,
    chunk_max=8,
    cell_budget_fraction=1.0,
    high_water=1.0,
)


def world(limits: Limits = LIMITS, staleness_ns: int = 400) -> FakeWorld:
    made = FakeWorld(limits, blocks=22, host_blocks=6)
    made.tape("A").staleness_ns = staleness_ns
    made.tape("B")
    return made


def recorded(over: FakeWorld, ordering: Ordering = FCFS) -> Recorder:
    return Recorder(over, ordering, over.executor.clock, over.executor)


def run_to_rest(scheduler: Recorder) -> None:
    while scheduler.step():
        pass


def decisions(journal: Sequence[Step]) -> list[object]:
    return [what for step in journal for what in step.decided]


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
                    scheduler.append(
                        (over.tape(rng.choice("AB")), records(*map(len, [tokens(5), tokens(5)])))
                    )
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
    first = world()
    ticking, lock = FakeClock(), threading.Lock()

    def clock() -> int:
        with lock:
            return ticking()

    scheduler = Recorder(first, ordering, clock, first.executor)
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
    assert {request.state for request in first.done} >= {State.FINISHED, State.CANCELLED}
    assert {what[0] for step in scheduler.journal for what in step.decided} >= {
        "batch",
        "left",
        "ended",
        "committed",
    }
    assert replay(scheduler.journal, ordering, world()) == scheduler.journal
    assert replay(scheduler.journal, ordering, world()) == scheduler.journal


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


def played(seed: int, *, unreliable: bool = False) -> Recorder:
    """A random load in virtual time, on one thread, to the end."""
    over, rng = world(), random.Random(seed)
    executor = Unreliable(over, seed) if unreliable else over.executor
    scheduler = Recorder(over, rng.choice(ORDERINGS), over.executor.clock, executor)
    for n in range(4):
        over.executor.at(rng.randrange(4000), clients(scheduler, over, seed * 10 + n))
    while scheduler.step() or over.executor.sleep():
        pass
    scheduler.close()
    return scheduler


@settings(max_examples=10, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 10**6), st.booleans())
def test_any_run_is_decided_alike_again(seed: int, unreliable: bool) -> None:
    run = played(seed, unreliable=unreliable)
    assert replay(run.journal, run.ordering, world()) == run.journal


def another_row(steps: list[Step]) -> None:
    rows = next(rows for step in steps for rows in step.passes if any(rows))
    at = next(at for at, row in enumerate(rows) if row)
    rows[at] = SampledToken(96, 0.0, 0.0)


def a_pass_without_memory(steps: list[Step]) -> None:
    next(step for step in steps if step.passes).passes[0] = OutOfMemory("full")


@pytest.mark.parametrize("change", [another_row, a_pass_without_memory])
def test_other_results_of_the_device_give_other_decisions(change: Callable[[list[Step]], None]) -> None:
    run = played(1)
    before = decisions(run.journal)
    change(run.journal)
    assert decisions(replay(run.journal, run.ordering, world())) != before


def test_another_reading_of_the_clock_at_a_deadline_gives_other_decisions() -> None:
    """A tape behind a question until its bound is near: read later, the clock puts it in front."""
    limits = Limits(max_batch_tokens=24, max_batch_requests=1)
    first = world(limits, 5000)
    scheduler = recorded(first)
    scheduler.append((first.tape("A"), records(4)))
    scheduler.submit(first.request(SESSION, [1, 2], 3))
    run_to_rest(scheduler)
    before = decisions(scheduler.journal)
    assert before[0] == ("batch", [(2, 2, [])])
    assert decisions(replay(scheduler.journal, FCFS, world(limits, 5000))) == before
    scheduler.journal[0].clock[0] += 4900
    assert decisions(replay(scheduler.journal, FCFS, world(limits, 5000)))[0] == ("batch", [("A", 4, [])])


def test_a_request_that_was_cancelled_a_step_later_gives_other_decisions() -> None:
    first = world()
    scheduler = recorded(first)
    number = scheduler.submit(first.request(POOL, [1] * 20, 4))
    scheduler.step()
    scheduler.cancel(number)
    scheduler.submit(first.request(POOL, [2] * 20, 4))
    run_to_rest(scheduler)
    journal = scheduler.journal
    assert replay(journal, FCFS, world()) == journal
    journal[2].inputs.append(journal[1].inputs.pop(0))
    assert decisions(replay(journal, FCFS, world())) != decisions(journal)


def test_a_fork_taken_on_the_stepping_thread_is_taken_again() -> None:
    """Readers bound to one version, such as standing questions and windows."""
    first = world()
    scheduler = recorded(first)
    scheduler.append((first.tape("B"), records(3, 3)))
    scheduler.step()
    ended: list[Request] = []
    reader, stop_ids = first.reader("B"), frozenset([3])
    scheduler.submit(
        Request(RequestSpec(FLASH, "B", [5, 6], 2, ended.append, reader=reader, stop_ids=stop_ids))
    )
    run_to_rest(scheduler)
    assert ended[0].version == 1
    assert replay(scheduler.journal, FCFS, world()) == scheduler.journal
