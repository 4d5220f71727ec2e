"""Theorem 2 and corollary 3 on regular arrival shuffled queues, against their bounds written out."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.theory.query_stream import QueryStream, overlap, ttfts
from tests.kit import tolerance
from tests.lab.theory.online import FCFS, LPM, serve
from tests.lab.theory.regular import RegularQueue

SEEDS = range(6)
DELTA = 0.02
# LPM far before FCFS, FCFS before LPM, both alike, another k, and with attention.
QUEUES = [
    RegularQueue(n=600, k=4, user=20, doc=2, gap=5),
    RegularQueue(n=900, k=2, user=20, doc=2, gap=12),
    RegularQueue(n=480, k=2, user=12, doc=4, gap=6),
    RegularQueue(n=1320, k=8, user=16, doc=1, gap=6),
    RegularQueue(n=480, k=2, user=12, doc=4, gap=8, c_attn=0.02),
]


def worst(queue: RegularQueue, seed: int, k: int | None, *, random_ties: bool = False) -> float:
    rng = np.random.default_rng([seed, 1])
    stream = queue.stream(np.random.default_rng(seed))
    order = serve(stream, k, c_attn=queue.c_attn, start=queue.backlog, rng=rng if random_ties else None)
    return max(ttfts(stream, order, c_attn=queue.c_attn, start=queue.backlog))


def test_a_regular_queue_is_what_definition_4_says() -> None:
    queue = RegularQueue(n=12, k=3, user=4, doc=2, gap=5)
    stream = queue.stream(np.random.default_rng(0))
    assert {len(prompt) for prompt in stream.prompts} == {6}
    assert set(Counter(prompt[:4] for prompt in stream.prompts).values()) == {3}
    pairs = {overlap(a, b) for i, a in enumerate(stream.prompts) for b in stream.prompts[:i]}
    assert pairs == {0, 4}
    assert sorted(stream.arrivals) == [5 * i for i in range(1, 13)]
    assert stream.arrivals != queue.stream(np.random.default_rng(1)).arrivals


@pytest.mark.parametrize("queue", QUEUES, ids=lambda q: f"k{q.k}-u{q.user}-s{q.gap}-c{q.c_attn}")
def test_on_every_seed_klpm_meets_its_bound_and_beats_both_others(queue: RegularQueue) -> None:
    assert 0 < queue.gap < queue.user
    assert queue.k > 1
    # The sizes are such that the bounds themselves are apart: this n is beyond corollary 3's n0.
    assert queue.separates(DELTA)
    start = queue.backlog
    for seed in SEEDS:
        ours = worst(queue, seed, queue.k)
        lpm, fcfs = worst(queue, seed, LPM, random_ties=True), worst(queue, seed, FCFS)
        assert ours <= queue.klpm_at_most(start)
        assert lpm >= queue.lpm_at_least(start, DELTA)
        assert fcfs >= queue.fcfs_at_least(start, DELTA)
        assert ours < min(lpm, fcfs)


@given(
    users=st.integers(1, 6),
    k=st.integers(1, 5),
    user=st.integers(1, 6),
    doc=st.integers(1, 4),
    gap=st.integers(0, 30),
    late=st.integers(0, 10),
    c_attn=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_klpms_bound_holds_for_every_order_of_arrival(
    users: int, k: int, user: int, doc: int, gap: int, late: int, c_attn: float, seed: int
) -> None:
    queue = RegularQueue(users * k, k, user, doc, gap, c_attn)
    assume(gap <= queue.token_time * (user + k * doc))
    stream = queue.stream(np.random.default_rng(seed))
    start = queue.backlog + late
    order = serve(stream, k, c_attn=c_attn, start=start)
    most = queue.klpm_at_most(start)
    assert max(ttfts(stream, order, c_attn=c_attn, start=start)) <= most + tolerance.of_float64(most)


def test_klpms_bound_is_attained_when_no_user_comes_twice_among_the_oldest() -> None:
    """Users arrive in turn: the oldest query of the last one waits for all other groups."""
    queue = RegularQueue(n=40, k=4, user=6, doc=2, gap=3)
    prompts = queue.stream(np.random.default_rng(0)).prompts
    rounds = tuple(3 * (10 * (i % 4) + i // 4 + 1) for i in range(40))
    stream = QueryStream(prompts, rounds)
    late = max(ttfts(stream, serve(stream, 4, start=queue.backlog), start=queue.backlog))
    bound = queue.klpm_at_most(queue.backlog)
    assert bound - (3 * queue.doc) == late  # the group's other documents come after its oldest query


def test_theorem_2_is_refused_where_it_does_not_hold() -> None:
    """Beyond gap = user + k · doc the paper's formula is below what k-LPM takes."""
    queue = RegularQueue(n=20, k=2, user=2, doc=1, gap=10)
    formula = queue.backlog + queue.n * (queue.user / 2 + queue.doc - queue.gap / 2)
    assert worst(queue, 0, 2) > formula
    with pytest.raises(ValueError, match="gap <= user"):
        queue.klpm_at_most(queue.backlog)


def test_bounds_ask_for_a_start_after_the_last_arrival() -> None:
    queue = RegularQueue(n=20, k=2, user=2, doc=1, gap=1)
    for bound in (
        queue.klpm_at_most,
        lambda t: queue.lpm_at_least(t, 0.1),
        lambda t: queue.fcfs_at_least(t, 0.1),
    ):
        with pytest.raises(ValueError, match="last arrival"):
            bound(19)


@pytest.mark.parametrize("queue", QUEUES[2:3])
def test_the_lower_bounds_become_the_papers_as_n_grows(queue: RegularQueue) -> None:
    """At a hundred times the length both are within (1 - 5 %) of the paper's leading terms."""
    large = replace(queue, n=queue.n * 100)
    shared, whole = large.user / large.k + large.doc, large.user + large.doc - large.gap
    assert 0.95 < (large.lpm_at_least(large.backlog, DELTA) - large.backlog) / (large.n * shared) < 1
    assert 0.95 < (large.fcfs_at_least(large.backlog, DELTA) - large.backlog) / (large.n * whole) < 1


def test_the_lower_bounds_are_missed_no_more_often_than_they_say() -> None:
    """At an even chance the bound is close to what happens, so a bound that is too high would show."""
    queue = RegularQueue(n=120, k=3, user=10, doc=2, gap=6)
    runs, delta = 200, 0.5
    bound = queue.lpm_at_least(queue.backlog, delta)
    missed = sum(worst(queue, seed, LPM, random_ties=True) < bound for seed in range(runs))
    assert missed <= delta * runs
    bound = queue.fcfs_at_least(queue.backlog, delta)
    assert sum(worst(queue, seed, FCFS) < bound for seed in range(runs)) <= delta * runs


def test_lpm_with_ties_to_the_oldest_is_klpm_on_a_regular_queue() -> None:
    """Theorem 2's bound on LPM rests on random ties: once a user is done all others tie."""
    queue = RegularQueue(n=120, k=3, user=10, doc=2, gap=6)
    for seed in SEEDS:
        stream = queue.stream(np.random.default_rng(seed))
        assert serve(stream, LPM, start=queue.backlog) == serve(stream, 3, start=queue.backlog)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"n": 10, "k": 3}, "does not divide"), ({"user": 0}, "1 or more"), ({"gap": -1}, "0 or more")],
)
def test_a_queue_with_impossible_numbers_is_refused(wrong: dict[str, int], says: str) -> None:
    right = {"n": 12, "k": 3, "user": 4, "doc": 2, "gap": 5}
    with pytest.raises(ValueError, match=says):
        RegularQueue(**{**right, **wrong})
