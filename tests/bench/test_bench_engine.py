"""`foretick bench engine` in its smallest size: every part is measured, saved and rendered."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench.cli import bench
from bench.engine.batches import compare, standing_texts
from bench.engine.contenders import Disagreement, Reply
from bench.engine.floor import Floors, PassCosts, causal
from bench.engine.rates import MachineRates, Rate, _total
from bench.figures import Figure
from bench.run import read
from bench.suites import SUITES

COSTS = PassCosts(100 * 4, 60 * 4, 2 * 60, kv_bytes=2 * 2 * 2 * 8 * 4, attention_flops=4 * 2 * 4 * 8)
FLOORS = Floors(COSTS, Rate("oneDNN", 1e9), Rate("a sum", 1e9))


def test_floors_are_the_larger_of_arithmetic_and_reading() -> None:
    """Many rows are bound by arithmetic, one row by reading its KV; both counted by hand."""
    many = FLOORS.attention(rows=100, shared=1000, own=10, readers=5)
    assert many.arithmetic_ms == pytest.approx(4 * 2 * 4 * 8 * 100 * 1010 / 1e6)
    assert many.reading_ms == pytest.approx(2 * 2 * 2 * 8 * 4 * (1000 + 5 * 10) / 1e6)
    assert many.ms == many.arithmetic_ms
    weights = FLOORS.linear(rows=1)
    assert weights.ms == weights.reading_ms == pytest.approx(60 * 4 / 1e6)
    assert FLOORS.of_pass(1, 1000) == FLOORS.attention(1, 1000).ms + weights.ms
    assert causal(3) == 2
    assert FLOORS.made_of == "1 GFLOP/s (oneDNN), 1 GB/s (a sum)"


def test_another_answer_in_one_pass_fails_the_run() -> None:
    """Readers in one pass must answer as they do alone and as the kept caches do, except for ties."""

    def answers(*tokens: int, gap: float = 1.0) -> Callable[[], list[Reply]]:
        return lambda: [Reply(token, 1.0, gap) for token in tokens]

    assert [len(ns) for ns in compare([answers(1, 2)] * 3, 3, 100)] == [3] * 3
    for others in ([answers(1, 3)], [answers(1, 2), answers(3, 2)]):
        with pytest.raises(Disagreement):
            compare([answers(1, 2), *others], 1, 100)
    with pytest.raises(ValueError, match="zip"):
        compare([answers(1, 2), answers(1)], 1, 100)
    compare([answers(1, 2, gap=1e-5), answers(1, 3, gap=1e-5)], 1, 100)


def test_standing_questions_are_all_different() -> None:
    """The paper's six first; equal ones would share more than real questions do."""
    assert len(set(standing_texts(25))) == 25
    assert standing_texts(6) == standing_texts(25)[:6]


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_every_part_is_measured(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    run = CliRunner().invoke(bench, ["engine", "--quick", "--threads", "1", "--json", str(saved)])
    assert run.exit_code == 0, run.output
    parts = {part.name: part.figures for part in read(saved).parts}
    assert list(parts) == list(SUITES["engine"])
    assert {f.against for f in _named(parts["sessions"], "one pass P50")} == {
        "in turn", "kept caches one by one", "floor",
    }  # fmt: skip
    assert [f.setting["rows"] for f in _named(parts["standing"], "gain of one pass")][1::2] == [2, 4]
    floored = [f for f in _named(parts["standing"], "one pass P50") if f.against == "floor"]
    assert all(f.ratio for f in floored)
    placed = _named(parts["standing"], "one version's answers P50")
    assert [(f.setting["placement"], f.setting["questions"]) for f in placed] == [
        (placement, n) for n in (1, 2, 4) for placement in ("ephemeral", "frozen")
    ]
    assert not any(f.against for f in placed), "what times as long it takes has a figure of its own"
    rows = {(f.setting["placement"], f.setting["questions"]): f.setting["rows"] for f in placed}
    assert rows["frozen", 4] < rows["ephemeral", 4] / 2  # type: ignore[operator]  # numbers


def _named(figures: list[Figure], name: str) -> list[Figure]:
    return [figure for figure in figures if figure.name == name]


def test_the_best_library_is_taken_and_named() -> None:
    """Every way is measured at each look; the rate is that of the fastest look of the fastest way."""
    rates = MachineRates(64, 1 << 16, threads=2)
    rates.look()
    rates.look()
    found = {figure.name: figure for figure in rates.figures()}
    for what, best in (
        ("product in float32", rates.product(torch.float32)),
        ("product in bfloat16", rates.product(torch.bfloat16)),
        ("memory read", rates.read()),
    ):
        ways = {name: figure for name, figure in found.items() if name.startswith(what)}
        assert len(ways) > 1 or what == "product in bfloat16"
        assert best.a_second == pytest.approx(1e9 * max(figure.high or 0.0 for figure in ways.values()))
        assert f"{what}, {best.by}" in ways
    assert {figure.n for figure in found.values()} == {10}
    assert _total(np.arange(1000)) == 999 * 500, "every byte is read"
    with pytest.raises(ValueError, match="product in float16"):
        rates.product(torch.float16)
