"""Python environments of packages that others wrote, made once; nothing of them is part of this one."""

import subprocess
import sys
from pathlib import Path

from tests.kit.programs import unavailable


def environment(home: Path, *packages: str) -> Path:
    """The folder of the programs of an environment at ``home`` with just these packages, made if need be.

    Skips the test offline, but not in CI. It has no pip of its own, which takes longer than all else.
    """
    if not (home / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        pip("--python", str(home / "bin" / "python"), "install", "--no-compile", *packages)
        (home / "done").touch()
    return home / "bin"


def pip(*arguments: str) -> None:
    """Run this environment's pip. Skips the test offline, but not in CI."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        unavailable(f"not to be had from a package registry: {done.stderr[-300:]}")
