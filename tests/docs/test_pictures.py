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

    def slots(row: str, *colours: str) -> int:
        return sum(d.count("z") for fill, d in re.findall(r'fill="(.*?)" d="(.*?)"', row) if fill in colours)

    assert slots(rows[0], "#2f6f8f") == FROZEN
    bars = [slots(row, "#7fb069", "#a9cf95", "#5d8f4b") for row in rows]
    assert bars == [0, 4, 8, 12, *[16] * 7]
    assert slots(rows[-1], "#d9822b") == 3
