"""`foretick bench scheduler` in its smallest size: parts are measured, saved, rendered and compared."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.figures import Figure
from bench.run import read
from bench.scheduler import drafts, paper, simulated
from bench.scheduler.cost import CostWorld
from bench.scheduler.prefix import ALIKE, PAPER, POLICIES, PrefixCase, inputs, slower
from bench.scheduler.replay import profile, replay
from bench.suites import SUITES
from engine.engine import Engine
from engine.model.embedded import embedded_directory
from engine.model.loading import load_model
from lab.simulation.inputs import Input
from lab.simulation.published import PROGRAM
from lab.simulation.run import NEVER, Setup, paper_limits
from lab.simulation.tokens import Segments
from scheduler.costs import load
from scheduler.interfaces import Limits
from scheduler.policies import NAMES


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_every_part_is_measured(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    run = CliRunner().invoke(bench, ["scheduler", "--quick", "--threads", "1", "--json", str(saved)])
    assert run.exit_code == 0, run.output
    parts = {part.name: part.figures for part in read(saved).parts}
    assert list(parts) == list(SUITES["scheduler"])
    assert any(
        f.ours for f in _named(parts["simulated"], "preemptions") if f.setting["eviction"] == "recompute"
    )
    assert any(f.ours for f in _named(parts["simulated"], "victims swapped"))
    assert any(f.ours for f in _named(parts["prefix"], "klpm reused") if "engine" in f.table)


def test_recorded_answers_are_drafted_as_the_engine_drafts_them() -> None:
    """One answer at a time, of each kind."""
    loaded = load_model(embedded_directory(), dtype="float32", device="cpu")
    limits = Limits(max_batch_tokens=4096, chunk_max=4096, cell_budget_fraction=1.0, max_drafts=3)
    for case in drafts.cases(loaded, 24, 2):
        engine = Engine(loaded, blocks=200, eager=True)
        found, answers = [], []
        for which in (slice(0, 1), slice(1, 2)):
            (plain,) = drafts.answered(
                engine, engine.pool, case.requests(engine.open_prompt, which), replace(limits, max_drafts=0)
            )
            answers.append(plain.output)
            found += drafts.answered(engine, engine.pool, case.requests(engine.open_prompt, which), limits)
        assert [request.output for request in found] == answers
        assert drafts.replayed(case, answers, limits, 1) == drafts.counted(found)
        assert not case.parts or drafts.counted(found).accepted


def _named(figures: list[Figure], name: str) -> list[Figure]:
    return [figure for figure in figures if figure.name == name]


def test_the_replay_is_timed_from_the_last_input() -> None:
    """Pieces reach the engine at their times; a prompt too large for the pool is not an answer."""
    loaded = load_model(embedded_directory(), dtype="float32", device="cpu")
    costs = profile(loaded, 32, 64, quick=True)
    pieces = [
        Input(0, 0, "open", Segments([range(20)]), False),
        Input(1_000_000, 1, "open", Segments([range(100, 900)]), True),
        Input(150_000_000, 0, "append", Segments([range(50, 60)]), True),
    ]
    setup = Setup(256, limits=paper_limits(max_batch_tokens=32, chunk_min=32, chunk_max=32))
    done = replay(pieces, setup, loaded, costs)
    first, second = done.ttft_ns
    assert first > 0
    assert second == NEVER
    assert done.prompt_tokens == 830
    assert done.computed_tokens >= 30
    assert 0 < done.passes_ns <= done.span_ns
    assert done.predicted_ns > 0


@pytest.mark.parametrize("policy", NAMES)
def test_a_measured_step_keeps_as_many_alive(policy: str) -> None:
    """Each request that ends is replaced, streams are finished, and timing phase 1 has no effect."""
    world, untimed = (CostWorld(30, 2.5, policy, prompt=64, answer=3) for _ in range(2))
    first = set(world.live)
    for _ in range(60):
        for each in (world, untimed):
            each.feed()
        assert world.planned() >= 0
        world.scheduler.step()
        untimed.scheduler.step()
        assert len(world.live) == 30
    assert world.device.tokens == untimed.device.tokens > 0
    assert first.isdisjoint(world.live)


def test_speed_ups_are_at_the_same_rate_and_next_to_the_papers() -> None:
    """The changed lcas appears next to the published one."""
    p99 = {"vLLM-NS": 8.0, "vLLM-S": 10.0, "fcfs": 2.0, "lcas-fair": 16.0, "mcps": 80.0}
    rates = [_row(name, p99[name]) for name in p99]
    found = list(simulated.by_rate(rates, "by rate"))
    gains = {f.setting["scheduler"]: f for f in _named(found, "P99 speed-up")}
    assert {name: f.ours for name, f in gains.items()} == {
        "vLLM-S": 0.8, "fcfs": 4.0, "lcas-fair": 0.5, "mcps": 0.1,
    }  # fmt: skip
    assert {name: f.verdict for name, f in gains.items() if f.goal} == {"fcfs": "met", "lcas-fair": "missed"}
    over = {f.setting["scheduler"]: f.reference for f in _named(found, "P95 over vLLM-S")}
    assert over == {"vLLM-S": None, "fcfs": 3.16, "lcas-fair": 2.64, "mcps": 0.71}
    assert _named(found, "P50 speed-up")[0].reference == (10.8, 11.0)


def test_under_pressure_preemptions_and_swapped_shares_are_next_to_the_papers() -> None:
    """Cost is judged against the better pure eviction on all seeds."""
    costs = {"recompute": 3.0, "swap": 1.0, "cost": 2.0}
    rows = [_row("vLLM-NS", 8.0)]
    rows += [_row(name, costs[by], eviction=by) for name in ("fcfs", "mcps") for by in paper.EVICTIONS]
    chosen = list(simulated.choices(rows))
    over = _named(chosen, "P99 over the better pure eviction")
    assert [(f.setting["scheduler"], f.ours, f.goal is None) for f in over] == [
        ("fcfs", 2.0, False), ("mcps", 2.0, True),
    ]  # fmt: skip
    found = list(simulated.under_pressure(rows, "pressed"))
    assert {(f.ours, f.reference) for f in _named(found, "victims swapped")} == {(3 / 7, (0.17, 0.21))}
    at = ("fcfs", "swap")
    of = [f for f in found if (f.setting["scheduler"], f.setting["eviction"]) == at]
    row = {f.name: (f.ours, f.reference) for f in of}
    assert row["P50 speed-up"] == (8.0, 7.78)
    assert row["P99 speed-up"][1] == paper.PRESSED["crawler", "fcfs"].p99[1]
    assert row["preemptions"] == (7.0, 709)
    assert {f.name for f in of if f.goal} == {"P50 speed-up", "P99 speed-up", "preemptions"}
    varied = [replace(row, case=replace(row.case, assumption="another")) for row in rows]
    assert not any(f.goal for f in simulated.under_pressure(varied, "pressed")), "only shown"


def test_the_loads_of_prefixes_are_what_they_are_called() -> None:
    """Four prompts per user in one load, regulars and one-time users in the other; equal for all policies.

    Histories differ behind their first tokens, and each of those is one of two.
    """
    counts = {}
    for name in ("sessions", "regulars"):
        cases = [PrefixCase(name, PAPER, 1.0, 5.0, policy, 3, 400) for policy in POLICIES]
        runs = [[piece.tokens for piece in inputs(case)] for case in cases]
        assert all(run == runs[0] for run in runs)
        assert all(tokens.ranges[0] == range(256) for tokens in runs[0])
        assert len({tokens[at] for tokens in runs[0] for at in range(256, 256 + ALIKE)}) == 2
        assert all(len({tokens[at] for tokens in runs[0]}) == 2 for at in range(256, 256 + ALIKE))
        counts[name] = Counter(Counter(tokens[256 + ALIKE] for tokens in runs[0]).values())
    assert counts["sessions"] == {4: 100}
    assert 100 < counts["regulars"][1] < 200
    assert sum(n * users for n, users in counts["regulars"].items()) == 400


def test_histories_may_have_nothing_in_common() -> None:
    """The same users at the same times, without the first tokens."""
    case = PrefixCase("sessions", PAPER, 1.0, 5.0, "lpm", 3, 40)
    alike, apart = (list(inputs(each)) for each in (case, replace(case, alike=0)))
    assert [each.time_ns for each in alike] == [each.time_ns for each in apart]
    assert all(len(one.tokens) == len(other.tokens) + ALIKE for one, other in zip(alike, apart, strict=True))
    assert len({each.tokens[256] for each in apart}) == 10


def test_a_slower_device_takes_longer_for_every_pass() -> None:
    costs = load("h200-saturation")
    half = slower(costs, 2.0)
    for spans in ([(0, 1)], [(0, 600)], [(4096, 512), (0, 32)], [(100, 1)] * 8):
        assert half.batch_ns(spans) == pytest.approx(2 * costs.batch_ns(spans), abs=2)
    assert half.swap_ns(4) == costs.swap_ns(4)


def test_the_order_of_policies_is_judged_at_every_rate() -> None:
    """Crawler at 4: the paper has fcfs, lcas, vLLM-S, mcps. Here lcas leads; equal values have no order."""
    p95 = {"vLLM-NS": 12.0, "vLLM-S": 9.0, "fcfs": 8.0, "lcas": 7.0, "mcps": 9.0}
    rows = [_row(name, 1.0, p95[name]) for name in p95]
    spread, pairs = simulated.orders(rows)
    assert (spread.ours, spread.reference) == (9.0 / 7.0, 3.16 / 0.71)
    assert (pairs.ours, pairs.reference, pairs.verdict) == (4, 6, "missed")
    (spread,) = simulated.orders([_row(name, 1.0, p95[name], qps=8.0) for name in p95])
    assert spread.reference is None, "the paper has no such rate"


def test_of_lcas_the_order_of_the_program_counts() -> None:
    """Published are its results, not those of the policy that the text has."""
    p95 = {"vLLM-NS": 12.0, "vLLM-S": 9.0, "fcfs": 3.0, "lcas": 1.0, "mcps": 10.0}
    rows = [_row(name, 1.0, p95[name]) for name in p95]
    program = _row("lcas", 1.0, 4.0)
    rows.append(replace(program, case=replace(program.case, rules=PROGRAM)))
    _, pairs = simulated.orders(rows)
    assert (pairs.ours, pairs.reference, pairs.verdict) == (6, 6, "met")


def _row(
    scheduler: str, p99: float, p95: float | None = None, qps: float = 4.0, eviction: str = "cost"
) -> simulated.SimulatedRow:
    slow = scheduler == "vLLM-NS"
    return simulated.SimulatedRow(
        simulated.SimulatedCase(simulated.CRAWLER, qps, 1.0, scheduler, eviction),
        requests=9,
        failed=0,
        ttft_s=[(8.0 if slow else 1.0, p95 or (8.0 if slow else 1.0), p99)],
        busy=0.5,
        pool_tokens=1000,
        swaps=[3],
        recomputes=[4],
    )
