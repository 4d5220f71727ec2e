"""What the figures were taken on, and by which code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

_PACKAGES = ("torch", "transformers", "numpy", "numba", "aiokafka", "pyzmq", "uvloop")


class Machine(msgspec.Struct, frozen=True):
    """Processor, cores this process may use, versions of what is installed."""

    processor: str
    cores: int
    python: str
    packages: dict[str, str]


def describe() -> Machine:
    """This machine."""
    packages = {name: found for name in _PACKAGES if (found := _version(name))}
    return Machine(_processor(), len(os.sched_getaffinity(0)), platform.python_version(), packages)


def commit() -> str:
    """The checkout's commit, "-dirty" where anything but docs/ was changed; else the package's version."""
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
        return _git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return _version("foretick") or "unknown"


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
