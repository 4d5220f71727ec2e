"""Theorem 4 against every order of small streams; theorem 1's instances; the certificate's soundness."""

import math
import random
from fractions import Fraction
from itertools import combinations, permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab.theory.feasible import TooWide, feasible
from lab.theory.query_stream import QueryStream, overlap, ttfts
from tests.lab.theory.partition import ThreePartition, solvable, unsolvable


@st.composite
def small_streams(draw: st.DrawFn) -> QueryStream:
    """Up to six queries, with shared prefixes, bursts, and gaps long enough to warm the cache in."""
    found = draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), min_size=1, max_size=6)
    )
    arrivals = draw(st.lists(st.integers(0, 14), min_size=len(found), max_size=len(found)))
    return QueryStream(tuple(found), tuple(arrivals))


def late_counts(stream: QueryStream, ttft: float, c_attn: float) -> list[tuple[int, bool]]:
    """For every order: how many are late, and whether all of those stand at its end."""
    found = []
    for order in permutations(range(len(stream))):
        times = ttfts(stream, order, c_attn=c_attn)
        late = [times[query] > ttft for query in order]
        found.append((sum(late), late == sorted(late)))
    return found


# A query that must be late, and one that is on time only if the late one warms the cache for it.
warming = QueryStream(((1, 1, 1, 1), (1, 1, 0, 1)), (0, 9))


@given(
    small_streams(),
    st.integers(1, 12),
    st.sampled_from([0, 0.1, 0.25, 0.34, 0.5, 0.9]),
    st.sampled_from([0.0, 0.5]),
)
@example(warming, 3, 0.5, 0.0)
def test_the_verdict_agrees_with_every_order_of_a_small_stream(
    stream: QueryStream, ttft: int, p: float, c_attn: float
) -> None:
    n = len(stream)
    orders = late_counts(stream, ttft, c_attn)
    verdict = feasible(stream, ttft, p, c_attn=c_attn)
    assert verdict.none_meets_all == (min(late for late, _ in orders) > 0)
    assert verdict.allowed_late == math.floor(Fraction(str(p)) * n)
    # With late queries the search looks at those orders that have them at the end, and misses none.
    assert (verdict.order is not None) == any(late <= verdict.allowed_late and tail for late, tail in orders)
    if verdict.order is None:
        assert verdict.none_meets_all
        return
    times = ttfts(stream, verdict.order, c_attn=c_attn)
    assert verdict.ttfts == times
    assert verdict.late == sum(time > ttft for time in times) <= verdict.allowed_late
    # The (1 - p) percentile itself: the least value that this fraction of the queries does not exceed.
    share = math.ceil((1 - Fraction(str(p))) * n)
    assert sorted(times)[share - 1] <= ttft
    if not verdict.none_meets_all:
        assert max(times) <= ttft


@given(small_streams(), st.integers(1, 12))
def test_a_narrow_search_may_find_less_but_never_claims_more(stream: QueryStream, ttft: int) -> None:
    infeasible = min(late for late, _ in late_counts(stream, ttft, 0.0)) > 0
    try:
        verdict = feasible(stream, ttft, 0.5, states=2, beam=1)
    except TooWide:
        return
    assert infeasible or not verdict.none_meets_all
    if verdict.order is not None:
        assert sum(t > ttft for t in ttfts(stream, verdict.order)) <= verdict.allowed_late


def test_dropping_queries_can_make_a_stream_infeasible_so_no_certificate_comes_from_a_part() -> None:
    """The gap in the proof of theorem 4: the dropped query warmed the cache while the machine was idle."""
    ttft = 3
    whole = QueryStream(((1, 2, 3), (1, 2, 4, 5)), (0, 10))
    rest = QueryStream(whole.prompts[1:], whole.arrivals[1:])
    assert not feasible(whole, ttft, 0).none_meets_all
    assert feasible(rest, ttft, 0).none_meets_all


def test_the_proofs_own_blocks_would_give_a_false_certificate() -> None:
    """T = 3, p = 1/20: blocks of 2T/p = 120 queries, of which the proof drops the last 2T = 6.

    The queries come in pairs whose first warms the cache for the second, and one pair lies across the end
    of the first block. No query is a prefix of another.
    """
    ttft, block, dropped = 3, 120, 6
    pairs = [(((7, i, 0), 20 * i + 5), ((7, i, 1, 2, 3), 20 * i + 15)) for i in range(119)]
    queries = [((8,), 0), *(query for pair in pairs for query in pair), ((9,), 20 * 119)]
    prompts, arrivals = zip(*queries, strict=True)
    verdict = feasible(QueryStream(prompts, arrivals), ttft, 0.05)
    assert (verdict.late, verdict.none_meets_all) == (0, False)
    kept = [query for at, query in enumerate(queries) if at % block < block - dropped]
    assert len(queries) - len(kept) == 0.05 * len(queries)
    prompts, arrivals = zip(*kept, strict=True)
    assert feasible(QueryStream(prompts, arrivals), ttft, 0).none_meets_all


def test_the_search_is_linear_in_the_length_while_the_ttft_is_bounded() -> None:
    """Ten times the queries, ten times the partial schedules: the bound on them decides, not the clock."""

    def bursts(n: int) -> QueryStream:
        prompts = tuple((i % 4, i) for i in range(4 * n))
        return QueryStream(prompts, tuple(9 * (i // 4) for i in range(4 * n)))

    for n in (5, 50):
        assert feasible(bursts(n), 9, 0, states=40 * n).late == 0
    with pytest.raises(TooWide):
        feasible(bursts(50), 9, 0, states=400)


def test_an_overload_is_certified_at_once_however_wide() -> None:
    burst = QueryStream(tuple((i, 0) for i in range(400)), (3,) * 400)
    assert feasible(burst, 700, 0, states=0).none_meets_all


def test_late_queries_are_found_where_no_schedule_meets_all() -> None:
    burst = QueryStream(tuple((i, 0) for i in range(20)), (0,) * 20)
    verdict = feasible(burst, 36, 0.1)
    assert (verdict.none_meets_all, verdict.late, verdict.allowed_late) == (True, 2, 2)
    verdict = feasible(burst, 34, 0.1)
    assert (verdict.none_meets_all, verdict.order) == (True, None)


def test_a_search_too_wide_says_so_unless_a_schedule_turned_up() -> None:
    burst = QueryStream(tuple((i // 2, i) for i in range(30)), (0,) * 30)
    with pytest.raises(TooWide, match="100 partial"):
        feasible(burst, 45, 0, states=100)
    verdict = feasible(burst, 46, 0.1, states=100)
    assert verdict.order is not None
    assert not verdict.none_meets_all


@pytest.mark.parametrize(
    ("ttft", "p", "c_attn", "says"),
    [
        (0, 0.1, 0, "time above 0"),
        (math.nan, 0.1, 0, "time above 0"),
        (5, 1, 0, "0.05 for P95"),
        (5, 95, 0, "0.05 for P95"),
        (5, 0.1, -1, "c_attn must be 0 or more"),
    ],
)
def test_arguments_out_of_range_are_refused(ttft: float, p: float, c_attn: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        feasible(QueryStream(((1,),), (0,)), ttft, p, c_attn=c_attn)


def split(puzzle: ThreePartition) -> list[tuple[int, ...]] | None:
    """3-PARTITION by trying all triples of the first number left."""

    def solve(left: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if not left:
            return []
        for pair in combinations(left[1:], 2):
            triple = (left[0], *pair)
            if sum(puzzle.numbers[i] for i in triple) == puzzle.target:
                rest = solve(tuple(i for i in left if i not in triple))
                if rest is not None:
                    return [triple, *rest]
        return None

    return solve(tuple(range(len(puzzle.numbers))))


def meets(stream: QueryStream, ttft: float) -> bool:
    """Whether some order meets T for all: every order, given up at its first late query."""

    def extend(left: frozenset[int], now: float, previous: int | None) -> bool:
        if any(now - stream.arrivals[query] > ttft for query in left):
            return False
        for query in left:
            prompt = stream.prompts[query]
            reused = 0 if previous is None else overlap(prompt, stream.prompts[previous])
            end = max(now, stream.arrivals[query]) + len(prompt) - reused
            if end - stream.arrivals[query] <= ttft and extend(left - {query}, end, query):
                return True
        return not left

    return extend(frozenset(range(len(stream))), 0, None)


@pytest.mark.parametrize("seed", range(4))
def test_a_solvable_3_partition_is_a_stream_that_meets_its_ttft(seed: int) -> None:
    for m in (1, 2, 3):
        puzzle = solvable(m, 20 + seed, random.Random(seed))
        triples = split(puzzle)
        assert triples is not None
        stream = puzzle.stream()
        assert max(ttfts(stream, puzzle.order(triples))) <= puzzle.ttft
        if m < 3:
            assert meets(stream, puzzle.ttft)
            verdict = feasible(stream, puzzle.ttft, 0)
            assert verdict.ttfts is not None
            assert max(verdict.ttfts) <= puzzle.ttft
            assert not verdict.none_meets_all


@pytest.mark.parametrize("seed", range(2))
def test_an_unsolvable_3_partition_is_a_stream_that_no_order_meets(seed: int) -> None:
    puzzle = unsolvable(2, 48 + 4 * seed, random.Random(seed))
    assert split(puzzle) is None
    stream = puzzle.stream()
    assert not meets(stream, puzzle.ttft)
    assert feasible(stream, puzzle.ttft, 0).none_meets_all
    assert split(unsolvable(3, 52, random.Random(seed))) is None


def test_every_small_3_partition_is_feasible_as_a_stream_exactly_when_it_can_be_split() -> None:
    """All instances with m = 2 and H = 21 (numbers 6 to 10), which have both kinds."""
    target, answers = 21, []
    for numbers in {tuple(sorted(c)) for c in _six_numbers(range(6, 11), 2 * target)}:
        puzzle = ThreePartition(numbers, target)
        able = split(puzzle) is not None
        answers.append(able)
        assert feasible(puzzle.stream(), puzzle.ttft, 0).none_meets_all != able
    assert {True, False} == set(answers)


def _six_numbers(room: range, total: int, left: int = 6) -> list[tuple[int, ...]]:
    if left == 0:
        return [()] if total == 0 else []
    return [(a, *rest) for a in room for rest in _six_numbers(range(a, room.stop), total - a, left - 1)]


@pytest.mark.parametrize(
    ("numbers", "target", "says"),
    [((5, 5), 16, "multiple of three"), ((4, 5, 7), 16, "between"), ((5, 5, 5), 16, "sum to 15")],
)
def test_numbers_of_no_3_partition_are_refused(numbers: tuple[int, ...], target: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ThreePartition(numbers, target)


def test_generators_refuse_targets_without_room() -> None:
    with pytest.raises(ValueError, match="too few numbers"):
        solvable(2, 12, random.Random(0))
    with pytest.raises(ValueError, match="multiple of four"):
        unsolvable(2, 50, random.Random(0))
