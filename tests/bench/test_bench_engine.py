"""`foretick bench engine` in its smallest size: every part is measured, saved and rendered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.engine.batches import Readers, Stopwatch, compare, standing_texts
from bench.engine.contenders import Disagreement, Reply
from bench.engine.floor import Floors, PassCosts, causal
from bench.engine.rates import Rate
from bench.figures import Figure
from bench.run import read
from bench.suites import SUITES
from engine.attention.reference import ReferenceAttention

COSTS = PassCosts(
    weight_bytes=100 * 4,
    linear_bytes=60 * 4,
    linear_flops=2 * 60,
    kv_bytes=2 * 2 * 2 * 8 * 4,
    attention_flops=4 * 2 * 4 * 8,
    unread_flops=0,
    unread_attention_flops=0,
)
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


def test_every_part_is_measured(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    run = CliRunner().invoke(bench, ["engine", "--quick", "--threads", "1", "--json", str(saved)])
    assert run.exit_code == 0, run.output
    parts = {part.name: part.figures for part in read(saved).parts}
    assert list(parts) == list(SUITES["engine"])
    (agreed,) = _named(parts["questions"], "answers equal to the reference's")
    assert 0 < agreed.ours == agreed.reference
    assert {f.against for f in _named(parts["questions"], "question P50")} == {"kept cache", "dense", "floor"}
    assert {f.against for f in _named(parts["sessions"], "one pass")} == {
        "in turn", "kept caches one by one", "floor",
    }  # fmt: skip
    assert [f.setting["rows"] for f in _named(parts["standing"], "gain of one pass")][1::2] == [2, 4]
    attention, passes = (_named(parts["standing"], name) for name in ("attention in one pass", "one pass"))
    assert all(0 < a.ours < p.ours for a, p in zip(attention, passes[::2], strict=True))
    assert all(f.reference for f in passes if f.against == "floor")
    placed = _named(parts["standing"], "one version's answers P50")
    assert [(f.setting["placement"], f.setting["questions"]) for f in placed] == [
        (placement, n) for n in (1, 2, 4) for placement in ("ephemeral", "frozen")
    ]
    rows = {(f.setting["placement"], f.setting["questions"]): f.setting["rows"] for f in placed}
    assert rows["frozen", 4] < rows["ephemeral", 4] / 2  # type: ignore[operator]  # numbers
    (extents,) = _named(parts["window"], "extents seen, most")
    assert extents.setting["tokens evicted"] > 0  # type: ignore[operator]  # a number
    assert extents.ratio is not None
    assert extents.ratio > 1, "position frames have changed"
    assert _named(parts["refresh"], "question during refreshes P99")[1].against == "bound"
    alone = _named(parts["attention"], "arithmetic")
    assert [(f.setting[""], f.setting["rows"]) for f in alone] == [
        (dtype, rows) for dtype in ("float32", "bfloat16") for rows in (1, 18)
    ]
    assert all(f.ratio for f in alone)


def _named(figures: list[Figure], name: str) -> list[Figure]:
    return [figure for figure in figures if figure.name == name]


def test_another_answer_in_one_pass_fails_the_run() -> None:
    """Readers in one pass must answer as they do alone and as the kept caches do, except for ties."""
    watch = Stopwatch(ReferenceAttention())

    def answers(*tokens: int, gap: float = 1.0) -> Callable[[], list[Reply]]:
        def ask() -> list[Reply]:
            watch.ns += 10  # as if attention had been called
            return [Reply(token, 1.0, gap) for token in tokens]

        return ask

    of = Readers("two", 2, 2, 1.0, 10)
    found = compare(of, watch, [answers(1, 2), answers(1, 2), answers(1, 2)], 3)
    assert [len(ns) for ns in (*found.passes, *found.attention)] == [3] * 6
    assert found.attention[0] == found.attention[1], "a gain of 1"
    with pytest.raises(Disagreement):
        compare(of, watch, [answers(1, 2), answers(1, 3)], 1)
    with pytest.raises(Disagreement):
        compare(of, watch, [answers(1, 2), answers(1, 2), answers(3, 2)], 1)
    with pytest.raises(ValueError, match="zip"):
        compare(of, watch, [answers(1, 2), answers(1)], 1)
    compare(of, watch, [answers(1, 2, gap=1e-5), answers(1, 3, gap=1e-5)], 1)


def test_standing_questions_are_all_different() -> None:
    """Twenty-five questions, the paper's six first; equal ones would share more than real questions do."""
    texts = standing_texts(25)
    assert len(set(texts)) == 25
    assert standing_texts(6) == texts[:6]
