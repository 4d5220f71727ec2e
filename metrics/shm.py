"""POSIX shared memory that does not outlive its users, even after a crash.

`multiprocessing.shared_memory` in Python 3.11 also registers a block with the resource tracker on *attach*,
and unlinks it when that process ends; and it cannot be closed while numpy views exist. A block here is a file
below /dev/shm that is mapped once: views keep the mapping alive, and dropping the last one unmaps it. Every
user holds a shared `flock` for its lifetime. A block without a lock was left behind by a crash; the next
`create` unlinks it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path

ROOT = Path("/dev/shm")
PREFIX = "foretick-"


class SharedBlock:
    """`size` zeroed bytes named `name`, mapped at `buffer`. Use `create` or `attach`."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self.buffer = memoryview(mmap.mmap(descriptor, self.size))

    @classmethod
    def create(cls, size: int, *, sweeps: bool = True) -> SharedBlock:
        """A new block of `size` bytes (above 0). Raises OSError where shared memory is full or absent.

        ``sweeps``: it looks for blocks that crashes have left, which takes as long as there are blocks.
        """
        if sweeps:
            sweep()
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        hidden = ROOT / f".{name}"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # posix_fallocate, not ftruncate: a full /dev/shm must fail here, not as SIGBUS at the first
            # store.
            os.posix_fallocate(descriptor, 0, size)
            # Renamed only now, so that no sweep sees the block before it is locked.
            hidden.rename(ROOT / name)
            return cls(name, descriptor)
        except BaseException:
            os.close(descriptor)
            hidden.unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, name: str) -> SharedBlock:
        """Attach a block that another process created. Raises FileNotFoundError when there is none."""
        descriptor = os.open(ROOT / name, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return cls(name, descriptor)

    def close(self) -> None:
        """Drop this process's lock; the memory stays mapped until its last view is gone. Idempotent."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: the mapping has a duplicate
            os.close(self._descriptor)
            self._descriptor = -1

    def unlink(self) -> None:
        """Remove the name; processes that have the block mapped keep it. Idempotent."""
        (ROOT / self.name).unlink(missing_ok=True)


def sweep() -> int:
    """Unlink the blocks that no live process has locked; returns how many."""
    swept = 0
    for path in ROOT.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or already gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept += 1
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return swept
