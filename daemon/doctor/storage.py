"""Room on the disks that the daemon writes to."""

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis, of_outcome, skipped
from support.directories import cache_home, existing

MIN_FREE = 1 << 30
MIN_SHARE = 0.1
"""Of a disk, as the alert has it: a small one may be free enough."""


@dataclass(frozen=True)
class Directory:
    """``free``: bytes of its disk, and ``share`` of all of them; ``limit``: bytes that its files may grow by,
    0 where there is none.

    ``unseen``: why it cannot be seen, empty where it can.
    """

    check: str
    path: str
    writable: bool
    free: int
    limit: int = 0
    unseen: str = ""
    share: float = 0.0


def read_directories(config: Config) -> tuple[Directory, ...]:
    """Those of snapshots, idle sessions and the cache, where each is used."""
    found = [_read("cache", cache_home())]
    if config.pool.idle_spill or config.pool.spill_dir:
        found.append(_read("pool.spill_dir", Path(config.pool.spill_dir or cache_home())))
    if config.recovery.interval:
        found.append(_read("recovery.directory", config.recovery.path, config.recovery.max_bytes))
    return tuple(found)


def judge_directory(directory: Directory) -> Diagnosis:
    """Whether this user may write there, and whether there is room."""
    check, free = directory.check, f"{directory.free / 2**30:,.2f} GiB"
    seen = f"{directory.path}: {free} free" + f", {directory.share:.0%} of its disk" * bool(directory.share)
    if directory.unseen:
        step = "run this as the daemon's user"
        return skipped(check, f"{directory.path} cannot be seen: {directory.unseen}", step)
    if not directory.writable:
        step = "let the daemon's user write there, or run this as that user"
        return Diagnosis(check, "warning", f"{directory.path}: this user cannot write there", step)
    if directory.free < MIN_FREE and directory.share < MIN_SHARE:
        return Diagnosis(check, "problem", seen, "make room on that disk, or use another one")
    limit = (
        f", and recovery.max_bytes lets {directory.limit / 2**30:,.1f} GiB come" if directory.limit else ""
    )
    step = "lower recovery.max_bytes: nothing else on that disk has room then"
    return of_outcome(
        check, directory.limit <= directory.free, f"{seen}{limit}", step, "operations.md#recovery"
    )


def _read(check: str, path: Path, max_bytes: int = 0) -> Directory:
    """``max_bytes``: of all its files, 0 where there is no limit."""
    try:
        there = existing(path)
        limit = max(0, max_bytes - sum(map(_size, path.glob("*")))) if max_bytes else 0
        total, _, free = shutil.disk_usage(there)
    except OSError as error:
        return Directory(check, str(path), False, 0, unseen=error.strerror or str(error))
    writable = os.access(there, os.W_OK | os.X_OK)
    return Directory(check, str(path), writable, free, limit, share=free / total if total else 0.0)


def _size(path: Path) -> int:
    """Bytes of a file; 0 of anything else, and of one that is removed meanwhile."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
