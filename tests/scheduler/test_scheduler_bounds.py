"""Proven bounds under random loads in virtual time: flash latency, no starvation, staleness."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from scheduler.interfaces import Limits, PriorityClass
from scheduler.planner import plan
from scheduler.policies import Ordering
from scheduler.request import LifecycleEvent, Request
from scheduler.tapes import Passes, TapeAppend
from tests.kit.scheduler.fakes import FakeMemory, FakeTape
from tests.kit.scheduler.harness import queues_of
from tests.kit.scheduler.worlds import COSTS, ORDERINGS, FakeWorld, Run, records

FLASH, SESSION, POOL, STREAM = PriorityClass
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target)
"""No shrinking: a seed is the load, and smaller ones are not simpler."""


# A flash waits for one batch.


@dataclass(frozen=True)
class Flash:
    at: int
    prompt: int
    session: str


limits = st.builds(
    Limits,
    max_batch_tokens=st.integers(16, 40),
    max_batch_requests=st.integers(4, 10),
    chunk_min=st.integers(1, 3),
    chunk_max=st.integers(3, 10),
    high_water=st.floats(0.7, 1.0),
    eviction=st.sampled_from(["recompute", "swap", "cost"]),
    grouping=st.booleans(),
    max_drafts=st.integers(0, 4),
    stream_share=st.sampled_from([0.0, 0.25, 0.7]),
)
orderings = st.sampled_from(ORDERINGS)
sessions = st.sampled_from(["A", "B", ""])
flashes = st.lists(
    st.builds(Flash, st.integers(0, 8000), st.integers(1, 4), sessions), min_size=1, max_size=4
)


def pool_load(run: Run, rng: random.Random, span: int, n: int) -> list[Request]:
    """Questions and streamed prompts, all of which are finished at some time."""
    requests: list[Request] = []
    at, over = run.world.executor.at, run.world

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randint(1, most))]

    def submit(cls: PriorityClass, begin: list[int], new: int, session: str, pieces: int) -> None:
        request = over.request(
            cls, begin, new, session, complete=not pieces, salt=rng.choice("ab") if cls is POOL else ""
        )
        requests.append(request)
        number = run.scheduler.submit(request)
        for _ in range(pieces):
            change = rng.choice([run.scheduler.extend, run.scheduler.extend, run.scheduler.replace])
            piece = tokens(6 if change is run.scheduler.extend else 16)
            at(
                over.executor.now + rng.randrange(span // 2),
                partial(change, number, piece),
            )
        if pieces:
            # behind its pieces: finishing ends the prompt as it is by then
            at(over.executor.now + span // 2, partial(run.scheduler.finish, number))

    for _ in range(n):
        cls = rng.choice([SESSION, POOL, POOL])
        pieces = rng.choice([0, 0, 1, 3]) if cls is POOL else 0
        args = cls, tokens(14), rng.randint(1, 6), rng.choice(["A", "B", ""]), pieces
        at(rng.randrange(span), partial(submit, *args))
    return requests


def tape_load(run: Run, rng: random.Random, span: int, n: int) -> None:
    for _ in range(n):
        name, sizes = rng.choice("AB"), [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        run.world.executor.at(rng.randrange(span), partial(run.feed, name, sizes))


@settings(max_examples=30, phases=PHASES)
@given(limits, orderings, flashes, st.integers(0, 10**6), st.booleans())
def test_a_flash_waits_for_one_batch_in_flight_at_most(
    limits: Limits, ordering: Ordering, wanted: list[Flash], seed: int, bounded: bool
) -> None:
    """The flashes together fit into one batch, so each is in the first that begins after it came."""
    limits = replace(limits, max_batch_tokens=max(limits.max_batch_tokens, sum(f.prompt for f in wanted)))
    run, rng = Run(FakeWorld(limits, blocks=60, host_blocks=10), ordering), random.Random(seed)
    for name in "AB":
        run.world.tape(name).staleness_ns = 700 * bounded
    pool_load(run, rng, 8000, 25)
    tape_load(run, rng, 8000, 40)
    sent: list[Request] = []

    def submit(flash: Flash) -> None:
        sent.append(run.world.request(FLASH, range(flash.prompt), 1, flash.session))
        run.scheduler.submit(sent[-1])

    for flash in wanted:
        run.world.executor.at(flash.at, partial(submit, flash))
    run.run()
    for request in sent:
        run.world.answers.check(request)
        queued, scheduled = request.first(LifecycleEvent.QUEUED), request.first(LifecycleEvent.SCHEDULED)
        assert scheduled - queued <= max(run.world.executor.took)
        ended = request.first(LifecycleEvent.FINISHED)
        assert ended - scheduled <= max(run.world.executor.took), "all of it went into that one batch"
        # and no batch began in between
        assert not [began for began in run.world.executor.began if queued < began < scheduled]


# No request waits for ever.


@pytest.mark.parametrize("ordering", ORDERINGS, ids=lambda ordering: ordering.name)
@settings(max_examples=12, phases=PHASES)
@given(
    limits=limits,
    blocks=st.integers(26, 34),
    host=st.sampled_from([0, 4, 30]),
    fraction=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_every_load_comes_to_rest_with_every_answer_right(
    ordering: Ordering, limits: Limits, blocks: int, host: int, fraction: float, seed: int
) -> None:
    """A small pool that two tapes share: preemption, swapping, grouping, updates, drafts."""
    limits = replace(limits, cell_budget_fraction=fraction)
    run, rng = Run(FakeWorld(limits, blocks, host), ordering), random.Random(seed)
    requests = pool_load(run, rng, 3000, 25)
    tape_load(run, rng, 3000, 10)
    run.run()
    over = run.world
    assert len(over.done) == len(requests) == 25
    for request in requests:
        if request.error is not None:
            event(request.error.code)
            fits = -(-request.cells // 4) + 14 + 7 <= blocks  # with both tapes, and one old version of a tape
            assert request.error.code == "too_long" or (request.error.code == "no_memory" and not fits)
            continue
        over.answers.check(request)
        if any(what is LifecycleEvent.PREEMPTED_SWAP for what, _ in request.events):
            event("swapped")
        if request.recomputed_tokens:
            event("recomputed")
    of_tapes = {block for tape in over.tapes.values() for block in tape.blocks}
    assert set(over.memory.references) == of_tapes
    assert not over.tier.stored
    assert not over.index.watched


# A tape's bound is met whenever the device has the capacity.


@dataclass(frozen=True)
class Feed:
    at: int
    tape: str
    sizes: tuple[int, ...]


def passes(sizes: Sequence[int], most: int) -> int:
    """Whole records, at most so many tokens at once."""
    count = room = 0
    for size in sizes:
        if size > room:
            count, room = count + 1, most
        room -= size
    return count


def has_capacity(feeds: Sequence[Feed], bounds: dict[str, int], batch_ns: int, most: int) -> bool:
    """The tapes' load alone: `scheduler.deadlines`, second paragraph, on every record that comes.

    Each tape is emptied by passes of its own, and each pass takes as long as a full batch.
    """
    for new in feeds:
        waiting = [old for old in feeds if old.at <= new.at < old.at + bounds[old.tape]]
        for until in {old.at + bounds[old.tape] for old in waiting}:
            if until < new.at + bounds[new.tape]:
                continue
            mine = [old for old in waiting if old.at + bounds[old.tape] <= until]
            count = sum(
                passes([size for old in mine if old.tape == tape for size in old.sizes], most)
                for tape in bounds
            )
            if new.at + batch_ns * (1 + count) > until:
                return False
    return True


@settings(max_examples=20, phases=PHASES)
@given(
    st.integers(16, 40),
    st.sampled_from([1.0, 1.0, 0.5, 3.0]),
    st.integers(2, 40),
    st.integers(0, 10**6),
    st.sampled_from(ORDERINGS[:4]),
)
def test_a_bound_is_met_whenever_the_device_has_the_capacity(
    tokens: int, ratio: float, n: int, seed: int, ordering: Ordering
) -> None:
    """The tightest bound that the tapes' own load allows is met under a flood of everything else."""
    limits = Limits(
        max_batch_tokens=tokens,
        max_batch_requests=8,
        chunk_min=4,
        chunk_max=tokens,
        stream_share=(seed % 3) / 4,
    )
    run, rng = Run(FakeWorld(limits, blocks=800, host_blocks=50), ordering), random.Random(seed)
    span, batch_ns, most = 12_000, COSTS.batch_ns([(0, tokens)]), min(24, tokens)
    feeds = sorted(
        (
            Feed(
                rng.randrange(span),
                rng.choice("AB"),
                tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4))),
            )
            for _ in range(n)
        ),
        key=lambda feed: feed.at,
    )

    def bounds(first: int) -> dict[str, int]:
        return {"A": first, "B": int(first * ratio)}

    tight = next(
        first
        for first in range(2 * batch_ns, 200 * batch_ns, batch_ns // 4)
        if has_capacity(feeds, bounds(first), batch_ns, most)
    )
    for name, bound in bounds(tight).items():
        run.world.tape(name).staleness_ns = bound
    for feed in feeds:
        run.world.executor.at(feed.at, partial(run.feed, feed.tape, feed.sizes))
    requests = pool_load(run, rng, span, 60)
    run.run()
    assert len(run.late) == sum(len(feed.sizes) for feed in feeds)
    assert max(run.late) <= 0
    event("close to its bound", max(run.late) > -2 * batch_ns)
    for request in requests:
        run.world.answers.check(request)


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=150)
@given(st.lists(sizes, min_size=1, max_size=14), st.integers(9, 40), st.integers(1, 6), st.integers(9, 30))
def test_passes_are_never_more_than_counted(
    waiting: list[list[int]], tokens: int, rows: int, retention: int
) -> None:
    """Due tapes planned batch after batch, with as little room as the limits leave."""
    limits = Limits(max_batch_tokens=tokens, max_batch_requests=rows, chunk_min=1, chunk_max=9)
    memory = FakeMemory(1000)
    appends: list[TapeAppend] = []
    for n, lengths in enumerate(waiting):
        queue = deque(records(*lengths))
        for k, item in enumerate(queue):
            item.queue(100 * n + k, 0)
        appends.append(TapeAppend(FakeTape(memory, str(n), retention), queue, due=True))
    counted = Passes(limits)
    for append in appends:
        counted.add(append)
    took = 0
    while appends:
        for entry in plan(queues_of(appends), memory, limits).entries:
            assert isinstance(entry.work, TapeAppend)
            entry.work.take(entry.n)
            entry.work.due = True
        appends = [append for append in appends if append.queue]
        took += 1
    assert took <= counted.most
    event("exactly", took == counted.most)
