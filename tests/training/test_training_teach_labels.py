"""`foretick teach` from a file of labels, from the file to a pack or to the reason why there is none."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.model.question_pack import read_pack
from engine.model.revision import revision_of
from engine.model.terse import TAPE_MODEL
from tests.training.test_training_teach import QUICK, days_file, run, said
from training.sources import Recorded

BARS, LOOK_BACK = 2400, 19
FORMAT = "btc_perp_bars"
TEXT = 'name = "mine"\ntext = "Would I buy this breakout?"\nlabels = "mine.csv"\n'

Answer = Callable[[list[dict[str, float]], int], str]
"""A desk's judgement of a bar, by its number."""


def breaks_out(bars: list[dict[str, float]], bar: int) -> str:
    before = bars[max(0, bar - LOOK_BACK) : bar]
    return "YES" if before and bars[bar]["close"] > max(each["high"] for each in before) else "NO"


def by_coin(_: list[dict[str, float]], bar: int) -> str:
    return random.Random(bar).choice(["YES", "NO"])


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    days_file(tmp_path / "bars.csv", BARS)
    return tmp_path / "bars.csv"


def labelled(tape: Path, answer: Answer, last: int = BARS) -> Path:
    """The question of a file of labels, beside the tape, of each bar before ``last``."""
    (symbol, *_) = sorted(Recorded(tape, FORMAT).symbols())
    with tape.open() as file:
        rows = list(csv.DictReader(file))
    bars = [{name: float(row[name]) for name in ("high", "close")} for row in rows]
    lines = ["time,symbol,answer"]
    for number, row in enumerate(rows[:last]):
        opened = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC)
        lines.append(f"{opened:%Y-%m-%dT%H:%M:%SZ},{symbol},{answer(bars, number)}")
    (tape.parent / "mine.csv").write_text("\n".join(lines) + "\n")
    (tape.parent / "mine.toml").write_text(TEXT)
    return tape.parent / "mine.toml"


def test_labels_that_the_bars_explain_make_a_pack_of_their_tape_alone(tape: Path) -> None:
    question = labelled(tape, breaks_out)
    result = run(question, *QUICK, "--tape", tape, "--format", FORMAT)
    assert result.exit_code == 0, result.output
    pack, card = read_pack(question.with_suffix(".pack")), question.with_suffix(".md").read_text()
    assert (pack.head.name, pack.head.base) == ("mine", revision_of(TAPE_MODEL))
    assert pack.head.question["labels"] == "mine.csv"
    assert {tuple(each["choices"]) for each in pack.head.calibrations} <= {("YES", "NO")}
    assert "**Accepted**" in card
    assert "| labels | mine.csv |" in card
    assert "| own tape, fresh | " in card
    assert "| own tape, one window later | " in card
    assert "generated" not in card
    assert f"| revision | {pack.head.revision} |" in card


def test_labels_that_no_bar_explains_are_refused_with_the_reason_and_no_pack(tape: Path) -> None:
    question = labelled(tape, by_coin)
    result = run(question, *QUICK, "--tape", tape, "--format", FORMAT)
    assert result.exit_code == 1
    assert "mine.toml is not taught: own tape, fresh: its balanced accuracy is" in said(result)
    assert "below the floor of 75%" in said(result)
    assert "**Refused:**" in question.with_suffix(".md").read_text()
    assert not question.with_suffix(".pack").exists()


def test_labels_that_end_before_what_is_measured_on_decide_nothing(tape: Path) -> None:
    """The end of the tape, from three quarters on."""
    question = labelled(tape, breaks_out, last=BARS * 3 // 4)
    result = run(question, *QUICK, "--tape", tape, "--format", FORMAT)
    assert result.exit_code == 1
    assert "there are too few labels to judge by: 200 are needed" in said(result)
    assert not question.with_suffix(".pack").exists()
