"""How much memory this process can still have, on the host and on a device."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V1 = "memory"
"""The controller's name in the first version of control groups, and its directory."""
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
"""Limits of a process's memory (`setrlimit(2)`), and what `/proc/self/status` calls what they limit."""

SoftLimit = Callable[[int], int]


def available_bytes(device: torch.device, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that can still be allocated on ``device``; on a CPU, `host_bytes`."""
    if device.type == "cuda":
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return host_bytes(proc, cgroups)


def host_bytes(
    proc: Path = _PROC, cgroups: Path = _CGROUPS, limit: SoftLimit = lambda kind: resource.getrlimit(kind)[0]
) -> int:
    """Return the bytes that this process can still allocate in the machine's memory.

    It is the least of what the kernel calls available (where it does not say so: of the machine's memory), of
    what the limits of this process's control groups leave, in which files that are only cached count as free,
    and of what its own limits of address space and data leave (`ulimit -v`, `ulimit -d`).
    """
    return min([_of_machine(proc), *_of_groups(proc, cgroups), *_of_process(proc, limit)])


def own_bytes(proc: Path = _PROC) -> int:
    """Return the bytes of memory that this process has for itself: without files, which others may map."""
    return _status(proc).get("RssAnon", 0)


def _of_process(proc: Path, limit: SoftLimit) -> Iterator[int]:
    """What each limit of this process leaves."""
    used = _status(proc)
    for kind, name in _LIMITS:
        if (most := limit(kind)) != resource.RLIM_INFINITY:
            yield max(0, most - used.get(name, 0))


def _status(proc: Path) -> dict[str, int]:
    """What `/proc/self/status` has in kB, in bytes."""
    found = {}
    for line in _lines(proc / "self" / "status"):
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


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
