"""Sockets that the service manager has bound and passes on: socket activation (`sd_listen_fds(3)`)."""

import os
from collections.abc import Mapping

_FIRST = 3
"""The file descriptor of the first one."""


def inherited_socket(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """The file descriptor of the listening socket with this name; None where none was passed to this process.

    Programs that this process starts do not get it.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    if name not in names or names.index(name) >= int(environment.get("LISTEN_FDS", "0")):
        return None
    descriptor = _FIRST + names.index(name)
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    return descriptor
