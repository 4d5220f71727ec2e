"""A directory for the files of one process, below one that several may share."""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX = "engine-"


class OwnDirectory:
    """Files of this process alone: daemons that share ``base`` have sessions of equal names.

    It is locked as long as this object lives. Those of processes that have ended are removed. Raises OSError.
    """

    def __init__(self, base: Path) -> None:
        parent = os.open(base, os.O_RDONLY)
        try:
            _lock(parent)  # no one removes the new one before it is locked
            for other in base.glob(f"{_PREFIX}*"):
                _remove_ended(other)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            held = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, held)
            _lock(held)
        finally:
            os.close(parent)


def _remove_ended(directory: Path) -> None:
    try:
        found = os.open(directory, os.O_RDONLY)
    except OSError:
        return  # removed meanwhile, or another user's
    try:
        if _lock(found, waits=False):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(found)


def _lock(directory: int, *, waits: bool = True) -> bool:
    """Whether it is locked now; never on a file system without locks."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
