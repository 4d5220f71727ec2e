"""What the figures were taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import msgspec

_PACKAGES = ("torch", "transformers", "numpy", "numba", "aiokafka", "pyzmq", "uvloop")


class Machine(msgspec.Struct, frozen=True):
    """Processor, cores this process may use, load at the start (others' work), versions."""

    processor: str
    cores: int
    load: float
    python: str
    packages: dict[str, str]


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        _processor(),
        len(os.sched_getaffinity(0)),
        os.getloadavg()[0],
        platform.python_version(),
        {name: version(name) for name in _PACKAGES},
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
