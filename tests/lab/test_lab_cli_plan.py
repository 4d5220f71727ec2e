"""`foretick plan` from the command line."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from lab.cli.plan import bytes_of
from lab.plan.plan import Plan

FILE = """
[source]
backlog_policy = "skip"
[[sessions]]
name = "aaa"
symbol = "V:AAA"
retention_records = 8
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "foretick.toml"
    path.write_text(FILE)
    return path


def planned(config: Path, *arguments: str) -> Result:
    fixed = ("--config", str(config), "--profile", "h200-paper", "--memory", "141GB", "--seconds", "3")
    return CliRunner().invoke(main, ["plan", *fixed, *arguments])


def test_a_column_for_each_rate(config: Path) -> None:
    found = planned(config, "--rate", "10,1000", "--asks", "5")
    assert found.exit_code == 0, found.output
    assert "1 sessions, 6 standing questions, model foretick-tape" in found.stdout
    assert "sessions by KV memory" in found.stdout
    assert "close to answer" in found.stdout
    rates = next(line for line in found.stdout.splitlines() if line.startswith("ticks a second"))
    assert rates.split()[-2:] == ["10", "1000"]


def test_json_has_all_figures(config: Path) -> None:
    found = planned(config, "--json", "--rate", "50")
    assert found.exit_code == 0, found.output
    (only,) = msgspec.json.decode(found.stdout, type=list[Plan])
    assert only.load.ticks == 50
    assert only.capacity.k == 6
    assert only.simulated.answers == 6 * only.simulated.versions > 0
    assert only.simulated.sessions_by_pool >= 1
    assert only.overload == ()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--set", "bars.interval=1ms", "--rate", "20000", "--seconds", "0.2"), "compute"),
        (("--memory", "6MB"), "KV memory"),
    ],
)
def test_a_rate_beyond_capacity_is_said_and_exits_with_1(
    config: Path, arguments: tuple[str, ...], what: str
) -> None:
    found = planned(config, *arguments)
    assert found.exit_code == 1, found.output
    assert f"ticks a second, {what}: " in found.stderr
    assert found.stderr.startswith("beyond capacity at ")
    assert "by formula" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "many"), "--rate: 'many' is not a number"),
        (("--rate", "0"), "the rate must be above 0"),
        (("--memory", "much"), "--memory: 'much' is not a size"),
        (("--profile", "missing"), "missing: no profile"),
        (("--set", "pool.block_size=32"), "was measured with blocks of 16 tokens"),
        (("--asks-standing", "0.8", "--asks-ready", "0.4"), "add up to more than 1"),
        (("--set", "model.path=/nowhere"), "is not a model directory"),
    ],
)
def test_wrong_arguments_exit_with_2(config: Path, arguments: tuple[str, ...], message: str) -> None:
    found = planned(config, *arguments)
    assert found.exit_code == 2, found.output
    assert message in found.stderr


def test_a_configuration_without_sessions(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    found = planned(path)
    assert found.exit_code == 2
    assert "there is no session to plan for" in found.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("141GB", 141e9), ("1.5GiB", 1.5 * 2**30), ("512", 512), ("8 MB", 8e6)]
)
def test_sizes(text: str, expected: float) -> None:
    assert bytes_of(text) == expected
