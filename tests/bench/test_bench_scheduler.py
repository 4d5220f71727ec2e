"""`foretick bench scheduler` in its smallest size: parts are measured, saved, shown, and compared soundly."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from bench.cli import SCHEDULER_PARTS, bench
from bench.figures import Latency
from bench.machine import Machine
from bench.page import markers
from bench.scheduler_cost import Plan, World
from bench.scheduler_engine import profile, scaled
from bench.scheduler_paper import EVICTIONS, PRESSED_P99
from bench.scheduler_prefix import PAPER, Case, _steady, inputs
from bench.scheduler_replay import Replayed, replay
from bench.scheduler_report import render
from bench.scheduler_result import Asked, Prefix, PrefixRow, SchedulerReport, Simulated, Streamed
from bench.scheduler_simulated import SCHEDULERS
from engine.model.embedded import embedded_directory
from engine.model.loading import load_model
from scheduler.policies import NAMES
from scheduler.simulation.inputs import Input
from scheduler.simulation.run import NEVER, Setup, paper_limits
from scheduler.simulation.tokens import Segments
from scheduler.simulation.workload import CRAWLER

MACHINE = Machine("a processor", 2, 0.5, "3.11", {"torch": "2"})


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command saves what it prints, and each part holds what its table needs."""
    monkeypatch.setattr("bench.cli.THREADS", 1)  # quicker beside other tests, and as good a test
    saved, page = tmp_path / "run.json", tmp_path / "page.md"
    run = CliRunner().invoke(bench, ["scheduler", "--quick", "--json", str(saved)])
    assert run.exit_code == 0, run.output
    report = msgspec.json.decode(saved.read_bytes(), type=SchedulerReport)
    assert all(getattr(report, part) for part in SCHEDULER_PARTS)
    assert report.simulated is not None
    assert any(row.swaps + row.recomputes for row in report.simulated.pressed)
    assert any(row.swaps for row in report.simulated.pressed if row.eviction == "cost")
    assert report.engine is not None
    assert [row.scheduler for row in report.engine.rows] == ["vLLM-NS", "fcfs"]
    assert report.prefix is not None
    assert any(row.reused for row in report.prefix.real)
    assert report.flood is not None
    assert report.flood.tokens_a_second["POOL"] > 0
    assert report.flood.tokens_a_second["STREAM"] > 0
    page.write_text("\n".join(markers("scheduler")))
    rendered = CliRunner().invoke(bench, ["render", str(saved)])
    assert rendered.stdout == run.stdout
    assert CliRunner().invoke(bench, ["render", str(saved), "--into", str(page)]).exit_code == 0
    assert run.stdout in page.read_text()


def test_the_replay_is_timed_from_the_last_input() -> None:
    """Pieces reach the engine at their times; a prompt no pool can hold is not an answer."""
    loaded = load_model(embedded_directory(), dtype="float32", device="cpu")
    costs = profile(loaded, 32, 64, quick=True)
    pieces = [
        Input(0, 0, "open", Segments([range(20)]), False),
        Input(1_000_000, 1, "open", Segments([range(100, 900)]), True),
        Input(150_000_000, 0, "append", Segments([range(50, 60)]), True),
    ]
    setup = Setup(256, limits=paper_limits(max_batch_tokens=32, chunk_min=32, chunk_max=32))
    found = replay(pieces, setup, loaded, costs)
    assert found.ttft_ns[0] > 0
    assert found.ttft_ns[1] == NEVER
    assert found.preempted == 0


@pytest.mark.parametrize("policy", NAMES)
def test_a_measured_step_keeps_as_many_alive(policy: str) -> None:
    """A new request replaces each that ends, streams are finished, and planning changes nothing."""
    sizes = Plan(prompt=64, answer=3)
    world, twin = (World(sizes, 30, 2.5, policy) for _ in range(2))
    first = set(world.live)
    for _ in range(60):
        for each in (world, twin):
            each.feed()
        assert world.planned() >= 0
        assert world.sorted_anew() >= 0
        world.stepped()
        twin.stepped()
        assert len(world.live) == 30
    assert world.device.executor.tokens == twin.device.executor.tokens > 0
    assert first.isdisjoint(world.live)


def test_the_loads_of_prefixes_are_what_they_are_called() -> None:
    """Four prompts of each user in the one, regulars and strangers in the other; equal for all policies."""
    cases = {name: Case(name, PAPER, 1.0, 5.0, "fcfs", 3, 400, 30, 4) for name in ("sessions", "regulars")}
    counts = {}
    for name, case in cases.items():
        histories = [piece.tokens[256] for piece in inputs(case)]
        counts[name] = np.unique(histories, return_counts=True)[1]
        assert [piece.tokens for piece in inputs(case)] == [piece.tokens for piece in inputs(case)]
        assert all(piece.tokens.ranges[0] == range(256) for piece in inputs(case))
    assert set(counts["sessions"]) == {4}
    assert 100 < (counts["regulars"] == 1).sum() < 200
    assert counts["regulars"].sum() == 400


def test_a_scaled_workload_has_shorter_prompts_and_the_same_pieces() -> None:
    """Only tokens are divided."""
    small = scaled(CRAWLER, 16)
    assert small.tokens.at(0.5) == pytest.approx(CRAWLER.tokens.at(0.5) / 16)
    assert small.chunks is CRAWLER.chunks
    assert small.gap_ms is CRAWLER.gap_ms


def test_gains_and_verdicts_are_worked_out_against_the_right_rows() -> None:
    """Speed-ups over vLLM-NS of the same rate; the worst of fcfs and lcas; cost over the better pure one."""
    p99 = {"vLLM-NS": 8.0, "vLLM-S": 10.0, "fcfs": 2.0, "lcas": 16.0, "mcps": 80.0}
    rates = [_row(name, "cost", 1.0, p99[name]) for name in SCHEDULERS]
    pressed = [_row("vLLM-NS", "cost", 10.0, 8.0)]
    for name, eviction in product(("fcfs", "mcps"), EVICTIONS):
        pressed.append(_row(name, eviction, 10.0, {"recompute": 3.0, "swap": 1.0, "cost": 2.0}[eviction]))
    text = render(_report(simulated=Simulated(1000, rates, pressed)))
    assert "Least gain of fcfs and lcas at P99: 0.50 (lcas, crawler 4, h)" in text
    assert "goal: at most 1): fcfs, crawler, h: 2.00." in text
    assert "| 4 | fcfs | 1.00 | 1.00 | 2.00 | 8.00 | 8.00 | 4.00 |" in text
    paper = PRESSED_P99["crawler", "fcfs"]
    assert f"| fcfs | swap | 8.00 | 7.78 | 8.00 | 8.00 | {paper[1]:.2f} | 3 / 4 | 709 | 10% | 0 |" in text


def test_k_lpm_is_compared_with_the_policy_that_is_better_on_all_seeds() -> None:
    """Here FCFS: half and twice on its seeds, so 1 in the mean, and two standard errors are log 4."""
    p99 = {"fcfs": (4.0, 1.0), "lpm": (2.0, 3.0), "klpm": (2.0, 2.0), "klpm-adaptive": (1.0, 1.0)}
    rows = [
        PrefixRow("sessions", 1.0, 5.0, policy, seed, 1.0, p99[policy][seed], 0.5)
        for seed in (0, 1)
        for policy in p99
    ]
    text = render(_report(prefix=Prefix(4, "h", rows)))
    assert (
        "| sessions | 1 | 5.0 | 2.50 | 2.50 | 2.00 | 1.00 | 1.00 (0.25 to 4.00) | 0.50 (0.13 to 2.00) |"
        in text
    )


def test_a_run_is_made_again_only_while_the_machine_was_slower_than_before() -> None:
    """By pace, whatever its TTFT."""
    paces = iter((1.4, 1.3, 1.1, 1.0))

    def run() -> Replayed:
        return Replayed(np.zeros(1, np.int64), 0, 0.0, next(paces))

    assert _steady(run, 1.0, 3).pace == 1.1, "the third is quick enough"
    assert _steady(run, 1.0, 3).pace == 1.0, "the first will do"


def test_the_bound_in_a_flood_is_of_the_idle_tail_and_one_batch() -> None:
    """Each by its p99."""
    asked = Asked("FLASH", Latency(9, 1.0, 10.0, 50.0), Latency(9, 1.0, 1.0, 1.0), 100.0)
    assert asked.bound_ms == 115.0


def _report(simulated: Simulated | None = None, prefix: Prefix | None = None) -> SchedulerReport:
    return SchedulerReport(
        "foretick bench scheduler", "2026-01-01 00:00", 2, MACHINE, simulated=simulated, prefix=prefix
    )


def _row(scheduler: str, eviction: str, delay: float, p99: float) -> Streamed:
    slow = scheduler == "vLLM-NS"
    return Streamed(
        workload="crawler",
        profile="h",
        qps=4.0,
        delay=delay,
        scheduler=scheduler,
        eviction=eviction,
        requests=9,
        failed=0,
        mean_s=1.0,
        p50_s=8.0 if slow else 1.0,
        p95_s=8.0 if slow else 1.0,
        p99_s=p99,
        p99_seeds_s=[p99],
        completion_s=1.0,
        busy=0.5,
        swaps=3.0,
        recomputes=4.0,
        many_invalidated=0.1,
    )
