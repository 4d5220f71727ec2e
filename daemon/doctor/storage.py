"""Room on the disks that the daemon writes to."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis, of_outcome
from support.directories import cache_home

MIN_FREE = 1 << 30


@dataclass(frozen=True)
class Directory:
    """``free``: bytes of its disk; ``limit``: bytes that its files may grow by, 0 where there is none."""

    check: str
    path: str
    writable: bool
    free: int
    limit: int = 0


def read_directories(config: Config) -> tuple[Directory, ...]:
    """Those of snapshots, idle sessions and the cache, where each is used."""
    found = [("cache", cache_home(), 0)]
    if config.pool.idle_spill:
        found.append(("pool.spill_dir", Path(config.pool.spill_dir or cache_home()), 0))
    if config.recovery.interval:
        path = config.recovery.path
        used = sum(each.stat().st_size for each in path.glob("*") if each.is_file())
        found.append(("recovery.directory", path, max(0, config.recovery.max_bytes - used)))
    return tuple(_read(*each) for each in found)


def judge_directory(directory: Directory) -> Diagnosis:
    """Whether this user may write there, and whether there is room."""
    check, seen = directory.check, f"{directory.path}: {directory.free / 2**30:,.1f} GiB free"
    if not directory.writable:
        step = "let the daemon's user write there, or run this as that user"
        return Diagnosis(check, "warning", f"{directory.path}: this user cannot write there", step)
    if directory.free < MIN_FREE:
        return Diagnosis(check, "problem", seen, "make room on that disk, or use another one")
    limit = (
        f", and recovery.max_bytes lets {directory.limit / 2**30:,.1f} GiB come" if directory.limit else ""
    )
    step = "lower recovery.max_bytes: nothing else on that disk has room then"
    return of_outcome(
        check, directory.limit <= directory.free, f"{seen}{limit}", step, "operations.md#recovery"
    )


def _read(check: str, path: Path, limit: int) -> Directory:
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    return Directory(check, str(path), os.access(there, os.W_OK | os.X_OK), free, limit)
