"""Programs that a machine may lack are asked for in one place, and no test can start one without asking."""

import ast
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit import programs

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SHOWS_NOTHING = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.fixture
def path_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that leaves only these programs on the path, and returns their folder."""

    def made(*names: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return folder

    return made


@pytest.mark.parametrize("program", sorted(programs.PACKAGES))
def test_a_missing_program_skips_with_what_to_install(
    program: str, path_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of()
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{program} is missing: apt-get install "):
        programs.need(program)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"{program} is missing: apt-get install "):
        programs.need(program)


@pytest.mark.parametrize(
    ("installed", "program"),
    [("mvn", "mvn"), ("google-chrome", "chromium"), ("chromium-browser", "chromium")],
)
def test_an_installed_program_is_returned_and_may_start(
    installed: str, program: str, path_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = path_of(installed)
    monkeypatch.setattr(programs, "_own", tuple)  # the folder is a temporary one, which may start anyway
    with pytest.raises(pytest.fail.Exception, match="without"):
        subprocess.run([folder / installed], check=True)
    assert programs.need(program) == str(folder / installed)
    subprocess.run([folder / installed], check=True)


@pytest.mark.parametrize("program", [*programs.PACKAGES, "sleep", "/usr/bin/env"])
def test_no_program_starts_that_no_test_asked_for(program: str) -> None:
    starts: list[Callable[[], object]] = [
        lambda: subprocess.run([program], check=False, **SHOWS_NOTHING),
        lambda: subprocess.Popen(program, shell=False, **SHOWS_NOTHING),
        lambda: asyncio.run(asyncio.create_subprocess_exec(program, **SHOWS_NOTHING)),
        lambda: os.posix_spawn(program, [program], {}),
        lambda: os.system(program),
        lambda: os.execv(program, [program]),
        lambda: subprocess.run(program, shell=True, check=False, **SHOWS_NOTHING),
    ]
    for start in starts:
        with pytest.raises(pytest.fail.Exception, match=r"without tests\.kit\.programs\.need"):
            start()


def test_this_python_and_its_environment_may_start() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)
    subprocess.run(
        [str(Path(sys.executable).with_name("foretick")), "--version"], check=True, **SHOWS_NOTHING
    )


def decides(path: Path) -> bool:
    """Whether a module of tests uses `shutil.which`, or reads the variable CI."""
    for node in ast.walk(ast.parse(path.read_text())):
        imported = node.names if isinstance(node, ast.ImportFrom) and node.module == "shutil" else []
        if any(each.name in ("which", "*") for each in imported):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "shutil.which":
            return True
        if isinstance(node, ast.Constant) and node.value == "CI":
            return True
    return False


def test_only_one_module_decides_what_a_missing_program_means() -> None:
    deciding = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py") if decides(path)}
    assert deciding == {"kit/programs.py", "test_programs.py"}


def test_ci_and_the_readme_know_every_program() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for program, package in programs.PACKAGES.items():
        assert f"[{program}]={package}\n" in script
    readme = (ROOT / "README.md").read_text()
    shown = {"java": "Java 17", "mvn": "Maven", "node": "Node.js"}
    for name in (shown.get(program, program) for program in programs.PACKAGES):
        assert name.lower() in readme.lower()
