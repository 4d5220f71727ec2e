"""Definitions 1 and 2, the three orders, and the paper's worked example."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.theory.query_stream import QueryStream, completions, overlap, ttfts
from tests.lab.theory.online import FCFS, LPM, choose, serve

prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=9
).map(tuple)


@st.composite
def streams(draw: st.DrawFn) -> QueryStream:
    found = draw(prompts)
    arrivals = draw(st.lists(st.integers(0, 12), min_size=len(found), max_size=len(found)))
    return QueryStream(found, tuple(arrivals))


def test_the_papers_example_has_ttft_40_under_fcfs_and_30_under_lpm() -> None:
    user = [(1,) * 5, (2,) * 5]
    queries = tuple(user[i % 2] + (10 + i,) * 5 for i in range(4))
    burst = QueryStream(queries, (0,) * 4)
    assert serve(burst, FCFS) == (0, 1, 2, 3)
    assert ttfts(burst, (0, 1, 2, 3)) == (10, 20, 30, 40)
    for k in (LPM, 2):
        assert serve(burst, k) == (0, 2, 1, 3)
        assert [ttfts(burst, serve(burst, k))[query] for query in (0, 2, 1, 3)] == [10, 15, 25, 30]
    calm = QueryStream(queries, (0, 10, 20, 30))
    assert ttfts(calm, serve(calm, FCFS)) == (10,) * 4


def test_definition_2_by_hand_with_attention_waiting_and_the_previous_prompt_only() -> None:
    stream = QueryStream(((1, 2, 3, 4), (1, 2, 9), (1, 2, 3, 4)), (0, 50, 7))
    # 4 for the first, without attention; then at 7 nothing is left to compute; then one token of three at 50.
    assert completions(stream, (0, 2, 1), c_attn=0.5) == (4, 50 + (1 + 0.5 * 3) * 1, 7)
    # The middle prompt displaces the first: of four tokens two are computed again.
    assert completions(stream, (0, 1, 2), c_attn=0.5) == (4, 52.5, 52.5 + (1 + 0.5 * 4) * 2)


def test_the_first_query_costs_its_length_and_waits_for_its_own_arrival_and_the_start() -> None:
    stream = QueryStream(((1, 2, 3), (4,)), (5, 0))
    assert completions(stream, (0, 1), c_attn=1.0) == (8, 10)
    assert completions(stream, (1, 0)) == (8, 1)
    assert completions(stream, (1, 0), start=20) == (24, 21)


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (0, 1, 1)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 queries"):
        completions(QueryStream(((1,), (2,)), (0, 0)), order)


@pytest.mark.parametrize(
    ("found", "arrivals", "says"),
    [
        (((1,),), (), "1 prompts but 0 arrival"),
        (((),), (0,), "query 0 has an empty prompt"),
        (((1,),), (-1,), "query 0 arrives at -1"),
        (((1,),), (float("nan"),), "must be finite"),
    ],
)
def test_invalid_streams_are_refused(
    found: tuple[tuple[int, ...], ...], arrivals: tuple[float, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        QueryStream(found, arrivals)


@given(prompts)
def test_a_row_of_matches_is_the_overlap_with_each_prompt(found: tuple[tuple[int, ...], ...]) -> None:
    stream = QueryStream(found, (0,) * len(found))
    assert stream.matches(None).tolist() == [0] * len(found)
    for previous, prompt in enumerate(found):
        assert stream.matches(previous).tolist() == [overlap(prompt, other) for other in found]


@given(streams(), st.sampled_from([1, 2, 3, None]), st.integers(0, 40))
def test_online_orders_follow_algorithm_1(stream: QueryStream, k: int | None, start: int) -> None:
    """An independent replay: at each step the choice is the oldest, or a longest match, of those arrived."""
    order = serve(stream, k, start=start)
    done = completions(stream, order, start=start)
    now: float = start
    for step, query in enumerate(order):
        left = order[step:]
        now = max(now, min(stream.arrivals[q] for q in left))
        here = [q for q in left if stream.arrivals[q] <= now]
        assert query in here
        if k is not None and step % k == 0:
            assert stream.arrivals[query] == min(stream.arrivals[q] for q in here)
        elif step:
            prompt = stream.prompts[order[step - 1]]
            matches = {q: overlap(prompt, stream.prompts[q]) for q in here}
            assert matches[query] == max(matches.values())
        now = done[query]


def test_ties_go_to_the_oldest_or_with_a_random_source_to_any() -> None:
    arrivals, matches = np.array([5, 1, 3]), np.array([2, 2, 1])
    assert choose(1, LPM, arrivals, matches) == 1
    rng = np.random.default_rng(0)
    assert {choose(1, LPM, arrivals, matches, rng) for _ in range(50)} == {0, 1}
