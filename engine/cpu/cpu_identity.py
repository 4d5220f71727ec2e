"""Which CPU this is: its name, and all that times measured on it depend on."""

import platform
from functools import cache
from pathlib import Path

from llvmlite import binding

_CPUINFO = Path("/proc/cpuinfo")


@cache
def cpu_name() -> str:
    """Return the CPU's model name as its maker gives it, or else its architecture."""
    return model_name(_CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else "")


def model_name(cpuinfo: str) -> str:
    """Return the first model name in the text of /proc/cpuinfo; where it has none, the architecture."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


@cache
def cpu_features() -> str:
    """Return LLVM's name for the CPU and the features that it has, sorted."""
    features = binding.get_host_cpu_features()
    return " ".join([binding.get_host_cpu_name(), *sorted(name for name, on in features.items() if on)])
