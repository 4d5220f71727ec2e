"""The GPU benchmark's code runs anywhere in its smallest size; its figures need a GPU."""

from pathlib import Path

import pytest

from bench.engine.floor import Floors, PassCosts
from bench.engine.rates import Rate
from bench.figures import Figure
from bench.gpu import QUICK, TINY, random_model
from bench.run import MeasurementFailed, SuiteRun, run
from scheduler.costs import load


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_every_figure_is_taken(tmp_path: Path) -> None:
    """One quick run on the CPU: every table has its figures, and the cost model has a profile."""
    settings = SuiteRun(
        threads=1, quick=True, device="cpu", profiles=tmp_path / "profiles", say=lambda text: None
    )
    (part,) = run("gpu", "foretick bench gpu --quick", settings).parts

    def named(name: str) -> list[Figure]:
        return [figure for figure in part.figures if figure.name == name]

    (question,), (token,) = named("question P50"), named("token P50")
    assert (question.setting["passes"], question.against) == ("eager", "memory floor")
    assert (question.n, token.n) == (QUICK.repeats, QUICK.repeats * QUICK.answer)
    assert question.goal is not None
    assert named(f"{QUICK.standing} standing questions")[0].against == "floor"
    assert named("reading")[0].against == "floor"
    for name in ("recompute", "swap out", "swap in"):
        assert [figure.setting["tokens"] for figure in named(name)] == list(QUICK.curve)
        assert min(figure.ours for figure in named(name)) > 0
    one_row = [figure for figure in named("KV read") if figure.setting["rows"] == 1]
    assert [figure.setting["context"] for figure in one_row] == list(QUICK.curve)
    (profile,) = (tmp_path / "profiles").iterdir()
    assert profile.name == "cpu.json"
    assert load(profile).model == QUICK.name


def test_a_device_that_is_not_there_ends_the_run_with_a_message() -> None:
    with pytest.raises(MeasurementFailed, match="cuda"):
        run("gpu", "foretick bench gpu", SuiteRun(quick=True, device="cuda:9", say=lambda text: None))


def test_floors_are_counted_from_the_model() -> None:
    """Bytes and arithmetic of a shape small enough to count by hand."""
    costs = PassCosts.of(random_model(TINY, "cpu"))
    hidden, inner, vocabulary, layers = 64, 128, 512, 2
    matrices = layers * (hidden * 64 + 2 * hidden * 32 + 64 * hidden + 3 * hidden * inner)
    norms = (2 * layers + 1) * hidden
    assert costs.linear_flops == 2 * matrices
    assert costs.linear_bytes == 4 * matrices
    assert costs.weight_bytes == 4 * (matrices + norms + vocabulary * hidden)
    assert costs.kv_bytes == layers * 2 * (16 + 16) * 4
    assert costs.attention_flops == layers * 2 * 4 * (16 + 16)
    floors = Floors(costs, Rate("a product", 1.0), Rate("a sum", 1.0))
    assert floors.memory_ms(10) == 1000 * (costs.weight_bytes + 10 * costs.kv_bytes)
