"""The GPU benchmark's code runs anywhere in its smallest size; its figures are only a GPU's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import gpu
from bench.gpu_result import GpuReport
from bench.gpu_shapes import QUICK, TINY, Costs, random_model
from scheduler.costs import load


def test_every_figure_is_taken(tmp_path: Path) -> None:
    """One quick run on the CPU: a report with all parts, a profile for the cost model, and the table."""
    target = tmp_path / "gpu.json"
    page = gpu.run(quick=True, device="cpu", json_file=target, profiles=tmp_path / "profiles")
    report = msgspec.json.decode(target.read_bytes(), type=GpuReport)
    assert [q.how for q in report.questions] == ["eager"]
    assert report.questions[0].latency.n == QUICK.repeats
    assert report.questions[0].decode.n == QUICK.repeats * QUICK.answer
    assert report.standing_over_one > 0
    assert [p.context for p in report.attention_points if p.rows == 1] == list(QUICK.curve)
    assert sorted({n for n, _ in report.samples.prefills}) == list(QUICK.curve)
    assert (
        min(s for n, s in (*report.samples.prefills, *report.samples.swap_out, *report.samples.swap_in)) > 0
    )
    (profile,) = (tmp_path / "profiles").iterdir()
    assert profile.name == "cpu.json"
    assert load(profile) == report.profile
    assert report.profile.model == QUICK.name
    assert "goals:" in page
    assert f"| {QUICK.curve[0]} |" in page


def test_floors_are_counted_from_the_model() -> None:
    """Bytes and arithmetic of a shape small enough to count by hand."""
    costs = Costs.of(random_model(TINY, "cpu"))
    hidden, inner, vocabulary, layers = 64, 128, 512, 2
    matrices = layers * (hidden * 64 + 2 * hidden * 32 + 64 * hidden + 3 * hidden * inner)
    norms = (2 * layers + 1) * hidden
    assert costs.matrix_flops == 2 * matrices
    assert costs.head_flops == 2 * vocabulary * hidden
    assert costs.weight_bytes == 4 * (matrices + norms + vocabulary * hidden)
    assert costs.kv_bytes == layers * 2 * (16 + 16) * 4
    assert costs.attention_flops == layers * 2 * 4 * (16 + 16)
    assert costs.memory_floor_s(10, 100.0) == (costs.weight_bytes + 10 * costs.kv_bytes) / 100.0
    # one row behind two keys meets three in the first layer; in the last it leaves its key and value
    last = 2 * 2 * hidden * 32
    assert costs.matrix_floor_s(1, 2, 1.0) == costs.matrix_flops / 2 + last + 3 * costs.attention_flops / 2


@pytest.mark.parametrize("arguments", [["bench", "gpu", "--quick"], ["--quick"]])
def test_the_command_is_told_as_it_can_be_given_again(arguments: list[str]) -> None:
    """Started by `foretick bench gpu` or by `python -m bench.gpu`."""
    assert gpu.command(arguments) == "foretick bench gpu --quick"
