"""Thinned Poisson arrivals, against the statistics of all ticks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.plan.arrivals import arrivals
from lab.plan.load import Load

SECOND = 10**9


LENGTHS = st.sampled_from([SECOND // 4, SECOND, 15 * SECOND])


@given(
    st.floats(0.1, 1000),
    st.lists(LENGTHS, min_size=1, max_size=3),
)
def test_each_interval_has_its_first_and_its_last_tick(rate: float, intervals: list[int]) -> None:
    found = arrivals(Load(ticks=rate, seed=3), [intervals], 1, 20.0)
    times = [each.at_ns for each in found]
    assert times == sorted(times)
    assert all(0 <= at < 20 * SECOND for at in times)
    finest = min(intervals)
    numbers = [at // finest for at in times]
    assert all(numbers.count(number) <= 2 for number in set(numbers))
    assert found == arrivals(Load(ticks=rate, seed=3), [intervals], 1, 20.0)


@pytest.mark.parametrize("rate", [0.5, 3.0, 200.0])
def test_first_and_last_are_distributed_as_of_all_ticks(rate: float) -> None:
    n = 4000
    kept = [each.at_ns / SECOND for each in arrivals(Load(ticks=rate, seed=1), [[SECOND]], 1, float(n))]
    rng = np.random.default_rng(2)
    full = np.sort(rng.uniform(0, n, rng.poisson(rate * n)))
    for times in (kept, full):
        assert len(times)
    ours, theirs = (_ends(np.asarray(times), n) for times in (kept, full))
    assert ours == pytest.approx(theirs, abs=0.03)


def _ends(times: np.ndarray, n: int) -> list[float]:
    """Mean place of the first and of the last tick in an interval, and the share of intervals with any."""
    numbers = times.astype(int)
    first = np.unique(numbers, return_index=True)[1]
    last = np.append(first[1:], len(times)) - 1
    return [
        float((times[first] - numbers[first]).mean()),
        float((times[last] - numbers[last]).mean()),
        len(first) / n,
    ]


def test_asks_and_prompts_come_at_their_rates() -> None:
    load = Load(ticks=1, asks=50, asks_standing=0, prompts=20)
    found = arrivals(load, [[SECOND]] * 3, 3, 100.0)
    asks = [each for each in found if each.kind == "ask"]
    assert len(asks) == pytest.approx(5000, rel=0.1)
    assert {each.of for each in asks} == {0, 1, 2}
    assert sum(each.kind == "prompt" for each in found) == pytest.approx(2000, rel=0.15)
