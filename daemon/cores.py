"""Which CPUs the gateway and the engine process run on (`process.reserve_core`)."""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from daemon.config.schema import Config
from feeds.connector import SettingError

_THREADS = Path("/proc/self/task")
_KEY = "process.reserve_core"


@dataclass(frozen=True)
class Cores:
    """CPU numbers of each process; they share none."""

    gateway: frozenset[int]
    engine: frozenset[int]

    def __str__(self) -> str:
        return f"gateway on CPU {_listed(self.gateway)}, engine on CPU {_listed(self.engine)}"


def usable() -> frozenset[int]:
    """The CPUs that this process may use; empty on a system that does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def cores_of(config: Config, cpus: Collection[int]) -> Cores | None:
    """The first of ``cpus`` for the gateway, the others for the engine; None where they share all.

    They do without `process.reserve_core`, and with the engine in the gateway's process. Raises SettingError
    when there are too few.
    """
    if not config.process.reserve_core or config.process.mode != "two":
        return None
    if not cpus:
        raise SettingError(_KEY, "this system cannot bind a process to CPUs: set it to false")
    first, *others = sorted(cpus)
    if not others:
        raise SettingError(
            _KEY,
            f"gateway and engine need a CPU each, but there is CPU {first} only: set it to false",
        )
    if config.model.threads > len(others):
        raise SettingError(
            "model.threads",
            f"{config.model.threads} threads are more than the {len(others)} CPUs that {_KEY} leaves to the "
            f"engine: lower it, or set 0",
        )
    return Cores(frozenset({first}), frozenset(others))


def pin(cpus: Collection[int]) -> None:
    """Run all threads of this process on ``cpus`` only; threads and processes made later inherit it.

    Raises OSError if the process may use none of them.
    """
    pinned: set[int] = set()
    while new := {int(thread.name) for thread in _THREADS.iterdir()} - pinned:
        for thread in new:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cpus)
        pinned |= new


def _listed(cpus: Collection[int]) -> str:
    """As the kernel writes it: 1-3,5."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
