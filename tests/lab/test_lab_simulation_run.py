"""Whole simulated runs, checked by hand, by queueing theory's recursion, and by conservation laws."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.inputs import Input
from lab.simulation.plots import plot
from lab.simulation.report import Summary, ccdf, spread, summarize, table
from lab.simulation.run import COLUMNS, Result, Setup, paper_limits, simulate
from lab.simulation.workload import WORKLOADS, Load, anns, crawler, oneshot, sessions, whole
from scheduler.interfaces import Eviction
from scheduler.policies import KEYS, Ordering
from tests.kit import tolerance
from tests.kit.scheduler.simulated import LinearCosts, piece

COSTS = LinearCosts()
ROOM = Setup(pool_tokens=10_000, block_size=4)
REAL = LinearCosts(token_ns=27_000, overhead_ns=5_000_000, block_ns=170_000)
"""About the scale of an H200: 37K tokens a second, 5 ms a pass."""


def one_at_a_time(setup: Setup) -> Setup:
    return replace(setup, limits=paper_limits(max_batch_requests=1))


class TestByHand:
    def test_an_appended_prompt_is_computed_as_it_comes_in(self) -> None:
        """40 tokens less the held back one until 490; 20 more and that one, at 1000, until 1310."""
        inputs = [
            piece(0, 0, "open", (0, 40)),
            piece(1000, 0, "append", (100, 20), last=True),
        ]
        streamed = simulate(iter(inputs), ROOM, COSTS)
        assert streamed.ttft_ns.tolist() == [100 + 21 * 10]
        assert (streamed.passes, streamed.computed_tokens, streamed.busy_ns) == (2, 60, 490 + 310)
        assert simulate(whole(iter(inputs)), ROOM, COSTS).ttft_ns.tolist() == [100 + 60 * 10]

    def test_an_update_keeps_the_common_prefix(self) -> None:
        inputs = [
            piece(0, 0, "open", (0, 30), (100, 10)),
            piece(1000, 0, "update", (0, 30), (200, 15), last=True),
        ]
        result = simulate(iter(inputs), ROOM, COSTS)
        assert result.columns["invalidated_tokens"].tolist() == [9], "39 were computed, 30 stay"
        assert result.ttft_ns.tolist() == [100 + 15 * 10]

    def test_input_during_a_pass_is_scheduled_after_it(self) -> None:
        inputs = [
            piece(0, 0, "open", (0, 100), last=True),
            piece(50, 1, "open", (500, 10), last=True),
            piece(60, 2, "open", (600, 10), last=True),
        ]
        result = simulate(iter(inputs), ROOM, COSTS)
        assert result.columns["first_token_ns"].tolist() == [1100, 1400, 1400]
        assert result.columns["opened_ns"].tolist() == [0, 50, 60]
        assert result.ended_ns == 1400

    def test_input_during_a_pass_has_its_own_arrival_time(self) -> None:
        """By the last chunk: the second of the two was finished before the first."""
        inputs = [
            piece(0, 0, "open", (0, 100), last=True),
            piece(50, 1, "open", (1000, 100)),
            piece(60, 2, "open", (2000, 100)),
            piece(70, 2, "append", last=True),
            piece(80, 1, "append", last=True),
        ]
        setup = one_at_a_time(replace(ROOM, ordering=Ordering("lcas-fair")))
        assert simulate(iter(inputs), setup, COSTS).columns["first_token_ns"].tolist() == [1100, 3300, 2200]

    def test_an_end_without_tokens_leaves_one_to_compute(self) -> None:
        inputs = [piece(0, 0, "open", (0, 40)), piece(5000, 0, "append", last=True)]
        assert simulate(iter(inputs), ROOM, COSTS).ttft_ns.tolist() == [110]

    def test_an_answer_of_several_tokens_ends_later_than_its_first(self) -> None:
        result = simulate(iter([piece(7, 0, "open", (0, 40), last=True, max_tokens=3)]), ROOM, COSTS)
        assert result.ttft_ns.tolist() == [500]
        assert result.columns["done_ns"].tolist() == [7 + 500 + 2 * 110]

    def test_requests_longer_than_the_pool_fail_and_are_counted(self) -> None:
        inputs = [
            piece(0, 0, "open", (0, 20_000), last=True),
            piece(5, 1, "open", (0, 9_000)),
            piece(9_000_000, 1, "append", (0, 9_000)),
            piece(9_000_001, 1, "append", (0, 5), last=True),
            piece(9_000_002, 2, "open", (0, 40), last=True),
        ]
        result = simulate(iter(inputs), ROOM, COSTS)
        assert result.failures == {"too_long": 2}
        assert result.answered.tolist() == [False, False, True]
        assert result.ttft_ns.tolist() == [500]

    def test_a_saved_prefix_is_not_computed_again(self) -> None:
        inputs = [
            piece(0, 0, "open", (0, 40), (100, 8), last=True),
            piece(5000, 1, "open", (0, 40), (200, 8), last=True),
        ]
        plain = simulate(iter(inputs), ROOM, COSTS)
        cached = simulate(iter(inputs), replace(ROOM, prefix_cache=True), COSTS)
        assert plain.ttft_ns.tolist() == [580, 580]
        assert cached.ttft_ns.tolist() == [580, 180]
        assert cached.columns["reused_tokens"].tolist() == [0, 40]

    def test_a_group_computes_its_common_beginning_once(self) -> None:
        prompts = [piece(0, n, "open", (0, 40), (100 * n + 100, 8), last=True) for n in range(3)]
        limits = paper_limits(grouping=True, chunk_min=20, chunk_max=20)
        grouped = simulate(iter(prompts), replace(ROOM, limits=limits), COSTS)
        assert simulate(iter(prompts), ROOM, COSTS).computed_tokens == 3 * 48
        assert grouped.computed_tokens == 40 + 3 * 8
        assert grouped.columns["reused_tokens"].sum() == 2 * 40


@given(
    gaps=st.lists(st.integers(0, 2000), min_size=1, max_size=30),
    seed=st.integers(0, 5),
)
@settings(max_examples=40)
def test_one_row_at_a_time_is_a_single_server_queue(gaps: list[int], seed: int) -> None:
    """Lindley's recursion: a request begins when it has arrived and the previous one is done."""
    times = np.cumsum(gaps).tolist()
    lengths = [1 + (7 * n + seed * 13) % 90 for n in range(len(times))]
    inputs = [
        piece(at, n, "open", (1000 * n, length), last=True)
        for n, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]
    expected, free = [], 0
    for at, length in zip(times, lengths, strict=True):
        free = max(free, at) + 100 + 10 * length
        expected.append(free - at)
    assert simulate(iter(inputs), one_at_a_time(ROOM), COSTS).ttft_ns.tolist() == expected


def test_a_simulated_tenant_waits_for_its_own_requests_only() -> None:
    """Twenty requests of one tenant wait; four of another, of twice the weight, come later."""
    flood = [piece(0, n, "open", (1000 * n, 9), last=True)._replace(tenant="flood") for n in range(20)]
    late = [
        piece(1, n, "open", (1000 * n, 9), last=True)._replace(tenant="late", weight=2.0)
        for n in range(20, 24)
    ]
    found = simulate(iter([*flood, *late]), one_at_a_time(ROOM), COSTS)
    first = found.columns["first_token_ns"]
    # the first one runs; then two of the late for one of the flood
    assert sorted(range(24), key=lambda n: first[n])[:7] == [0, 20, 21, 1, 22, 23, 2]


PRESSED: list[tuple[Callable[[Load], Iterator[Input]], Load, int]] = [
    (crawler, Load(qps=4, requests=40, delay=10), 120_000),
    (anns, Load(qps=3, requests=30, delay=30), 120_000),
]


@pytest.mark.parametrize("policy", sorted(KEYS))
@pytest.mark.parametrize("eviction", ["recompute", "swap", "cost"])
@pytest.mark.parametrize(("workload", "load", "pool"), PRESSED)
def test_every_token_is_computed_once_or_its_loss_is_accounted_for(
    workload: Callable[[Load], Iterator[Input]], load: Load, pool: int, policy: str, eviction: Eviction
) -> None:
    """Under memory pressure: computed = prompts + invalidated + dropped by preemption."""
    setup = Setup(pool, 100_000, ordering=Ordering(policy), limits=paper_limits(eviction=eviction))
    result = simulate(workload(load), setup, REAL)
    columns = result.columns
    assert not result.failures
    assert columns["request"].tolist() == list(range(load.requests))
    assert columns["prompt_tokens"].tolist() == [
        len(each.tokens) for each in sorted(whole(workload(load)), key=lambda each: each.request)
    ]
    lost = columns["invalidated_tokens"] + columns["recomputed_tokens"]
    assert result.computed_tokens == int((columns["prompt_tokens"] + lost).sum())
    assert result.peak_tokens <= pool
    assert (columns["swaps"] + columns["recomputes"]).sum() > 0, "no pressure, nothing tested"
    if eviction == "recompute":
        assert not columns["swaps"].any()
        assert not result.copying_ns


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_runs_are_equal_byte_for_byte(name: str) -> None:
    def run(seed: int) -> Result:
        setup = Setup(100_000, 50_000, ordering=Ordering("lcas"), prefix_cache=True)
        return simulate(WORKLOADS[name](Load(3, 30, seed=seed)), setup, REAL)

    one, same, other = run(1), run(1), run(2)
    assert {key: column.tobytes() for key, column in one.columns.items()} == {
        key: column.tobytes() for key, column in same.columns.items()
    }
    assert (one.ended_ns, one.passes, one.busy_ns) == (same.ended_ns, same.passes, same.busy_ns)
    assert one.columns["done_ns"].tolist() != other.columns["done_ns"].tolist()


@pytest.mark.parametrize("policy", ["lpm", "klpm", "klpm-adaptive"])
def test_longest_prefix_first_reuses_more_when_the_cache_is_small(policy: str) -> None:
    """Under a burst FCFS has evicted a history before it comes again; those that look for it have not."""

    def run(name: str) -> Result:
        setup = Setup(
            60_000, ordering=Ordering(name), prefix_cache=True, limits=paper_limits(cell_budget_fraction=0.5)
        )
        return simulate(sessions(Load(qps=40, requests=160)), setup, REAL)

    assert run(policy).columns["reused_tokens"].sum() > 1.2 * run("fcfs").columns["reused_tokens"].sum()


def test_streaming_never_waits_for_what_it_has_computed_at_low_load() -> None:
    """With one request every 50 s a streamed prompt is never later than a whole one: nothing contends."""
    load = Load(qps=0.02, requests=40)
    streamed = simulate(crawler(load), Setup(10**6), REAL)
    at_once = simulate(whole(crawler(load)), Setup(10**6), REAL)
    order = np.argsort(streamed.columns["last_input_ns"], kind="stable")
    assert at_once.columns["last_input_ns"].shape == order.shape
    assert np.median(streamed.ttft_ns) < 0.5 * np.median(at_once.ttft_ns)
    assert not at_once.columns["invalidated_tokens"].any()


def test_more_requests_than_memory_holds_are_simulated_lazily() -> None:
    """Inputs are read as time passes: a workload of 10^12 requests can be begun."""
    read: list[int] = []

    def counted() -> Iterator[Input]:
        for each in islice(oneshot(Load(qps=1000, requests=10**12)), 3000):
            read.append(each.request)
            yield each

    result = simulate(
        counted(), Setup(100_000, limits=paper_limits()), LinearCosts(token_ns=1, overhead_ns=1)
    )
    assert len(read) == len(result.columns["request"]) == 3000
    assert result.peak_tokens < 60_000


class TestReport:
    VALUES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=300)

    @given(VALUES)
    def test_quantiles_are_values_that_few_exceed(self, values: list[float]) -> None:
        found = spread(np.array(values))
        for name, p in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            at = getattr(found, name)
            assert at in values
            assert sum(x > at for x in values) <= (1 - p) * len(values) + tolerance.of_float64(len(values))
        assert found.max == max(values)

    @given(VALUES)
    def test_the_ccdf_says_how_many_lie_above(self, values: list[float]) -> None:
        points = ccdf(np.array(values))
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        for x, part in points:
            assert sum(value > x for value in values) / len(values) <= part
            assert sum(value >= x for value in values) / len(values) >= part
        assert (points[0], points[-1]) == ((0.0, 1.0), (max(values), 0.0))

    def test_a_summary_is_what_the_columns_say(self) -> None:
        ones = np.arange(4, dtype=np.int64)
        columns = dict.fromkeys(COLUMNS, ones * 0) | {
            "request": ones,
            "first_token_ns": np.array([2, 3, -1, 9]) * 10**9,
            "last_input_ns": np.array([1, 1, 1, 1]) * 10**9,
            "invalidated_tokens": np.array([0, 10_001, 0, 10_000]),
            "swaps": np.array([0, 2, 0, 1]),
            "recomputes": np.array([1, 1, 0, 0]),
        }
        columns["first_token_ns"][2] = -1
        result = Result(columns, {"too_long": 1}, 10 * 10**9, 3, 5000, 5 * 10**9, 10**9, 77)
        found = summarize(result, workload="w", qps=2.0, policy="fcfs", eviction="cost", profile="p")
        assert (found.ttft_s.mean, found.ttft_s.p50, found.ttft_s.max) == (11 / 3, 2.0, 8.0)
        assert (found.preempted_swap, found.preempted_recompute, found.preempted_requests) == (3, 2, 3)
        assert found.invalidated_large == 0.25
        assert (found.completion_s, found.busy, found.copying_s) == (10.0, 0.5, 1.0)
        assert msgspec.json.decode(msgspec.json.encode(found), type=Summary) == found
        base = msgspec.structs.replace(
            found, policy="vllm-ns", ttft_s=msgspec.structs.replace(found.ttft_s, p50=9.0)
        )
        lines = table([base, found]).splitlines()
        assert "4.50x" in lines[2]
        assert "x" not in lines[1].split("vllm-ns")[1]
        assert "too_long 1" in lines[2]

    def test_a_run_without_an_answer_has_no_quantiles(self) -> None:
        result = simulate(iter([piece(0, 0, "open", (0, 20_000), last=True)]), ROOM, COSTS)
        with pytest.raises(ValueError, match="no request"):
            summarize(result, workload="w", qps=1, policy="fcfs", eviction="cost", profile="p")

    @pytest.mark.parametrize("rates", [(None,), (1.0,), (1.0, 4.0)])
    def test_plots_are_png_files(self, rates: tuple[float | None, ...], tmp_path: Path) -> None:
        runs = [
            summarize(
                simulate(oneshot(Load(rate or 1, 50)), Setup(10**6, ordering=Ordering(policy)), REAL),
                workload="oneshot",
                qps=rate,
                policy=policy,
                eviction="cost",
                profile="p",
            )
            for rate in rates
            for policy in ("vllm", "fcfs")
        ]
        plot(runs, tmp_path / "out.png")
        written = (tmp_path / "out.png").read_bytes()
        assert written.startswith(b"\x89PNG\r\n")
        width = int.from_bytes(written[16:20], "big")
        assert width == round(4.2 * 120) * (len(rates) + 2 * (len(rates) > 1))


@pytest.mark.parametrize("wrong", [{"pool_tokens": 3}, {"block_size": 0}, {"host_tokens": -1}])
def test_invalid_setups_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="one block"):
        Setup(**{"pool_tokens": 100, "block_size": 4, **wrong})
