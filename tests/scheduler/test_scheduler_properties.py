"""Random loads over random pools: however batched and preempted, answers equal the one-by-one oracle."""

from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import LifecycleEvent, Request, State
from tests.kit.scheduler.fakes import FakeTape
from tests.kit.scheduler.harness import Harness, started

FLASH, SESSION, POOL, STREAM = PriorityClass


@dataclass(frozen=True)
class Ask:
    cls: PriorityClass
    prompt: int
    new: int
    tape: int | None
    forked: bool


@dataclass(frozen=True)
class Feed:
    tape: int
    records: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    which: int


tapes = st.integers(0, 1)
asks = st.builds(
    Ask,
    st.sampled_from([SESSION, POOL]),
    st.integers(1, 14),
    st.integers(1, 6),
    st.none() | tapes,
    st.just(False),
)
# Standing questions: one token, small enough for several to share a batch.
flashes = st.builds(Ask, st.just(FLASH), st.integers(1, 4), st.just(1), tapes, st.booleans())
feeds = st.builds(Feed, tapes, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
steps = st.just("step")
loads = st.lists(st.one_of(asks, flashes, feeds, steps, steps), max_size=30)
pools = st.integers(24, 60)


def budgets(cell_budget_fraction: float) -> st.SearchStrategy[Limits]:
    return st.builds(
        Limits,
        max_batch_tokens=st.integers(14, 40),
        max_batch_requests=st.integers(4, 12),
        chunk_min=st.integers(1, 3),
        chunk_max=st.integers(3, 10),
        cell_budget_fraction=st.just(cell_budget_fraction),
        high_water=st.floats(0.7, 1.0),
    )


limits = budgets(0.5)
# Half the pool or more is the tapes', and requests may claim all of it: preemption all the time.
tight_pools = st.integers(10, 22)
greedy = budgets(1.0)


def play(blocks: int, limits: Limits, load: list[object]) -> tuple[Harness, list[Request], list[FakeTape]]:
    h = Harness(blocks, limits)
    fed = [h.tape("A", retention=12), h.tape("B", retention=12)]
    requests: list[Request] = []
    for n, action in enumerate(load):
        if isinstance(action, Ask):
            tape = None if action.tape is None else fed[action.tape]
            prompt = [(n * 31 + k) % 90 for k in range(action.prompt)]
            requests.append(h.ask(prompt, action.new, action.cls, tape, forked=action.forked))
        elif isinstance(action, Feed):
            h.feed(fed[action.tape], *[[n % 90 + k for k in range(size)] for size in action.records])
        elif isinstance(action, Cancel) and requests:
            h.scheduler.cancel(requests[action.which % len(requests)].id)
        else:
            h.scheduler.step()
    h.run()
    return h, requests, fed


def conserved(h: Harness, fed: list[FakeTape]) -> bool:
    of_tapes = {block for tape in fed for block in tape.blocks}
    return set(h.memory.references) == of_tapes and set(h.memory.references.values()) <= {1}


@settings(max_examples=150)
@given(pools, limits, loads)
def test_every_request_finishes_with_the_one_by_one_answer(
    blocks: int, limits: Limits, load: list[object]
) -> None:
    h, requests, fed = play(blocks, limits, load)
    assert len(h.done) == len(requests)
    for request in requests:
        h.check(request)
        tape = next((tape for tape in fed if tape.name == request.session), None)
        if tape is not None:
            assert h.contexts[request.id] == tape.history[request.version]
    assert conserved(h, fed)
    assert not h.log.drops
    # Every record is on its tape once, in order, and every version was announced.
    for tape in fed:
        commits = [(version, records) for name, version, records in h.log.commits if name == tape.name]
        assert [version for version, _ in commits] == list(range(1, tape.version + 1))
        sent = [record for _, records in commits for record in records]
        assert [list(record.tokens) for record in sent][len(sent) - len(tape.records) :] == tape.records


@settings(max_examples=100)
@given(pools, limits, loads)
def test_starts_are_fifo_within_a_class(blocks: int, limits: Limits, load: list[object]) -> None:
    _, requests, _ = play(blocks, limits, load)
    for cls in PriorityClass:
        starts = [started(request) for request in requests if request.cls is cls]
        assert starts == sorted(starts)


@settings(max_examples=100)
@given(pools, limits, loads)
def test_equal_inputs_give_equal_decisions(blocks: int, limits: Limits, load: list[object]) -> None:
    (one, first, _), (two, second, _) = play(blocks, limits, load), play(blocks, limits, load)
    assert one.executor.trace() == two.executor.trace()
    assert [request.events for request in first] == [request.events for request in second]


@settings(max_examples=100)
@given(pools, limits, loads, flashes)
def test_a_flash_request_waits_for_one_batch_at_most(
    blocks: int, limits: Limits, load: list[object], flash: Ask
) -> None:
    """Alone in its class, it is done after the next batch, under any other load."""
    h = Harness(blocks, limits)
    tape = h.tape(retention=12)
    for n, action in enumerate(load):
        if isinstance(action, Ask) and action.cls is not FLASH:
            h.ask(range(action.prompt), action.new, action.cls, tape)
        elif isinstance(action, Feed):
            h.feed(tape, *[[n % 90] * size for size in action.records])
        elif action == "step":
            h.scheduler.step()
    request = h.ask(range(flash.prompt), 1, FLASH, tape, forked=flash.forked)
    h.scheduler.step()
    assert request.state is State.FINISHED
    h.run()
    for ended in h.done:
        h.check(ended)


@settings(max_examples=100)
@given(tight_pools, greedy, loads)
def test_a_pool_that_is_much_too_small_never_deadlocks_nor_gives_a_wrong_answer(
    blocks: int, limits: Limits, load: list[object]
) -> None:
    """Two tapes alone may fill it. Work that cannot run ends with `no_memory` or `too_long`."""
    h, requests, fed = play(blocks, limits, load)
    assert len(h.done) == len(requests)
    for request in requests:
        if request.state is State.FINISHED:
            h.check(request)
        else:
            assert request.error.code in {"no_memory", "too_long"}
    assert conserved(h, fed)
    assert {failure.code for _, _, failure in h.log.drops} <= {"no_memory", "too_long"}


@settings(max_examples=100)
@given(
    pools, limits, st.lists(st.one_of(asks, feeds, steps, st.builds(Cancel, st.integers(0, 9))), max_size=30)
)
def test_cancellation_at_any_moment_gives_everything_back(
    blocks: int, limits: Limits, load: list[object]
) -> None:
    h, requests, fed = play(blocks, limits, load)
    assert len(h.done) == len(requests)
    for request in requests:
        if request.state is not State.CANCELLED:
            h.check(request)
    assert conserved(h, fed)


@settings(max_examples=100)
@given(st.one_of(tight_pools, pools), greedy, loads)
def test_preempted_work_is_accounted_for(blocks: int, limits: Limits, load: list[object]) -> None:
    """Tokens computed = tokens needed + tokens invalidated by preemption; no other is computed twice."""
    h, requests, _ = play(blocks, limits, load)
    assume(all(request.state is State.FINISHED for request in requests))
    fed = sum(len(record.tokens) for _, _, records in h.log.commits for record in records)
    computed = sum(len(chunk.tokens) for batch in h.executor.batches for chunk in batch)
    needed = sum(len(request.prompt) + len(request.output) - 1 for request in requests)
    assert computed == fed + needed + sum(request.recomputed_tokens for request in requests)
    for request in requests:
        preempted = sum(event is LifecycleEvent.PREEMPTED_RECOMPUTE for event, _ in request.events)
        assert sum(event is LifecycleEvent.SCHEDULED for event, _ in request.events) == preempted + 1
