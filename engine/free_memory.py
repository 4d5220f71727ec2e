"""How much memory this process can still have, on the host and on a device."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V1 = "memory"
"""The controller's name in the first version of control groups, and its directory."""


def available_bytes(device: torch.device, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that can still be allocated on ``device``.

    On a CPU it is the least of what the kernel calls available (where it does not say so: of the machine's
    memory) and of what the limits of this process's control groups leave, in which files that are only cached
    count as free.
    """
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min([_of_machine(proc), *_of_groups(proc, cgroups)])


def _of_machine(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What the limit of each control group that this process is in leaves, from its own one up."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and _V1 not in controllers.split(","):
            continue
        root = cgroups / _V1 if controllers else cgroups
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else (
            "memory.max", "memory.current",
        )  # fmt: skip
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            most, now = (_number(root / group / name) for name in (limit, used))
            if most is not None and now is not None:
                yield max(0, most - now + _cached(root / group))


def _cached(group: Path) -> int:
    """Bytes of files that the kernel drops when memory is wanted."""
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and without the file."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
