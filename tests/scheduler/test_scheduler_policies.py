"""Policies and both phases against the papers' descriptions, modelled with plain lists."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from scheduler.allocation import allocate, prefers_swap
from scheduler.grouping import Grouping
from scheduler.interfaces import Limits, PriorityClass
from scheduler.planner import Plan, plan
from scheduler.policies import KEYS, NAMES, Ordering
from scheduler.queues import Queues
from scheduler.request import LifecycleEvent, Request, State
from scheduler.tapes import Work
from tests.kit.scheduler.fakes import FakeMemory, request_of
from tests.kit.scheduler.harness import events
from tests.kit.scheduler.simulated import LinearCosts
from tests.kit.scheduler.worlds import COSTS, FakeWorld, Run

POOL = PriorityClass.POOL


class Pool:
    """POOL requests put into any state by hand."""

    def __init__(self, blocks: int = 10_000, policy: str = "fcfs") -> None:
        self.memory = FakeMemory(blocks)
        self.queues = Queues(Ordering(policy).key)
        self.live: list[Request] = []
        self._numbers, self._admissions, self._displaced = count(1), count(1), count(1)
        self._time = count(1)

    def arrives(self, prompt: int = 12, *, complete: bool = True, max_tokens: int = 4) -> Request:
        request = request_of(self.memory, list(range(prompt)), max_tokens, POOL, complete=complete)
        request.id, request.last_chunk_ns = next(self._numbers), next(self._time)
        self.live.append(request)
        self.queues.requests[request.id] = request
        self.queues.update(request)
        return request

    def computes(self, request: Request, n: int) -> None:
        """It is admitted, if it was not, and gets `n` tokens into KV."""
        if request.state is State.QUEUED:
            request.state, request.admitted = State.RUNNING, next(self._admissions)
        request.open()
        reader = request.reader
        tokens = request.next_tokens(min(n, request.remaining))
        assert reader.acquire(len(tokens))
        reader.write(tokens)
        self.queues.update(request)

    def chunk(self, request: Request, prompt: Sequence[int]) -> None:
        request.replace(prompt, next(self._time))
        self.queues.update(request, prompt=True)

    def finishes(self, request: Request) -> None:
        request.complete, request.last_chunk_ns = True, next(self._time)
        self.queues.update(request)

    def preempted(self, request: Request, by: Work | None = None) -> None:
        request.preempt(LifecycleEvent.PREEMPTED_RECOMPUTE, next(self._displaced), 0, 0)
        self.queues.update(request)

    def order(self, policy: str) -> list[Request]:
        return sorted(self.live, key=KEYS[policy])


# Section 4.4, policy by policy.

histories = st.lists(
    st.tuples(st.sampled_from("aacccpuf"), st.integers(0, 99), st.integers(1, 9)), max_size=40
)


@settings(max_examples=150)
@given(histories)
def test_orders_are_those_of_the_paper(history: list[tuple[str, int, int]]) -> None:
    """Random histories; queues, tiers and counts kept as the sentences of section 4.4 say."""
    pool = Pool()
    running: list[Request] = []
    waiting: list[Request] = []
    chunks: list[Request] = []  # by newest chunk, the oldest first
    for what, which, n in history:
        chosen = pool.live[which % len(pool.live)] if pool.live else None
        if what == "a" or chosen is None:
            chosen = pool.arrives(n, complete=n % 2 == 0)
            waiting.append(chosen)  # "processing new requests in FIFO order"
            chunks.append(chosen)
        elif what == "c" and chosen.remaining:
            if chosen in waiting:
                waiting.remove(chosen)
                running.append(chosen)  # "maintains their current execution order"
            pool.computes(chosen, n)
        elif what == "p" and chosen in running:
            pool.preempted(chosen)
            running.remove(chosen)
            waiting.insert(0, chosen)  # "re-queued at the front of the waiting queue"
        elif what in "uf" and not chosen.complete:
            if what == "u":
                pool.chunk(chosen, [*chosen.prompt[: n - 1], 99])
            else:
                pool.finishes(chosen)
            chunks.remove(chosen)
            chunks.append(chosen)
    full = [request for request in pool.live if request.complete]
    partial = [request for request in pool.live if not request.complete]
    assert pool.order("vllm") == [*running, *waiting]
    assert pool.order("fcfs") == [*full, *partial]
    latest = chunks[::-1]
    assert pool.order("lcas") == [*(r for r in latest if r.complete), *(r for r in latest if not r.complete)]
    assert pool.order("lcas-fair") == [
        *(r for r in chunks if r.complete),
        *(r for r in latest if not r.complete),
    ]
    most: list[Request] = []
    for computed in sorted({request.computed for request in pool.live}, reverse=True):
        most += [request for request in pool.live if request.computed == computed]
    assert pool.order("mcps") == most


def test_lcas_starves_a_finished_prompt_for_as_long_as_newer_ones_finish_and_lcas_fair_does_not() -> None:
    pool = Pool()
    oldest = pool.arrives()
    for _ in range(20):
        pool.arrives()
        assert pool.order("lcas")[-1] is oldest
        assert pool.order("lcas-fair")[0] is oldest


@pytest.mark.parametrize("name", [name for name in NAMES if name not in KEYS])
def test_policies_by_prefix_order_the_admitted_as_vllm_does(name: str) -> None:
    assert Ordering(name).key is KEYS["vllm"]


# Phase 1 changes nothing; phase 2 takes from the tail.

limits = st.builds(
    Limits,
    max_batch_tokens=st.integers(8, 30),
    max_batch_requests=st.integers(2, 8),
    chunk_min=st.integers(1, 4),
    chunk_max=st.integers(4, 10),
    cell_budget_fraction=st.sampled_from([0.3, 0.6, 1.0]),
    grouping=st.booleans(),
)


def seen(pool: Pool) -> list[object]:
    """The observable state of a pool and its requests."""
    states = [
        (r.state, r.computed, r.blocks, [*r.events], [*r.prompt], [*r.output], r.reader) for r in pool.live
    ]
    positions = [pool.queues.position(r) for r in pool.live]
    return [pool.memory.free_blocks, list(pool.queues.walk()), positions, states]


def crowded(seed: int, policy: str, blocks: int = 12) -> Pool:
    """A pool in which a few requests hold most of the blocks, and more want some."""
    pool, rng = Pool(blocks, policy), random.Random(seed)
    requests = [
        pool.arrives(rng.randint(2, 24), complete=rng.random() < 0.7) for _ in range(rng.randint(3, 9))
    ]
    for request in rng.sample(requests, len(requests)):
        most = (
            24 if not request.complete and rng.random() < 0.5 else rng.randint(0, 12)
        )  # many wait for input
        n = min(most, request.remaining, pool.memory.free_blocks * 4)
        if n:
            pool.computes(request, n)
    return pool


@settings(max_examples=150)
@given(limits, st.sampled_from(sorted(KEYS)), st.integers(0, 10**6))
def test_phase_1_changes_nothing(limits: Limits, policy: str, seed: int) -> None:
    pool = crowded(seed, policy)
    before = seen(pool)
    grouping = Grouping() if limits.grouping else None
    first = plan(pool.queues, pool.memory, limits, grouping)
    assert seen(pool) == before
    assert plan(pool.queues, pool.memory, limits, grouping) == first
    order = [work for work in pool.queues.walk() if work in {entry.work for entry in first.entries}]
    assert [entry.work for entry in first.entries] == order
    assert sum(entry.n for entry in first.entries) <= limits.max_batch_tokens


@settings(max_examples=300)
@given(limits, st.sampled_from(sorted(KEYS)), st.integers(0, 10**6))
def test_phase_2_takes_from_the_unplanned_then_from_the_planned_the_last_first(
    limits: Limits, policy: str, seed: int
) -> None:
    pool = crowded(seed, policy)
    chosen = plan(pool.queues, pool.memory, replace(limits, grouping=False, high_water=1.0))
    expected = victims_by_hand(pool, chosen)
    victims: list[tuple[Request, Work]] = []

    def preempt(victim: Request, by: Work) -> None:
        victims.append((victim, by))
        pool.preempted(victim)

    got = allocate(chosen, pool.queues, pool.memory, preempt)
    event("victims", min(len(victims), 3))
    assert victims == expected
    assert not {victim for victim, _ in victims} & {entry.work for entry in got.entries}


def victims_by_hand(pool: Pool, chosen: Plan) -> list[tuple[Request, Work]]:
    """Plain counting, with section 4.1's lists of the scheduled and the not scheduled, in priority order."""
    running = sorted((r for r in pool.live if r.state is State.RUNNING), key=pool.queues.key)
    everybody = sorted(pool.live, key=pool.queues.key)
    scheduled = [entry.work for entry in chosen.entries]
    blocks_of = {request: request.blocks for request in running}
    free = pool.memory.free_blocks
    size = pool.memory.block_size
    gone: set[Work] = set()
    victims: list[tuple[Request, Work]] = []

    def starved(other: Request) -> bool:
        return not other.complete and not other.remaining

    for entry in chosen.entries:
        work = entry.work
        assert isinstance(work, Request)
        if work in gone:
            continue
        rank = everybody.index(work)
        lower = [other for other in reversed(running) if everybody.index(other) > rank]
        if work.complete:  # what waits for input makes room for what does not, whatever its rank
            lower += [o for o in reversed(running) if everybody.index(o) < rank and starved(o)]
        candidates = [other for other in lower if other not in scheduled]
        candidates += [other for other in lower if other in scheduled]
        need = max(0, -(-(work.computed + entry.n) // size) - blocks_of.get(work, 0))
        for victim in candidates:
            if need <= free:
                break
            if blocks_of.get(victim):
                free += blocks_of.pop(victim)
                gone.add(victim)
                victims.append((victim, work))
        if need <= free:
            taken = need
        elif entry is chosen.entries[0]:
            taken = free  # as much of it as there is room for
        else:
            continue
        free -= taken
        blocks_of[work] = blocks_of.get(work, 0) + taken
    return victims


# How a victim leaves (section 4.3).


@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 40))
def test_the_cheaper_way_is_the_victims_own_both_directions_counted(
    computed: int, block_ns: int, token_ns: int
) -> None:
    pool = Pool()
    victim = pool.arrives(41)
    pool.computes(victim, computed)
    costs = LinearCosts(token_ns=token_ns, block_ns=block_ns)
    assert prefers_swap(victim, "cost", costs) == (2 * -(-computed // 4) * block_ns < computed * token_ns)
    assert prefers_swap(victim, "swap", costs)
    assert not prefers_swap(victim, "recompute", costs)
    assert not prefers_swap(victim, "cost", None)


def test_kv_that_updates_rarely_leave_is_not_worth_saving() -> None:
    pool = Pool()
    victim, costs = pool.arrives(20, complete=False), LinearCosts(token_ns=10, block_ns=15)
    pool.computes(victim, 16)
    assert prefers_swap(victim, "cost", costs), "120 both ways, 160 again"
    for n in range(6):
        pool.chunk(victim, [100 + n] * 20)
        pool.computes(victim, 16)
    assert not prefers_swap(victim, "cost", costs)
    pool.finishes(victim)
    assert prefers_swap(victim, "cost", costs), "no more updates come"


def squeezed(host_blocks: int, eviction: str, costs: LinearCosts = COSTS) -> tuple[list[Request], FakeWorld]:
    """A session's question, and the prompt that has the most of the 12 blocks it needs."""
    limits = Limits(
        max_batch_tokens=32,
        max_batch_requests=4,
        chunk_min=16,
        chunk_max=32,
        cell_budget_fraction=1.0,
        high_water=1.0,
        eviction=eviction,
        grouping=False,
        max_drafts=0,
    )
    over = FakeWorld(limits, 12, host_blocks)
    over.costs = costs
    run = Run(over, Ordering("fcfs"))
    first, second = (run.world.request(cls, [cls] * 16, 16) for cls in (PriorityClass.SESSION, POOL))
    run.scheduler.submit(second)
    for _ in range(9):
        run.scheduler.step()
    run.scheduler.submit(first)
    run.run()
    for request in (first, second):
        run.world.answers.check(request)
    return [first, second], run.world


SWAP, RECOMPUTE = LifecycleEvent.PREEMPTED_SWAP, LifecycleEvent.PREEMPTED_RECOMPUTE


@pytest.mark.parametrize(
    ("host_blocks", "eviction", "way"),
    [
        (12, "swap", SWAP),
        (0, "swap", RECOMPUTE),
        (12, "recompute", RECOMPUTE),
        (12, "cost", SWAP),
        (0, "cost", RECOMPUTE),
    ],
)
def test_a_swap_that_fails_falls_back_to_recompute(
    host_blocks: int, eviction: str, way: LifecycleEvent
) -> None:
    (first, second), world = squeezed(host_blocks, eviction)
    assert not {SWAP, RECOMPUTE} & {*events(first)}
    assert {SWAP, RECOMPUTE} & {*events(second)} == {way}
    assert (second.swapped_tokens > 0, second.recomputed_tokens > 0) == (way is SWAP, way is RECOMPUTE)
    assert second.preempted_by == [first.id] * len(second.preempted_by)
    assert not world.tier.stored
    assert world.memory.free_blocks == 12


@pytest.mark.parametrize(
    ("costs", "way"),
    [
        (LinearCosts(token_ns=100, block_ns=1), SWAP),
        (LinearCosts(token_ns=1, block_ns=100), RECOMPUTE),
    ],
)
def test_the_cheaper_way_is_taken_whichever_it_is(costs: LinearCosts, way: LifecycleEvent) -> None:
    (_, victim), world = squeezed(12, "cost", costs)
    assert {SWAP, RECOMPUTE} & {*events(victim)} == {way}
    assert not world.tier.stored
