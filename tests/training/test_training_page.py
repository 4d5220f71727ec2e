"""The page of accuracies shows the evaluations that it is made from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.training.answered import answers
from training.evaluate import COLUMNS, Report, score
from training.page import filled, marks, write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accuracy.md"
FILES = sorted((ROOT / "docs" / "measurements" / "accuracy").glob("*.json"))


def report() -> Report:
    return Report("m", "r", {"tape": "generated", "seed": 1}, {"terse, fresh": [score(answers(500))]})


def test_a_part_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    begin, end = marks("generated")
    page, file = tmp_path / "page.md", tmp_path / "generated.json"
    page.write_text(f"Before\n{begin}old\n{end}After\n")
    file.write_bytes(msgspec.json.encode(report()))
    write(page, [file])
    write(page, [file])
    text = page.read_text()
    assert text.startswith(f"Before\n{begin}Model `m`")
    assert text.endswith(f"{end}After\n")
    assert "old" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("| trend ")]
    assert len(line.split("|")) == len(COLUMNS) + 2


def test_a_page_without_the_part_is_refused() -> None:
    with pytest.raises(ValueError, match="accuracy:generated:begin"):
        filled("nothing", "generated", report())


def test_the_page_shows_the_committed_evaluations() -> None:
    """`python -m training.page docs/accuracy.md docs/measurements/accuracy/*.json` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    for file in FILES:
        found = msgspec.json.decode(file.read_bytes(), type=Report)
        assert filled(text, file.stem, found) == text
