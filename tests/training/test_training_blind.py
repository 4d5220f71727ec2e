"""The ten questions of docs/measurements/teach, on which nothing was tuned, each taught in ten minutes.

Which of them are refused is what the table of docs/measurements/teach.md says.
"""

import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from training.teach_cli import teach

MEASUREMENTS = Path(__file__).parents[2] / "docs/measurements"
FILES = sorted((MEASUREMENTS / "teach").glob("*.toml"))
VERDICTS = dict(
    re.findall(r"^\| (\w+) \|.*\| (taught|refused: .*) \|$", (MEASUREMENTS / "teach.md").read_text(), re.M)
)


def test_each_question_has_a_verdict() -> None:
    assert sorted(VERDICTS) == [file.stem for file in FILES]
    assert len(FILES) == 10


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_question_that_nothing_was_tuned_on_is_taught_or_refused_in_ten_minutes(
    file: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    pack, card = tmp_path / "own.pack", tmp_path / "own.md"
    result = CliRunner().invoke(teach, [str(file), "--out", str(pack), "--card", str(card)])
    assert time.monotonic() - began <= 600
    assert card.exists(), result.output
    is_taught = VERDICTS[file.stem] == "taught"
    assert (pack.exists(), result.exit_code) == (is_taught, 0 if is_taught else 1), result.output
    no_better = "it is no better than a simple rule (a decision tree on the last ten bars: "
    assert is_taught or no_better in card.read_text()
