"""The page of accuracies shows the evaluations that it is made from."""

from pathlib import Path

import pytest

from training.page import filled, write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accuracy.md"
FILES = sorted((ROOT / "docs" / "measurements" / "accuracy").iterdir())


def test_a_page_without_the_part_is_refused() -> None:
    with pytest.raises(ValueError, match="accuracy:generated:begin"):
        filled("nothing", "generated", "")


def test_the_page_shows_the_committed_evaluations(tmp_path: Path) -> None:
    """`python -m training.page docs/accuracy.md docs/measurements/accuracy/*` writes it."""
    text, page = PAGE.read_text(encoding="utf-8"), tmp_path / "accuracy.md"
    page.write_text(text)
    write(page, FILES)
    assert page.read_text() == text
