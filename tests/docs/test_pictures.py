"""Pictures are those that the code draws today."""

import re

import pytest

from tests.docs.pictures import FOLDER, PICTURES
from tests.regions.numbered import FROZEN


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_drawn_by_the_code(name: str) -> None:
    """`python -m tests.docs.pictures` writes them."""
    assert (FOLDER / name).read_text() == PICTURES[name]()


def test_the_window_keeps_four_bars_and_the_question_three_tokens() -> None:
    rows = re.split(r"<text x=\"4\"[^>]*>", PICTURES["window.svg"]())[1:]
    assert rows[0].count("#2f6f8f") == FROZEN
    bars = [sum(row.count(colour) for colour in ("#7fb069", "#a9cf95", "#5d8f4b")) for row in rows]
    assert bars == [0, 4, 8, 12, *[16] * 7]
    assert rows[-1].count("#d9822b") == 3
