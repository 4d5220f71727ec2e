"""The ten questions of docs/measurements/teach, on which nothing was tuned, each taught in ten minutes."""

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from training.teach_cli import teach

FILES = sorted((Path(__file__).parents[2] / "docs/measurements/teach").glob("*.toml"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_question_that_nothing_was_tuned_on_is_taught_in_ten_minutes(file: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    options = ["--out", str(tmp_path / "own.pack"), "--card", str(tmp_path / "own.md")]
    result = CliRunner().invoke(teach, [str(file), *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "own.pack").exists()
    assert time.monotonic() - began <= 600
