"""The examples of the Python API: short, and they run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model.embedded import embedded_directory
from tests.kit.records import bars_format

ROOT = Path(__file__).parents[2]
CONFIG = """
[model]
path = "untrained"
[[sessions]]
name = "made-up"
symbol = "V:UP"
[query]
endpoint = "tcp://127.0.0.1:*"
[http]
port = 0
[process]
spare_engine = false
[recovery]
interval = "0s"
[bars]
interval = "1m"
[source]
kind = "replay"
[source.replay]
file = "{bars}"
format = "{form}"
"""
BARS = """time,o,h,l,c,v
2024-08-08T14:30:00Z,1.5,2,1,1.75,3
2024-08-08T14:31:00Z,1.75,2,1.5,2,4
"""


def run(*arguments: str, lines: str = "", first: Path = ROOT) -> str:
    """What Python prints; it imports from ``first``, and then from the repository."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=first,
        env=os.environ | {"PYTHONPATH": f"{first}:{ROOT}"},
        input=lines,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_an_example_has_at_most_thirty_lines_and_is_listed(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30
    assert f"({path.name})" in (ROOT / "examples/README.md").read_text(encoding="utf-8")


def test_a_daemon_in_another_program_answers(tmp_path: Path) -> None:
    config = tmp_path / "foretick.toml"
    for name, text in (("bars.csv", BARS), ("bars.toml", bars_format("UP"))):
        (tmp_path / name).write_text(text)
    config.write_text(CONFIG.format(bars=tmp_path / "bars.csv", form=tmp_path / "bars.toml"))
    shown = run("examples/embedded_daemon.py", str(config), "made-up", "Is it rising?")
    assert shown.startswith("ready: http://127.0.0.1:")
    assert re.search(r"at data version [12]\n", shown)


def test_an_engine_answers_over_lines_that_came() -> None:
    shown = run("examples/embedded_engine.py", str(embedded_directory()), lines="101.5\n101.7\n102.1\n")
    assert shown.startswith("data version 3: ")
