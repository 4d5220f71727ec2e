"""A command that lacks a library says which extra of the package installs it."""

import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.cli.main import EXTRAS, main

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "grafana_client": ("dashboards", "push", "--url", "http://127.0.0.1:1", "--token", "right"),
    "matplotlib": ("simulate", "--requests", "1", "--plot", "plot.png"),
    "mcp": ("mcp",),
    "textual": ("top",),
    "sklearn": ("calibrate", "--model", ".", "--out", "calibration.json"),
    "threadpoolctl": ("bench", "engine", "--quick"),
}
IMPORTERS = ("lab.simulation.plots", "training.calibrate", "daemon.api.mcp_server", "daemon.top.app")
"""Modules that import such a library at their top, and may be loaded by now."""


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_extra_is_named_in_one_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for importer in IMPORTERS:
        monkeypatch.delitem(sys.modules, importer, raising=False)
    # as if it were not installed, although other tests may have loaded parts of it
    for name in {module, *(name for name in sys.modules if name.startswith(f"{module}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(main, COMMANDS[module])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"`foretick {COMMANDS[module][0]}` needs {module}: ")
    assert done.stderr.endswith(f"pip install 'foretick[{EXTRAS[module]}]'\n")
    assert done.stderr.count("\n") == 1


def test_another_missing_module_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lab.simulation.report", None)
    done = CliRunner().invoke(main, ["simulate", "--requests", "1"])
    assert isinstance(done.exception, ModuleNotFoundError)


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])


def test_the_runtime_lock_is_a_part_of_the_development_lock() -> None:
    runtime, development = (_pins(name) for name in ("requirements.lock", "requirements-dev.lock"))
    assert runtime < development
    assert not {"matplotlib", "scikit-learn", "threadpoolctl", "pytest"} & {name for name, _ in runtime}


def _pins(name: str) -> set[tuple[str, str]]:
    lines = (ROOT / name).read_text().splitlines()
    return {(p[0], p[2].split()[0]) for line in lines if "==" in line[:60] and (p := line.partition("=="))}
