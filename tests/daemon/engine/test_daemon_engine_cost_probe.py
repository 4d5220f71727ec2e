"""Both cost curves as an engine measures them at its start: within their time, and it is left as it was."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine.cost_probe import BUDGET_NS, climb, measured_costs, model_of
from engine.engine import Engine
from engine.measurement_cache import Memory
from engine.step import OutOfMemory
from scheduler.costs import CostModel, guess
from tests.engine.oracle import tiny

MS = 1_000_000
Samples = list[tuple[int, int]]


class Clock:
    """Goes on only with work; ``times``: of each call, ns."""

    def __init__(self) -> None:
        self.now = 0
        self.times: Samples = []

    def __call__(self) -> int:
        return self.now

    def work(self, took: Callable[[int], int]) -> Callable[[int], None]:
        def work(size: int) -> None:
            ns = took(size)
            self.times.append((size, ns))
            self.now += ns

        return work


def fitted(passes: Samples, out: Samples, back: Samples, *, pass_tokens: int = 1024) -> CostModel:
    return model_of(passes, out, back, device="d", model="m", block_size=16, pass_tokens=pass_tokens)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(sorted),
    st.integers(0, 10**6),
    st.integers(1, 1000),
    st.integers(0, 10**7),
)
def test_sizes_are_measured_as_long_as_they_are_done_in_time(
    sizes: list[int], fixed: int, each: int, until: int
) -> None:
    """Work of a fixed and a growing part takes less than proportionally longer: no prediction is too low."""
    clock = Clock()
    found = climb(sizes, clock.work(lambda n: fixed + each * n), until, clock)
    assert [size for size, _ in found] == sizes[: len(found)]
    assert all(ns == fixed + each * size for size, ns in found)
    assert len(found) >= 1
    assert clock.now <= until or len(clock.times) == 1
    if len(found) < len(sizes):
        after = sizes[len(found)]
        assert clock.now + 2 * found[-1][1] * after // found[-1][0] > until


def test_the_first_run_of_a_size_may_be_slow() -> None:
    clock, slow = Clock(), {1: [900, 10], 4: [40, 700]}
    found = climb([1, 4], clock.work(lambda n: slow[n].pop(0)), 10_000, clock)
    assert found == [(1, 10), (4, 40)]


@given(st.integers(0, 10 * MS), st.integers(1, MS), st.integers(1, MS), st.integers(1, MS))
def test_lines_are_found_again(fixed: int, token_ns: int, out_ns: int, in_ns: int) -> None:
    sizes, blocks = (1, 4, 16, 64, 256), (1, 4, 16, 64)
    costs = fitted(
        [(n, fixed + token_ns * n) for n in sizes],
        [(n, fixed + out_ns * n) for n in blocks],
        [(n, in_ns * n) for n in blocks],
    )
    for n in (1, 16, 100, 256, 1000):
        assert costs.recompute_ns(n) == pytest.approx(fixed + token_ns * n, rel=1e-6)
    assert costs.recompute_ns(2000) == pytest.approx(2 * fixed + token_ns * 2000, rel=1e-6)
    for n in (1, 10, 64, 500):
        assert costs.swap_out_ns(n) == pytest.approx(fixed + out_ns * n, rel=1e-6)
        assert costs.swap_in_ns(n) == pytest.approx(in_ns * n, rel=1e-6)


samples = st.lists(st.integers(1, 10**10), min_size=1, max_size=6).map(
    lambda found: [(4**i, ns) for i, ns in enumerate(found)]
)


@given(samples, samples, samples)
def test_no_noise_makes_costs_that_are_refused_or_fall(passes: Samples, out: Samples, back: Samples) -> None:
    costs = fitted(passes, out, back)
    sizes = range(1, 1500, 13)
    for of in (costs.recompute_ns, costs.swap_out_ns, costs.swap_in_ns):
        ns = [of(n) for n in sizes]
        assert ns == sorted(ns)
        assert ns[0] >= 0


def ticking(step_ns: int) -> Callable[[], int]:
    """Goes on by as much with each look at it."""
    return count(0, step_ns).__next__


def small() -> Engine:
    return Engine(tiny("llama", layers=2), blocks=40, block_size=4, frame_limit=120)


def test_an_engine_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    engine = small()
    costs = measured_costs(engine, 64, 10, ticking(MS), Memory(lambda: tmp_path))
    assert costs.block_size == 4
    assert costs.pass_tokens == 64
    assert 0 < costs.recompute_ns(1) <= costs.recompute_ns(64)
    assert costs.swap_out.x == costs.swap_in.x == (0, 1, 4)
    assert 0 < costs.swap_ns(1) <= costs.swap_ns(10)
    assert engine.pool.blocks.free_blocks == engine.pool.total_blocks
    engine.pool.check_integrity()


def test_what_was_measured_is_remembered(tmp_path: Path) -> None:
    """So an engine that takes over for another one is not slower."""
    memory = Memory(lambda: tmp_path)
    first = measured_costs(small(), 64, 10, ticking(MS), memory)

    def never() -> int:
        raise AssertionError("it measures again")

    assert measured_costs(small(), 64, 10, never, memory) == first
    assert measured_costs(small(), 32, 10, ticking(MS), memory) != first  # other passes


def test_a_slow_device_ends_the_measurement_in_time(tmp_path: Path) -> None:
    """Each look at the clock takes 20 ms, so a run takes as long."""
    clock = ticking(20 * MS)
    costs = measured_costs(small(), 64, 10, clock, Memory(lambda: tmp_path))
    assert clock() <= BUDGET_NS + 40 * MS
    assert costs.recompute.x[-1] < 64


def test_one_pass_alone_tells_what_a_pass_takes_and_is_not_remembered(tmp_path: Path) -> None:
    """As on a machine that something else keeps busy while the engine starts."""
    costs = measured_costs(small(), 64, 10, ticking(400 * MS), Memory(lambda: tmp_path))
    assert costs.floor_s == costs.pass_s == 0.4
    assert costs.recompute == guess(4).recompute
    assert costs.swap_out.x == (0, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OutOfMemory("out of memory"), MemoryError()])
def test_without_memory_to_measure_costs_are_guessed(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small()

    def execute(batch: object) -> None:
        raise error

    monkeypatch.setattr(engine, "execute", execute)
    assert measured_costs(engine, 64, 10, memory=Memory(lambda: tmp_path)) == guess(4)
    assert "guessed" in caplog.text
    assert not list(tmp_path.iterdir())
    assert engine.pool.blocks.free_blocks == engine.pool.total_blocks
    engine.pool.check_integrity()
