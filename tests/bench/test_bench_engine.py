"""`foretick bench engine` in its smallest size: every part is measured, saved and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from bench.cli import ENGINE_PARTS, bench
from bench.contenders import Reply
from bench.engine_batches import standing_texts
from bench.engine_floor import Limits, Shape, attention_floor, causal, linear_floor, pass_floor
from bench.engine_result import EngineReport
from bench.engine_together import Setting, Stopwatch, compare
from bench.figures import Rates
from bench.page import markers
from bench.questions_result import Disagreement
from tests.engine.reference_attention import ReferenceAttention

SHAPE = Shape("tiny", 100, 60, layers=2, q_heads=4, kv_heads=2, head_dim=8)
LIMITS = Limits(Rates(1, [1e9]), Rates(1, [1e9]))


def test_floors_are_the_larger_of_arithmetic_and_reading() -> None:
    """Many rows are bound by arithmetic, one row by reading its KV; both counted by hand."""
    many = attention_floor(SHAPE, LIMITS, rows=100, shared=1000, own=10, readers=5)
    assert many.arithmetic_ms == pytest.approx(4 * 2 * 4 * 8 * 100 * 1010 / 1e6)
    assert many.reading_ms == pytest.approx(2 * 2 * 2 * 8 * 4 * (1000 + 5 * 10) / 1e6)
    assert many.ms == many.arithmetic_ms
    weights = linear_floor(SHAPE, LIMITS, rows=1)
    assert weights.ms == weights.reading_ms == pytest.approx(60 * 4 / 1e6)
    assert pass_floor(SHAPE, LIMITS, 1, 1000) == attention_floor(SHAPE, LIMITS, 1, 1000).ms + weights.ms
    assert causal(3) == 2


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command saves what it prints, and each part holds what its table needs."""
    monkeypatch.setattr("bench.cli.THREADS", 1)  # quicker beside other tests, and as good a test
    saved, page = tmp_path / "run.json", tmp_path / "page.md"
    run = CliRunner().invoke(bench, ["engine", "--quick", "--json", str(saved)])
    assert run.exit_code == 0, run.output
    report = msgspec.json.decode(saved.read_bytes(), type=EngineReport)
    assert all(getattr(report, part) for part in ENGINE_PARTS)
    assert report.questions is not None
    assert report.questions.agreed > 0
    assert [t.readers for t in report.standing] == [2, 2, 4, 4]
    assert report.sessions is not None
    assert report.sessions.kept_ratio is not None
    assert all(0 < t.attention_together.p50_ms < t.together.p50_ms for t in report.standing)
    assert [t.rows for t in report.standing if "token each" in t.name] == [2, 4]
    assert report.window is not None
    assert report.window.evicted_tokens > 0
    assert max(report.window.extents) > report.window.grown_extents  # position frames have changed
    assert report.refresh is not None
    assert report.refresh.window_tokens > 0
    assert report.bookkeeping is not None
    assert {len(o.us) for o in report.bookkeeping.operations} == {len(report.bookkeeping.contexts)}
    page.write_text("\n".join(markers("engine")))
    rendered = CliRunner().invoke(bench, ["render", str(saved)])
    assert rendered.stdout == run.stdout
    assert CliRunner().invoke(bench, ["render", str(saved), "--into", str(page)]).exit_code == 0
    assert run.stdout in page.read_text()


def test_another_answer_in_one_pass_fails_the_run() -> None:
    """Readers in one pass must answer as they do alone, and as the kept caches do, unless it is a tie."""
    watch = Stopwatch(ReferenceAttention())

    def answers(*tokens: int, gap: float = 1.0) -> Callable[[], list[Reply]]:
        def ask() -> list[Reply]:
            watch.ns += 10  # as if attention had been called
            return [Reply(token, 1.0, gap) for token in tokens]

        return ask

    setting = Setting("two", 2, 2, 10, 1.0)
    found = compare(setting, watch, answers(1, 2), answers(1, 2), 3, answers(1, 2))
    assert found.kept is not None
    assert (found.together.n, found.in_turn.n, found.kept.n) == (3, 3, 3)
    assert found.attention_gain == 1.0
    with pytest.raises(Disagreement):
        compare(setting, watch, answers(1, 2), answers(1, 3), 1)
    with pytest.raises(Disagreement):
        compare(setting, watch, answers(1, 2), answers(1, 2), 1, answers(3, 2))
    with pytest.raises(ValueError, match="zip"):
        compare(setting, watch, answers(1, 2), answers(1), 1)
    compare(setting, watch, answers(1, 2, gap=1e-5), answers(1, 3, gap=1e-5), 1)


def test_standing_questions_are_all_different() -> None:
    """Twenty-five of them, the paper's six first; equal ones would share more than questions do."""
    texts = standing_texts(25)
    assert len(set(texts)) == 25
    assert standing_texts(6) == texts[:6]
