"""The order of all waiting requests against algorithm 1, one choice at a time."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scheduler.orders import rank
from tests.lab.theory.online import FCFS, LPM, choose


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=30),
    st.sampled_from([1, 2, 3, 7, None]),
    st.integers(0, 5),
)
def test_ranking_all_equals_choosing_one_by_one(
    waiting: list[tuple[int, int]], k: int | None, step: int
) -> None:
    arrivals = np.array([age for age, _ in waiting], np.int64)
    matches = np.array([match for _, match in waiting], np.int64)
    left, one_by_one = np.arange(len(waiting)), []
    for at in range(step, step + len(waiting)):
        place = choose(at, k, arrivals[left], matches[left])
        one_by_one.append(int(left[place]))
        left = np.delete(left, place)
    assert list(rank(k, arrivals, matches, step=step)) == one_by_one


def test_k_1_is_fcfs_and_an_endless_k_is_lpm_after_the_oldest() -> None:
    arrivals, matches = np.array([3, 0, 2, 1]), np.array([9, 0, 7, 8])
    assert list(rank(FCFS, arrivals, matches)) == [1, 3, 2, 0]
    assert list(rank(LPM, arrivals, matches)) == [0, 3, 2, 1]
    assert list(rank(1000, arrivals, matches)) == [1, 0, 3, 2]


def test_under_k_lpm_the_ith_oldest_request_is_among_the_first_k_i_choices() -> None:
    """The starvation LPM knows and k-LPM does not: the i-th oldest goes within its first k·i choices."""
    n, k = 60, 4
    matches = np.arange(n)[::-1].copy()
    matches[0] = -1
    order = list(rank(k, np.arange(n), matches))
    assert all(order.index(i) <= k * i for i in range(n))
    assert list(rank(LPM, np.arange(n), matches))[-1] == 0


def test_a_k_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^k must"):
        next(rank(0, np.array([1]), np.array([1])))


def test_ten_thousand_waiting_are_ranked_lazily() -> None:
    rng = np.random.default_rng(1)
    arrivals, matches = np.arange(10_000), rng.integers(0, 8192, 10_000)
    head = list(islice(rank(4, arrivals, matches), 256))
    assert head == list(rank(4, arrivals, matches))[:256]
    assert head[0] == 0
    assert matches[head[1]] == matches.max()
