"""Out of memory: half of the batch is retried once, and nothing is lost silently."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daemon.engine.metrics import EngineObserver
from engine.seeding import Sampling, prompt_seed
from engine.step import Chunk, OutOfMemory, SampledToken
from metrics.store import MetricStore
from regions.kv_tensors import KVPool, LayerShape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.planner import Entry, first_half
from scheduler.request import LifecycleEvent, State
from scheduler.tapes import TapeAppend, TapeItem
from tests.kit.scheduler.fakes import FakeMemory, FakeTape, request_of
from tests.kit.scheduler.harness import Harness, events

FLASH, SESSION, POOL, STREAM = PriorityClass
WIDE = Limits(max_batch_tokens=64, cell_budget_fraction=1.0, high_water=1.0)


class Reports(Observer):
    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.waits: list[PriorityClass] = []

    def out_of_memory(self, *, retried: bool) -> None:
        self.outcomes.append("retried" if retried else "failed")

    def queue_wait(self, cls: PriorityClass, ns: int) -> None:
        self.waits.append(cls)


def harness(
    scarce: Callable[[int, Sequence[Chunk]], bool], *, blocks: int = 64, limits: Limits = WIDE
) -> tuple[Harness, Reports, list[int]]:
    """A harness whose device has no memory when `scarce` says so of (number of the pass from 0, batch).

    The list gets the tokens of every pass that was tried.
    """
    reports, sizes = Reports(), list[int]()
    h = Harness(blocks=blocks, limits=limits, observer=reports)
    execute = h.executor.execute

    def scarcely(batch: Sequence[Chunk]) -> list[SampledToken | None]:
        sizes.append(sum(len(chunk.tokens) for chunk in batch))
        if scarce(len(sizes) - 1, batch):
            raise OutOfMemory("tried to allocate 2 GiB")
        return execute(batch)

    h.executor.execute = scarcely
    return h, reports, sizes


def entry(seq: int, *lengths: int, append: bool = False) -> Entry:
    memory = FakeMemory(64)
    if append:
        work = TapeAppend(FakeTape(memory, f"T{seq}"))
        work.queue.extend(TapeItem((0,) * n, seq=seq) for n in lengths)
        return Entry(work, len(lengths))
    return Entry(request_of(memory, (0,) * 100), lengths[0])


def test_the_first_half_has_half_of_the_tokens_in_order() -> None:
    four = [entry(n, 6) for n in range(4)]
    assert first_half(four) == four[:2]
    assert [e.n for e in first_half([entry(0, 3), entry(1, 20), entry(2, 5)])] == [3, 11]
    assert [e.n for e in first_half([entry(0, 1), entry(1, 4, 4, 4, append=True)])] == [1, 1]
    large, small = entry(1, 9, append=True), entry(2, 3, 5, append=True)
    assert first_half([entry(0, 2), large, small])[1:] == [Entry(small.work, 1)]


def test_the_first_always_keeps_something() -> None:
    assert [e.n for e in first_half([entry(0, 1)])] == [1]
    assert [e.n for e in first_half([entry(0, 30, append=True)])] == [1]
    assert [e.n for e in first_half([entry(0, 9)])] == [4]
    assert [e.n for e in first_half([entry(0, 30, append=True), entry(1, 2)])] == [1]


def test_the_lower_half_is_preempted_and_the_upper_runs_at_once() -> None:
    h, reports, sizes = harness(lambda n, batch: n == 0)
    upper = [h.ask((n, n, n, n), cls=FLASH) for n in range(2)]
    lower = [h.ask((n, 7, n, 7), max_tokens=3) for n in range(2)]
    h.scheduler.step()
    assert sizes == [16, 8]
    assert [request.state for request in upper] == [State.FINISHED] * 2
    assert [request.state for request in lower] == [State.QUEUED] * 2
    assert all(
        events(r)[-2:] == [LifecycleEvent.SCHEDULED, LifecycleEvent.PREEMPTED_RECOMPUTE] for r in lower
    )
    assert h.memory.free_blocks == 64
    h.run()
    for request in (*upper, *lower):
        h.check(request)
    assert reports.outcomes == ["retried"]
    assert sorted(reports.waits) == [FLASH, FLASH, SESSION, SESSION], "a wait is reported once"


def test_an_append_shrinks_to_what_remains_and_loses_no_record() -> None:
    h, reports, sizes = harness(lambda n, batch: n == 0)
    tape = h.tape()
    h.feed(tape, (1, 2, 3), (4, 5, 6), (7, 8), (9, 9, 9, 9))
    h.run()
    assert sizes == [12, 6, 6]
    assert [len(records) for _, _, records in h.log.commits] == [2, 2]
    assert tape.records == [[1, 2, 3], [4, 5, 6], [7, 8], [9, 9, 9, 9]]
    assert reports.outcomes == ["retried"]
    assert not h.log.drops


def test_one_row_of_one_token_is_tried_again_as_it_is() -> None:
    h, reports, sizes = harness(lambda n, batch: n == 0)
    request = h.ask((1,))
    h.run()
    h.check(request)
    assert sizes == [1, 1]
    assert reports.outcomes == ["retried"]


def test_what_fails_twice_ends_with_no_memory_and_the_others_go_on() -> None:
    """The upper half ends, the lower half was only preempted; records get their second chance."""
    h, reports, _ = harness(lambda n, batch: n < 2)
    tape = h.tape()
    first, second = h.ask((1, 2, 3, 4, 5, 6)), h.ask((5, 6, 7, 8))
    h.feed(tape, (1, 2))
    h.scheduler.step()
    assert (first.state, first.error.code) == (State.FAILED, "no_memory")
    assert "2 GiB" in first.error.message
    assert second.state is State.QUEUED
    h.run()
    h.check(second)
    assert tape.records == [[1, 2]]
    assert reports.outcomes == ["retried", "failed"]
    assert not h.log.drops


def test_records_that_never_find_memory_are_dropped_with_a_report() -> None:
    h, reports, sizes = harness(lambda n, batch: True)
    tape = h.tape()
    h.feed(tape, (1, 2), (3, 4))
    h.run()
    # two batches of both, each tried again with one record; then that record goes, and so on
    assert sizes == [4, 2, 4, 2, 2, 2, 2, 2]
    assert [(len(records), failure.code) for _, records, failure in h.log.drops] == [(1, "no_memory")] * 2
    assert reports.outcomes == ["retried", "failed"] * 4
    assert not tape.records


def test_a_device_for_half_the_batch_still_answers_everything() -> None:
    """It never has memory for more than twenty tokens a pass, whatever is planned."""
    h, reports, sizes = harness(lambda n, batch: sum(len(chunk.tokens) for chunk in batch) > 20)
    tape = h.tape()
    requests = [h.ask(range(n, n + 5), max_tokens=4, cls=SESSION if n % 2 else POOL) for n in range(4)]
    h.feed(tape, *[(n, n) for n in range(9)])
    h.run()
    for request in requests:
        h.check(request)
    assert tape.records == [[n, n] for n in range(9)]
    assert max(sizes) > 20
    assert set(reports.outcomes) == {"retried"}


def test_another_error_in_the_retry_is_a_failed_pass() -> None:
    def fail(n: int, batch: Sequence[Chunk]) -> bool:
        if n == 1:
            raise RuntimeError("device lost")
        return n == 0

    h, reports, _ = harness(fail)
    request = h.ask((1, 2, 3))
    h.run()
    assert request.error.code == "engine"
    assert reports.outcomes == ["retried"]


@settings(max_examples=75)
@given(
    st.sets(st.integers(0, 30)),
    st.lists(
        st.tuples(
            st.sampled_from([FLASH, SESSION, POOL]), st.integers(1, 9), st.integers(1, 5), st.booleans()
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.integers(1, 5), max_size=9),
    st.integers(16, 40),
)
@example({4}, [(FLASH, 1, 5, False), (POOL, 5, 1, False), (POOL, 1, 1, True)], [1, 3, 3, 5, 5], 16)
def test_whatever_pass_fails_nothing_is_lost_and_no_answer_is_wrong(
    scarce: set[int], asks: list[tuple[PriorityClass, int, int, bool]], records: list[int], blocks: int
) -> None:
    """Answers are the one-by-one answers or end with `no_memory`; every record is on the tape or reported."""
    limits = Limits(24, 6, 3, 8, cell_budget_fraction=1.0)
    h, reports, _ = harness(lambda n, batch: n in scarce, blocks=blocks, limits=limits)
    tape = h.tape(retention=16)
    h.feed(tape, *[[k] * n for k, n in enumerate(records)])
    requests = []
    for k, (cls, prompt, new, on_tape) in enumerate(asks):
        requests.append(h.ask([k] * prompt, new, cls, tape if on_tape else None))
        if k % 3 == 2:
            h.scheduler.step()
    h.run()
    assert len(h.done) == len(requests)
    for request in requests:
        if request.state is State.FINISHED:
            h.check(request)
            if request.session:
                assert h.contexts[request.id] == tape.history[request.version]
        else:
            assert request.error.code == "no_memory"
        scheduled, lost = (
            events(request).count(e) for e in (LifecycleEvent.SCHEDULED, LifecycleEvent.PREEMPTED_RECOMPUTE)
        )
        assert scheduled <= lost + 1
    told_of = [r for _, _, rs in h.log.commits for r in rs] + [r for _, rs, _ in h.log.drops for r in rs]
    assert sorted(r.tokens for r in told_of) == [(k,) * n for k, n in enumerate(records)]
    assert set(h.memory.references) == set(tape.blocks)
    assert all(failure.code == "no_memory" for _, _, failure in h.log.drops)
    failed = any(r.state is State.FAILED for r in requests) or bool(h.log.drops)
    assert not failed or "failed" in reports.outcomes


def test_the_metric_counts_by_how_it_ended() -> None:
    store = MetricStore.local({})
    observer = EngineObserver(store, KVPool([LayerShape(1, 2, 2)], 4))
    for retried in (True, True, False):
        observer.out_of_memory(retried=retried)
    assert store.value("foretick_oom_total", outcome="retried") == 2
    assert store.value("foretick_oom_total", outcome="failed") == 1


# Seeds of draws, which preemption must not change.


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chunks_say_how_to_draw_from_the_prompt_and_the_place_in_the_answer(temperature: float) -> None:
    h, _, _ = harness(lambda n, batch: n == 2, blocks=16)
    prompt = (4, 5, 6)
    request = h.ask(prompt, 4, temperature=temperature)
    other = h.ask((9,), max_tokens=6, cls=FLASH)
    h.run()
    assert other.state is State.FINISHED
    assert request.recomputed_tokens > 0
    sampled = [c for batch in h.executor.batches for c in batch if c.sample and c.target is not None]
    mine = [c.sampling for c in sampled if c.sampling is not None]
    if temperature:
        assert mine == [Sampling(temperature, prompt_seed(prompt), index) for index in range(4)]
    else:
        assert not mine
