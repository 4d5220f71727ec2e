"""Directories of a daemon's ZeroMQ sockets that do not outlive it, even after a crash.

Each is locked for as long as it is used. One without a lock was left behind by a crash; the next daemon of
the same user removes it.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "foretick-ipc-"


class SocketDirectory:
    """A new directory at ``path`` that only this user can enter, among the temporary ones. Raises OSError."""

    def __init__(self) -> None:
        sweep()
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        self._descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        # renamed only now, so that no sweep sees it before it is locked
        self.path = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))

    def close(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sweep() -> int:
    """Remove this user's directories that no live process has locked; returns how many."""
    swept = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or already gone
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                swept += 1
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return swept
