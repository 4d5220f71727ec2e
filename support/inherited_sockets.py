"""Sockets that the service manager has bound and passes on: socket activation (`sd_listen_fds(3)`)."""

import ipaddress
import os
import socket
from collections.abc import Mapping

_FIRST = 3
"""The file descriptor of the first one."""


def inherited_socket(
    name: str, *, keyed: bool, environment: Mapping[str, str] = os.environ
) -> socket.socket | None:
    """The listening TCP socket with this name; None where none was passed to this process.

    Programs that this process starts do not get it. ``keyed``: clients need keys, so it may be reached by
    other machines. Raises OSError for one that is of another kind, passed twice, or reached without keys.
    """
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return None
    names = environment.get("LISTEN_FDNAMES", "").split(":")[: int(count)]
    if name not in names:
        return None
    if names.count(name) > 1:
        raise OSError(f"the service manager passes {names.count(name)} sockets named {name}: one is served")
    passed = socket.socket(fileno=_FIRST + names.index(name))
    if why := _refusal(passed, keyed):
        passed.close()
        raise OSError(f"the socket named {name} that the service manager passes {why}")
    passed.set_inheritable(False)
    passed.setblocking(False)
    return passed


def _refusal(passed: socket.socket, keyed: bool) -> str:
    """Why it is not served; empty if it is."""
    if passed.family not in (socket.AF_INET, socket.AF_INET6) or passed.type != socket.SOCK_STREAM:
        return "is not of TCP"
    address = passed.getsockname()[0]
    if keyed or ipaddress.ip_address(address).is_loopback:
        return ""
    return (
        f"is bound to {address}, which is not a loopback address, and clients of other machines need keys: "
        "name a tenants file (tenants.file)"
    )
