"""Synthetic workloads have the published distributions, and are what their papers describe."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.distributions import QuantileDistribution, humped, shares, skewed
from lab.simulation.inputs import Input, merged
from lab.simulation.tokens import Segments
from lab.simulation.workload import (
    ANNS,
    BASE_TOKENS,
    CRAWLER,
    PER_USER,
    QUESTION_TOKENS,
    TOP_K,
    WORKLOADS,
    Load,
    anns,
    crawler,
    oneshot,
    sessions,
    whole,
)
from regions.radix import common_length
from tests.kit import tolerance

N = 3000


def by_request(inputs: Iterator[Input]) -> dict[int, list[Input]]:
    found: dict[int, list[Input]] = defaultdict(list)
    for each in inputs:
        found[each.request].append(each)
    return found


def finished(inputs: Iterator[Input]) -> list[Segments]:
    return [each.tokens for each in whole(inputs)]


class TestDistributions:
    @given(st.floats(0, 1))
    def test_quantiles_rise_between_their_points(self, p: float) -> None:
        for shape in (CRAWLER.gap_ms, ANNS.gap_ms, CRAWLER.tokens, ANNS.tokens):
            below = max(x for q, x in shape.points if q <= p)
            above = min(x for q, x in shape.points if q >= p)
            bound = tolerance.of_float64(above)
            assert below - bound <= shape.at(p) <= above + bound

    def test_between_two_points_the_logarithm_is_linear(self) -> None:
        shape = QuantileDistribution(((0, 1), (0.5, 100), (1, 1000)))
        assert shape.at(0.25) == pytest.approx(10)
        assert shape.at(0.75) == pytest.approx(math.sqrt(100 * 1000))

    @pytest.mark.parametrize("shape", [CRAWLER.gap_ms, ANNS.gap_ms, CRAWLER.tokens, ANNS.tokens])
    def test_the_mean_is_the_integral_of_the_quantiles(self, shape: QuantileDistribution) -> None:
        grid = (np.arange(50_000) + 0.5) / 50_000
        assert shape.mean == pytest.approx(float(np.mean([shape.at(p) for p in grid.tolist()])), rel=1e-3)

    @pytest.mark.parametrize(
        "points", [((0.1, 1), (1, 2)), ((0, 1), (0.9, 2)), ((0, 0), (1, 2)), ((0, 3), (1, 2))]
    )
    def test_invalid_quantiles_are_refused(self, points: tuple[tuple[float, float], ...]) -> None:
        with pytest.raises(ValueError, match="quantiles"):
            QuantileDistribution(points)

    def test_counts_have_the_mean_and_the_shape_asked_for(self) -> None:
        hump, skew = humped(7.9, 17), skewed(4.4, 26)
        assert hump.mean == pytest.approx(7.9)
        assert skew.mean == pytest.approx(4.4)
        assert (len(hump.weights), len(skew.weights)) == (17, 26)
        assert sum(skew.weights[:3]) < 0.5 * sum(skew.weights) < sum(skew.weights[:4]), "the median is 4"
        assert sum(hump.weights[5:10]) / sum(hump.weights) > 0.75, "figure 7: centred around 6 to 10"

    @given(st.integers(1, 20), st.integers(0, 5000), st.integers())
    def test_shares_sum_to_the_total_and_none_is_empty(self, n: int, more: int, seed: int) -> None:
        parts = shares(Random(seed), n + more, n)
        assert len(parts) == n
        assert sum(parts) == n + more
        assert min(parts) >= 1


@pytest.mark.parametrize(
    ("workload", "gaps", "tokens", "mean_tokens", "chunks", "retrieval_s"),
    [
        (crawler, (82, 701, 3078, 5293), (5749, 11_167, 28_372), 8900, 7.9, 7.2),
        (anns, (1.4, 37, 699, 2079), (10_126, 14_615, 30_618), 13_000, 4.4, 3.6),
    ],
)
def test_samples_have_the_published_quantiles(
    workload: Callable[[Load], Iterator[Input]],
    gaps: tuple[float, ...],
    tokens: tuple[float, ...],
    mean_tokens: float,
    chunks: float,
    retrieval_s: float,
) -> None:
    """Table 2 of Stream2LLM and its public program. 4,000 requests; the tail of a tail varies most.

    Of a search the first gap is before its opening, and the last one until it ends.
    """
    requests = by_request(workload(Load(qps=2, requests=N, seed=5)))
    chunked = {number: [each for each in pieces if each.tokens] for number, pieces in requests.items()}
    searched = workload is anns
    between = [
        (after.time_ns - before.time_ns) / 1e6
        for pieces in chunked.values()
        for before, after in list(pairwise(pieces))[: -1 if searched else None]
    ]
    np.testing.assert_allclose(np.quantile(between, (0.05, 0.5, 0.95, 0.99)), gaps, rtol=0.12)
    lengths = [len(prompt) for prompt in finished(workload(Load(qps=2, requests=N, seed=5)))]
    np.testing.assert_allclose(np.quantile(lengths, (0.5, 0.75, 0.95)), tokens, rtol=0.06)
    assert np.mean(lengths) == pytest.approx(mean_tokens, rel=0.04)
    assert np.mean([len(pieces) for pieces in chunked.values()]) == pytest.approx(chunks, rel=0.03)
    seconds = [(pieces[-1].time_ns - pieces[0].time_ns) / 1e9 for pieces in requests.values()]
    of_several = [each for each in seconds if each or not searched]
    assert np.mean(of_several) == pytest.approx(retrieval_s - 0.157 * searched, rel=0.05)


@pytest.mark.parametrize("name", WORKLOADS)
class TestEveryWorkload:
    def test_arrivals_are_poisson(self, name: str) -> None:
        inputs = list(WORKLOADS[name](Load(qps=4, requests=N, seed=1)))
        opened = [each.time_ns / 1e9 for each in inputs if each.op == "open"]
        between = np.diff([0.0, *opened])
        assert between.mean() == pytest.approx(1 / 4, rel=0.06)
        assert between.std() == pytest.approx(1 / 4, rel=0.08), "exponential: as wide as its mean"

    def test_times_rise_and_requests_open_once_and_end_once(self, name: str) -> None:
        inputs = list(WORKLOADS[name](Load(qps=4, requests=200, seed=1)))
        assert [each.time_ns for each in inputs] == sorted(each.time_ns for each in inputs)
        assert [each.request for each in inputs if each.op == "open"] == list(range(200))
        for pieces in by_request(iter(inputs)).values():
            assert [each.last for each in pieces] == [False] * (len(pieces) - 1) + [True]

    def test_equal_seeds_give_equal_workloads(self, name: str) -> None:
        one, same, other = (list(WORKLOADS[name](Load(4, 50, seed=seed))) for seed in (3, 3, 4))
        assert one == same
        assert one != other

    def test_workloads_are_generated_lazily(self, name: str) -> None:
        requests = 10**4 if name == "sessions" else 10**12
        assert len(list(islice(WORKLOADS[name](Load(4, requests)), 5))) == 5


def test_a_delay_stretches_the_gaps_and_changes_nothing_else() -> None:
    for workload in (crawler, anns):
        plain, slow = (by_request(workload(Load(4, 60, delay=delay))) for delay in (1, 30))
        for number, pieces in plain.items():
            late = slow[number]
            assert late[0].time_ns == pieces[0].time_ns
            assert [each.tokens for each in late] == [each.tokens for each in pieces]
            for a, b in zip(pieces, late, strict=True):
                assert b.time_ns - late[0].time_ns == pytest.approx(
                    30 * (a.time_ns - pieces[0].time_ns), abs=600
                )


def test_a_crawl_appends_pages_behind_the_question() -> None:
    prompts = finished(crawler(Load(4, 50)))
    for number, pieces in by_request(crawler(Load(4, 50))).items():
        assert {each.op for each in pieces[1:]} == {"append"}
        assert len(pieces[0].tokens) == QUESTION_TOKENS
        joined = [token for each in pieces for token in each.tokens]
        assert joined in (list(prompt) for prompt in prompts), number


def test_a_search_replaces_one_document_at_a_time() -> None:
    """The new list is the old one with a document put in and the last one gone; the question stays behind."""
    ranks = Counter[int]()
    for pieces in by_request(anns(Load(4, 2000))).values():
        versions = [each.tokens for each in pieces if each.tokens]
        for before, after in pairwise(versions):
            old, new = before.ranges, after.ranges
            assert len(old) == len(new) == TOP_K + 1
            rank = next(at for at in range(TOP_K) if old[at] != new[at])
            assert new[rank] not in old
            assert new[rank + 1 : -1] == old[rank:-2]
            assert new[-1] == old[-1]
            assert common_length(np.asarray(after), np.asarray(before)) == sum(map(len, new[:rank]))
            ranks[rank] += 1
    counts = [ranks[rank] for rank in range(TOP_K)]
    assert counts == sorted(counts), "the lower a rank, the more often it changes"


def test_sessions_share_a_base_and_each_history_four_times() -> None:
    prompts = finished(sessions(Load(4, 400)))
    assert len({prompt[:BASE_TOKENS] for prompt in prompts}) == 1
    users = Counter(prompt.ranges[1] for prompt in prompts)
    assert set(users.values()) == {PER_USER}
    assert len({prompt.ranges[2] for prompt in prompts}) == 400
    order = [prompt.ranges[1] for prompt in prompts]
    assert sum(a == b for a, b in pairwise(order)) < 10, "shuffled"


def test_without_streaming_a_prompt_opens_with_its_last_piece() -> None:
    for workload in (crawler, anns):
        requests = by_request(workload(Load(4, 60)))
        for each in whole(workload(Load(4, 60))):
            pieces = requests[each.request]
            assert (each.time_ns, each.op, each.last) == (pieces[-1].time_ns, "open", True)
            expected: list[int] = []
            for part in pieces:
                expected = [*expected, *part.tokens] if part.op == "append" else list(part.tokens)
            assert list(each.tokens) == expected


def test_without_streaming_complete_prompts_are_unchanged() -> None:
    assert list(whole(oneshot(Load(4, 60, max_tokens=3)))) == list(oneshot(Load(4, 60, max_tokens=3)))


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 10), max_size=4)), max_size=8))
def test_merging_sorts_by_time(requests: list[tuple[int, list[int]]]) -> None:
    made = []
    for number, (start, gaps) in enumerate(sorted(requests)):
        at = np.cumsum([start, *gaps]).tolist()
        made.append([Input(time, number, "open", Segments(), False) for time in at])
    times = [each.time_ns for each in merged(made)]
    assert times == sorted(times)
    assert Counter(merged(made)) == Counter(each for pieces in made for each in pieces)


@pytest.mark.parametrize("burst", [1.0, 0.25, 4.0])
def test_arrivals_have_the_rate_and_the_burst_asked_for(burst: float) -> None:
    opened = [piece.time_ns / 1e9 for piece in oneshot(Load(2.0, 20_000, seed=3, burst=burst))]
    gaps = np.diff(opened)
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burst, rel=0.1)


@pytest.mark.parametrize("wrong", [{"qps": 0}, {"requests": 0}, {"delay": -1}, {"max_tokens": 0}])
def test_invalid_loads_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="qps"):
        Load(**{"qps": 1, "requests": 1, **wrong})
