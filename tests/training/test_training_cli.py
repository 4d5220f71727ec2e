"""`foretick train` from the command line: checkpoints, several workers, the exported directory."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from training.cli import train
from training.export import is_packed
from training.train import load

SIZES = {
    "--steps": 2,
    "--cooldown": 1,
    "--short": 2,
    "--tokens": 256,
    "--hidden": 24,
    "--layers": 2,
    "--heads": 2,
    "--inner": 16,
}
TINY = [str(word) for pair in SIZES.items() for word in pair]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(train, [*TINY, *map(str, arguments)])


def test_a_run_writes_checkpoints_and_a_model_directory(tmp_path: Path) -> None:
    result = run("--out", tmp_path, "--export", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert f"step 2 written to {tmp_path / 'model'}" in result.output.replace("\n", "")
    assert (tmp_path / "stable.pt").exists()
    assert is_packed(tmp_path / "model")


def test_a_finished_checkpoint_is_exported_as_it_is(tmp_path: Path) -> None:
    assert run("--out", tmp_path).exit_code == 0
    checkpoint = (tmp_path / "last.pt").read_bytes()
    result = run("--out", tmp_path, "--resume", tmp_path / "last.pt", "--export", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "last.pt").read_bytes() == checkpoint


def test_workers_average_their_gradients(tmp_path: Path) -> None:
    """Each draws tapes of its own, so two workers make another model than one."""
    found = {}
    for workers in (1, 2):
        result = run("--out", tmp_path / str(workers), "--workers", workers)
        assert result.exit_code == 0, result.output
        found[workers] = load(tmp_path / str(workers) / "last.pt")[0].embed_tokens
    assert torch.isfinite(found[2]).all()
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("heads", [5, 8])
def test_a_width_that_heads_do_not_divide_is_refused(tmp_path: Path, heads: int) -> None:
    result = run("--out", tmp_path, "--heads", heads)
    assert result.exit_code == 2
    assert "--hidden must be a multiple of --heads" in result.output
