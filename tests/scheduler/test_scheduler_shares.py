"""Tenants' shares against a brute-force reference; in the scheduler fair to several, nothing new to one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.fair_queue import LEAST, MOST, UNIT, Shares, check_weight, virtual
from scheduler.interfaces import Limits, PriorityClass
from scheduler.policies import Ordering
from scheduler.prefix_queue import PrefixQueue
from scheduler.request import LifecycleEvent, Request, State
from tests.kit.scheduler.worlds import ORDERINGS, FakeWorld, Run
from tests.scheduler.test_scheduler_prefix_queue import Index, Waiting

FLASH, SESSION, POOL, STREAM = PriorityClass
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}


@dataclass
class Asked:
    tenant: str
    cells: int
    start: Fraction
    end: Fraction
    state: str = "waiting"


class Reference:
    """Start-time fair queueing with fractions, which looks at all requests there ever were."""

    def __init__(self) -> None:
        self.all: list[Asked] = []

    @property
    def now(self) -> Fraction:
        return max((each.start for each in self.all if each.state == "admitted"), default=Fraction(0))

    def arrive(self, tenant: str, cells: int) -> Asked:
        mine = [each for each in self.all if each.tenant == tenant]
        if any(each.state == "waiting" for each in mine):
            last = mine[-1].end
        else:
            last = max((each.end for each in mine if each.state == "admitted"), default=Fraction(0))
        start = max(self.now, last)
        self.all.append(Asked(tenant, cells, start, start + Fraction(cells) / Fraction(WEIGHTS[tenant])))
        return self.all[-1]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "admit", "admit", "leave"]),
        st.sampled_from(sorted(WEIGHTS)),
        st.integers(1, 60),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_starts_are_those_of_the_reference(operations: list[tuple[str, str, int]]) -> None:
    """Whatever arrives, is admitted first or further down, and is given up."""
    shares, reference = Shares(), Reference()
    waiting: list[tuple[Asked, int]] = []
    for what, tenant, n in operations:
        if what == "arrive":
            # cells that both weights divide exactly
            asked = reference.arrive(tenant, 3 * n)
            start = shares.arrive(tenant, virtual(3 * n, WEIGHTS[tenant]))
            assert start == asked.start * UNIT
            waiting.append((asked, start))
        elif waiting:
            waiting.sort(key=lambda each: each[1])
            asked, start = waiting.pop(0 if n % 3 else n % len(waiting))
            asked.state = "admitted" if what == "admit" else "left"
            if what == "admit":
                shares.admit(asked.tenant, start, virtual(asked.cells, WEIGHTS[asked.tenant]))
            else:
                shares.leave(asked.tenant)
        assert shares.now == reference.now * UNIT


def assert_fair(served: Sequence[tuple[str, int]], weights: dict[str, float], backlogged: set[str]) -> None:
    """Theorem 1 in every interval: (tenant, cells) served while all ``backlogged`` tenants wait."""
    longest = {each: max((n for who, n in served if who == each), default=0) for each in backlogged}
    for first in range(len(served)):
        got = dict.fromkeys(backlogged, 0.0)
        for tenant, cells in served[first:]:
            got[tenant] += cells / weights[tenant]
            for one in backlogged:
                for other in backlogged:
                    bound = longest[one] / weights[one] + longest[other] / weights[other]
                    assert abs(got[one] - got[other]) <= bound + 1e-3


SIZES = st.lists(st.integers(1, 40), min_size=30, max_size=30)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from("abc"), SIZES, min_size=2), st.integers(5, 25))
def test_waiting_tenants_get_what_their_weights_say(sizes: dict[str, list[int]], served: int) -> None:
    shares = Shares()
    waiting: list[tuple[int, int, str, int]] = []
    number = 0
    for row in zip(*sizes.values(), strict=True):
        for tenant, cells in zip(sizes, row, strict=True):
            number += 1
            waiting.append((shares.arrive(tenant, virtual(cells, WEIGHTS[tenant])), number, tenant, cells))
    got: list[tuple[str, int]] = []
    while len({tenant for _, _, tenant, _ in waiting}) == len(sizes) and len(got) < served:
        waiting.sort()
        start, _, tenant, cells = waiting.pop(0)
        shares.admit(tenant, start, virtual(cells, WEIGHTS[tenant]))
        got.append((tenant, cells))
    assert_fair(got, WEIGHTS, set(sizes))


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from("abc"), SIZES, min_size=2), st.sampled_from([None, 1, 2, 3]))
def test_prefixes_order_a_tenants_requests_and_weights_the_tenants(
    sizes: dict[str, list[int]], k: int | None
) -> None:
    """Each tenant's requests come as if it were alone, and the tenants' turns are fair."""
    queue = PrefixQueue(Index(), lambda: k)
    alone = {tenant: PrefixQueue(Index(), lambda: k) for tenant in sizes}
    requests: dict[int, tuple[str, int]] = {}
    number = 0
    for row in zip(*sizes.values(), strict=True):
        for tenant, cells in zip(sizes, row, strict=True):
            number += 1
            requests[number] = tenant, cells
            waiting = Waiting(number, [cells % 5], "", tenant, virtual(cells, WEIGHTS[tenant]))
            queue.add(waiting)
            alone[tenant].add(waiting)
    walked = [request.id for request in queue]
    assert sorted(walked) == sorted(requests)
    got: list[tuple[str, int]] = []
    admitted: list[int] = []
    while min(map(len, alone.values())):
        first = next(iter(queue))
        tenant = requests[first.id][0]
        assert first is next(iter(alone[tenant]))
        queue.admitted(first)
        alone[tenant].admitted(first)
        got.append(requests[first.id])
        admitted.append(first.id)
    assert_fair(got, WEIGHTS, set(sizes))
    assert walked[: len(admitted)] == admitted


LIMITS = Limits(
    max_batch_tokens=24,
    max_batch_requests=6,
    chunk_min=3,
    chunk_max=8,
    cell_budget_fraction=0.5,
    high_water=1.0,
)


def of_tenant(request: Request, tenant: str, weight: float) -> Request:
    return Request(replace(request.spec, tenant=tenant, weight=weight))


@pytest.mark.parametrize(
    "ordering",
    [each for each in ORDERINGS if "mcps" not in each.name and "lcas" not in each.name],
    ids=lambda each: each.name,
)
@pytest.mark.parametrize("cls", [SESSION, POOL])
def test_a_flood_of_one_tenant_does_not_starve_another(ordering: Ordering, cls: PriorityClass) -> None:
    """40 requests of one tenant wait; 12 of another, of three times the weight, arrive later."""
    over = FakeWorld(LIMITS, blocks=24)
    over.tape("A")
    run = Run(over, ordering)
    weights = {"flood": 1.0, "late": 3.0}
    made: list[Request] = []

    def ask(tenant: str, n: int) -> None:
        session = "A" if cls is SESSION else ""
        made.append(
            of_tenant(over.request(cls, [n % 90, n // 90, 5, 6], 2, session), tenant, weights[tenant])
        )
        run.scheduler.submit(made[-1])

    for n in range(40):
        ask("flood", n)
    for _ in range(3):
        run.scheduler.step()
    for n in range(40, 52):
        ask("late", n)
    run.run()
    assert all(request.state is State.FINISHED for request in made)
    admitted = sorted(
        (each for each in made), key=lambda each: (each.first(LifecycleEvent.SCHEDULED), each.admitted)
    )
    order = [each.spec.tenant for each in admitted]
    since = order.index("late")
    last = len(order) - 1 - order[::-1].index("late")
    assert order[since:last].count("flood") <= 12 / 3 + 2
    assert since <= 12, "those that were there before have gone on"


LOADS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "pool", "pool", "stream", "extend", "finish", "cancel", "feed", "step"]
        ),
        st.integers(1, 14),
        st.integers(1, 5),
    ),
    max_size=40,
)


def played(
    load: list[tuple[str, int, int]], ordering: Ordering, tenant: str | None, weight: float = 1.0
) -> list[tuple[object, ...]]:
    """What became of every request, with all its times; tenant None: a scheduler without shares."""
    over = FakeWorld(LIMITS, blocks=24, host_blocks=6)
    over.tape("A")
    run = Run(over, ordering)
    if tenant is None:
        run.scheduler._live.shares.clear()
    made: list[Request] = []
    open_ = []
    for n, (what, size, new) in enumerate(load):
        prompt = [(n * 31 + k) % 90 if k > 3 else k for k in range(size)]
        if what in ("ask", "pool", "stream"):
            cls = SESSION if what == "ask" else POOL
            request = over.request(cls, prompt, new, "A" if what == "ask" else "", complete=what != "stream")
            made.append(of_tenant(request, tenant or "", weight))
            run.scheduler.submit(made[-1])
            open_ += [made[-1].id] * (what == "stream")
        elif what in ("extend", "finish") and open_:
            if what == "extend":
                run.scheduler.extend(open_[size % len(open_)], prompt)
            else:
                run.scheduler.finish(open_.pop(size % len(open_)))
        elif what == "cancel" and made:
            run.scheduler.cancel(made[size % len(made)].id)
        elif what == "feed":
            run.feed("A", [new])
        else:
            run.scheduler.step()
    for number in open_:
        run.scheduler.finish(number)
    run.run()
    return [(r.id, r.state, r.output, r.events, r.cached_tokens, r.preempted_by, r.waits) for r in made]


@settings(max_examples=120)
@given(LOADS, st.sampled_from(ORDERINGS), st.sampled_from([0.25, 1.0, 7.0]))
def test_one_tenant_alone_is_scheduled_as_if_there_were_no_shares(
    load: list[tuple[str, int, int]], ordering: Ordering, weight: float
) -> None:
    """Batch for batch, with preemptions, streams and cancellations, under every policy."""
    before = played(load, ordering, None)
    assert played(load, ordering, "") == before
    assert played(load, ordering, "desk", weight) == before


@pytest.mark.parametrize("weight", [0.0, -1.0, LEAST / 2, MOST * 2, float("nan"), float("inf")])
def test_a_weight_has_bounds(weight: float) -> None:
    check_weight(LEAST)
    check_weight(MOST)
    assert virtual(1, MOST) > 0
    with pytest.raises(ValueError, match="weight"):
        check_weight(weight)
    with pytest.raises(ValueError, match="weight"):
        of_tenant(FakeWorld(LIMITS).request(POOL, [1], 1), "desk", weight)
