"""Files that are replaced whole: they have the old or the new content, whatever ends writer or machine.

The new content goes to a temporary file beside the old one, is flushed to disk, and takes its name. The
temporary file is locked while it is written, so what a killed writer has left can be told from a file that
another process, or another machine on a shared disk, is writing.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = ".tmp"
_LONGEST_S = 3600.0
"""On a file system without locks, a file to which nothing was written for so long is abandoned."""


def create(path: Path) -> BinaryIO:
    """Create a file that only its owner can read. Raises FileExistsError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


@contextmanager
def replacing(path: Path, *, opened: Callable[[Path], BinaryIO] = create) -> Iterator[BinaryIO]:
    """The file to write; it replaces ``path`` when the block ends, or is removed when that raises.

    ``opened``: creates the temporary file. Raises OSError.
    """
    temporary, file, lock = _begin(path, opened)
    try:
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    finally:
        os.close(lock)
    _sync_directory(path.parent)


def temporaries(directory: Path, names: str) -> list[Path]:
    """The temporary files of those with these ``names``, a pattern."""
    return list(directory.glob(f".{names}.*{_TEMPORARY}"))


def remove_abandoned(directory: Path, names: str) -> None:
    """Remove the `temporaries` that no process writes any more."""
    for path in temporaries(directory, names):
        with suppress(OSError), path.open("rb+") as file:  # gone meanwhile, or another user's
            if _is_abandoned(file):
                path.unlink(missing_ok=True)


def _begin(path: Path, opened: Callable[[Path], BinaryIO]) -> tuple[Path, BinaryIO, int]:
    """A temporary file of a name that no process on any machine has, and a descriptor that holds its lock."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
        file = opened(temporary)
        lock = os.dup(file.fileno())  # it is held until the file has its name, after it was closed
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return temporary, file, lock
        file.close()  # somebody took it for abandoned before it was locked
        os.close(lock)


def _is_abandoned(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(file.fileno()).st_mtime > _LONGEST_S
    return True


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
