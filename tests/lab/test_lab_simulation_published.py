"""The paper's program in simulated time: by hand, beside our scheduler, and by conservation of tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.inputs import Input
from lab.simulation.published import Rules, common, simulate_published
from lab.simulation.run import Result, Setup, paper_limits, simulate
from lab.simulation.tokens import Segments
from lab.simulation.workload import Load, anns, crawler, oneshot, whole
from scheduler.interfaces import Eviction
from scheduler.policies import Ordering
from tests.kit.scheduler.simulated import LinearCosts, piece

COSTS = LinearCosts()
REAL = LinearCosts(token_ns=27_000, overhead_ns=5_000_000, block_ns=170_000)


def small(policy: str, eviction: Eviction = "recompute") -> Setup:
    """50 blocks of 4 tokens."""
    return Setup(200, block_size=4, ordering=Ordering(policy), limits=paper_limits(eviction=eviction))


def crowded() -> Iterator[Input]:
    """Prompt 0 grows by 100 tokens; it needs 3 blocks more than are free."""
    yield piece(0, 0, "open", (0, 32))
    yield piece(0, 1, "open", (1000, 16))
    yield piece(0, 2, "open", (2000, 32))
    yield piece(5000, 0, "append", (3000, 100), last=True)
    for number in (1, 2):
        yield piece(20_000 * number, number, "append", (4000 * number, 8), last=True)


def preemptions(result: Result) -> list[tuple[int, int]]:
    return list(zip(result.columns["swaps"].tolist(), result.columns["recomputes"].tolist(), strict=True))


class TestRules:
    def test_the_last_admitted_of_those_that_wait_for_input_is_the_first_victim(self) -> None:
        assert preemptions(simulate_published(crowded(), small("mcps"), COSTS)) == [(0, 0), (0, 0), (0, 1)]
        ordered = simulate_published(crowded(), small("mcps"), COSTS, Rules(idle_first=False))
        assert preemptions(ordered) == [(0, 0), (0, 1), (0, 0)], "prompt 1 has the fewest computed tokens"

    def test_a_victim_is_computed_again_before_its_next_input(self) -> None:
        """8 tokens are new to it, or all of its 40."""
        found = [
            simulate_published(crowded(), small("fcfs"), COSTS, Rules(eager=eager)).ttft_ns.tolist()
            for eager in (True, False)
        ]
        assert found == [[100 + 1000, 180, 180], [100 + 1000, 180, 500]]

    def test_the_chunk_that_needs_room_decides_how_the_victim_is_evicted(self) -> None:
        """Of 100 tokens recomputing is cheaper, of the victim's 16, below the least cost, swapping."""

        @dataclass(frozen=True)
        class Floored(LinearCosts):
            def recompute_ns(self, tokens: int) -> int:
                return max(400, super().recompute_ns(tokens))

        for by_chunk, wanted in ((True, (0, 1)), (False, (1, 0))):
            rules = Rules(idle_first=False, by_chunk=by_chunk)
            found = simulate_published(crowded(), small("mcps", "cost"), Floored(), rules)
            assert preemptions(found)[1] == wanted

    def test_a_swapped_prompt_waits_for_its_transfers_and_computes_nothing_again(self) -> None:
        found = simulate_published(crowded(), small("fcfs", "swap"), COSTS)
        assert preemptions(found) == [(0, 0), (0, 0), (1, 0)]
        out, into = 8 * 40, 8 * 40
        assert found.ttft_ns.tolist() == [out + 1100, 180, into + 180]
        assert found.copying_ns == out + into
        assert found.computed_tokens == 32 + 16 + 32 + 100 + 8 + 8

    @pytest.mark.parametrize(("oldest", "first"), [(True, 1), (False, 2)])
    def test_lcas_takes_the_oldest_chunk_first_though_the_paper_says_the_newest(
        self, oldest: bool, first: int
    ) -> None:
        inputs = [piece(at, n, "open", (1000 * n, 40), last=True) for n, at in enumerate((0, 10, 20))]
        setup = replace(small("lcas"), limits=paper_limits(max_batch_tokens=40))
        found = simulate_published(iter(inputs), setup, COSTS, Rules(oldest_first=oldest))
        assert np.argsort(found.columns["first_token_ns"]).tolist() == [0, first, 3 - first]

    def test_vllm_admits_nobody_in_a_step_that_preempted(self) -> None:
        """Prompt 0 takes the blocks of the last admitted, which is computed again in the next step."""
        found = simulate_published(crowded(), small("vllm"), COSTS)
        assert preemptions(found) == [(0, 0), (0, 0), (0, 1)]
        assert found.ttft_ns.tolist() == [1100, 180, 180]

    @pytest.mark.parametrize("policy", ["vllm", "fcfs"])
    def test_a_prompt_too_long_for_the_pool_is_an_error(self, policy: str) -> None:
        with pytest.raises(RuntimeError, match="190 tokens, too many"):
            simulate_published(iter([piece(0, 0, "open", (0, 190), last=True)]), small(policy), COSTS)


PAIRS = {"vllm": "vllm", "fcfs": "fcfs", "mcps": "mcps", "lcas": "lcas-fair"}


@pytest.mark.parametrize("policy", PAIRS)
@pytest.mark.parametrize("workload", [oneshot, crawler, anns])
def test_complete_prompts_with_room_for_all_take_as_long_as_under_our_scheduler(
    policy: str, workload: Callable[[Load], Iterator[Input]]
) -> None:
    """To the nanosecond: only then do both do the same."""
    limits = paper_limits(max_batch_tokens=512, chunk_min=512, chunk_max=512, max_batch_requests=10_000)
    setup = Setup(10**7, ordering=Ordering(policy), limits=limits)
    load = Load(qps=3 if workload is not oneshot else 30, requests=60, seed=3)
    ours = simulate(whole(workload(load)), replace(setup, ordering=Ordering(PAIRS[policy])), REAL)
    found = simulate_published(whole(workload(load)), setup, REAL)
    assert found.columns["first_token_ns"].tolist() == ours.columns["first_token_ns"].tolist()
    assert (found.passes, found.busy_ns) == (ours.passes, ours.busy_ns)


@pytest.mark.parametrize("policy", PAIRS)
@pytest.mark.parametrize("eviction", ["recompute", "swap", "cost"])
@pytest.mark.parametrize("rules", [Rules(), Rules(False, False, False, False)])
@pytest.mark.parametrize(("workload", "qps", "pool"), [(crawler, 4, 80_000), (anns, 3, 150_000)])
def test_every_token_the_program_computes_is_a_prompts_or_was_lost(
    workload: Callable[[Load], Iterator[Input]],
    qps: float,
    pool: int,
    eviction: Eviction,
    policy: str,
    rules: Rules,
) -> None:
    load = Load(qps=qps, requests=30, delay=30)
    setup = Setup(pool, ordering=Ordering(policy), limits=paper_limits(eviction=eviction))
    found = simulate_published(workload(load), setup, REAL, rules)
    columns = found.columns
    assert columns["prompt_tokens"].tolist() == [
        len(each.tokens) for each in sorted(whole(workload(load)), key=lambda each: each.request)
    ]
    lost = columns["invalidated_tokens"] + columns["recomputed_tokens"]
    assert found.computed_tokens == int((columns["prompt_tokens"] + lost).sum())
    assert found.peak_tokens <= pool
    assert (columns["swaps"] + columns["recomputes"]).sum() > 0, "no pressure, nothing tested"
    assert (columns["first_token_ns"] > columns["last_input_ns"]).all()


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=5)


@given(RUNS, RUNS)
def test_the_common_prefix_is_that_of_the_lists(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = (Segments(range(10 * at, 10 * at + n) for at, n in runs) for runs in (one, other))
    wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common(a, b) == wanted
