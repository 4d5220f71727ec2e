"""The command line loads a command when it is used."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from daemon.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help


def test_the_help_lists_every_command_and_loads_none() -> None:
    program = (
        "import sys\n"
        "from daemon.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert not {'torch', 'zmq', 'aiokafka', 'daemon.cli.options', 'lab', 'bench'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["nothing"])
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.output


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_setting_without_a_value_and_an_unknown_key_end_with_status_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    options = [command, "--config", str(tmp_path / "empty.toml"), "--set"]
    assert "is not KEY=VALUE" in CliRunner().invoke(main, [*options, "http.port"]).output
    unknown = CliRunner().invoke(main, [*options, "http.prot=1"])
    assert unknown.exit_code == 2
    assert "did you mean port?" in unknown.output


def test_a_library_that_finds_no_room_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `ulimit -v`."""

    def load(name: str) -> None:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr("daemon.cli.main.import_module", load)
    done = CliRunner().invoke(main, ["check"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("no memory for the libraries: libtorch_cpu.so")
    assert done.stderr.count("\n") == 1


def test_a_library_that_fails_otherwise_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ImportError("a defect")

    monkeypatch.setattr("daemon.cli.main.import_module", load)
    assert isinstance(CliRunner().invoke(main, ["check"]).exception, ImportError)
