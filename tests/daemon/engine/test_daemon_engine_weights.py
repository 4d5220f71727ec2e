"""`model.weights`: what a quantised model is told apart by, what `check` says of it, and what is refused."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from daemon.cli.main import main
from daemon.config.schema import UNTRAINED, ModelConfig
from daemon.engine.build import build, load_checked
from daemon.engine.memory_budget import shown_bytes
from engine.model.embedded import embedded_directory
from engine.model.loaded import Weights
from engine.model.terse import TAPE_MODEL
from tests.engine.oracle import random_weights, tiny_config, words
from tests.kit import inproc_config

FILE = """
standing = "none"
[model]
path = "PATH"
layers = "LAYERS"
weights = "WEIGHTS"
calibration = "CALIBRATION"
[[sessions]]
name = "one"
symbol = "V:A"
retention_tokens = 256
"""


def check(
    tmp_path: Path,
    *,
    path: Path | str = UNTRAINED,
    layers: str = "compiled",
    weights: str = "int8",
    calibration: str = "off",
) -> tuple[int, list[str]]:
    text = FILE.replace("PATH", str(path)).replace("LAYERS", layers).replace("CALIBRATION", calibration)
    (tmp_path / "f.toml").write_text(text.replace("WEIGHTS", weights))
    done = CliRunner().invoke(main, ["check", "--config", str(tmp_path / "f.toml")])
    return done.exit_code, done.output.splitlines()


@pytest.mark.parametrize(("weights", "bits"), [("int8", 9), ("int4", 7)])
def test_check_says_how_weights_are_held_and_what_they_take(
    tmp_path: Path, weights: Weights, bits: int
) -> None:
    code, lines = check(tmp_path, weights=weights)
    assert code == 0, lines
    assert f"ok    model.layers: compiled layers in float32 with weights in {weights}" in lines
    held, whole = (
        load_checked(embedded_directory(), device="cpu", layers="compiled", weights=each).packed_bytes
        for each in (weights, "float")
    )
    assert held < whole * (bits + 1.5) / 32  # norms and biases are floats
    assert f"ok    model.weights: {weights}: {shown_bytes(held)}" in lines


def test_layers_that_read_no_codes_are_refused_in_one_line(tmp_path: Path) -> None:
    code, lines = check(tmp_path, layers="torch", weights="int4")
    assert code == 2
    (line,) = [each for each in lines if each.startswith("WRONG")]
    assert line.startswith("WRONG model.weights: model.weights is int4, which compiled layers read: ")


def test_an_architecture_that_is_not_compiled_is_refused(tmp_path: Path) -> None:
    random_weights(tiny_config("gemma2")).save_pretrained(tmp_path / "gemma")
    words().save_pretrained(tmp_path / "gemma")
    code, lines = check(tmp_path, path=tmp_path / "gemma", layers="auto")
    assert code == 2
    (line,) = [each for each in lines if each.startswith("WRONG")]
    assert line.startswith("WRONG model.weights: model.weights is int8, which compiled layers read")


def test_a_calibration_of_another_quantisation_is_refused(tmp_path: Path) -> None:
    """That of the tape model is of its float weights."""
    code, lines = check(tmp_path, path="", calibration=str(TAPE_MODEL / "calibration.json"))
    assert code == 2
    (line,) = [each for each in lines if each.startswith("WRONG")]
    assert line.startswith("WRONG model.calibration: ")
    assert "was fitted for model" in line


def test_quantised_weights_are_told_apart_in_answers_and_snapshots() -> None:
    found = []
    ways: tuple[Weights, ...] = ("auto", "int8", "int4")
    for weights in ways:
        settings = ModelConfig(path=UNTRAINED, layers="compiled", threads=1, weights=weights)
        built = build(inproc_config(model=settings, standing="none"), {})
        found.append((built.loaded.revision, built.identity))
        assert built.loaded.dtype == torch.float32
    revisions, (first, second, third) = zip(*found, strict=True)
    assert len(set(revisions)) == 3
    assert first != second != third != first
