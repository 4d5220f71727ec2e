"""Memory that outlives this process, in systemd's file-descriptor store (FileDescriptorStoreMax=).

Each piece is a file without a name (`memfd_create`), which the service manager holds and hands to the next
process of the service. Other processes of the same user open it by its path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from daemon.front.notify import Notifier

log = logging.getLogger(__name__)

_FIRST = 3
"""Number of the first descriptor that systemd passes."""
_PREFIX = "kv-"
"""Of our names in the store."""


class KeptMemory:
    """Named files in memory. ``passed``: descriptors by their names in the store, see `passed_by_systemd`."""

    def __init__(self, notifier: Notifier, passed: Mapping[str, int] | None = None) -> None:
        self._notifier = notifier
        self._files = {_own_name(name): each for name, each in (passed or {}).items() if _is_ours(name)}

    @property
    def names(self) -> list[str]:
        """Of the files there are."""
        return list(self._files)

    def path(self, name: str) -> Path | None:
        """Where the file of this name is opened, by any process of this user; None without one."""
        number = self._files.get(name)
        return None if number is None else Path(f"/proc/{os.getpid()}/fd/{number}")

    def make(self, name: str) -> Path:
        """The path of the file of this name, which is made, and given to the service manager, if it is new.

        Raises OSError when there is no memory, or the service manager does not take it.
        """
        if name not in self._files:
            number = os.memfd_create(f"foretick-{name}"[:200], os.MFD_CLOEXEC)
            if not self._notifier.store(number, _store_name(name)):
                os.close(number)
                raise OSError(f"the service manager did not take the memory of {name}")
            self._files[name] = number
        found = self.path(name)
        assert found is not None  # it was made
        return found

    def drop(self, name: str) -> None:
        """Give up the file of this name, if there is one."""
        number = self._files.pop(name, None)
        if number is not None:
            self._notifier.forget(_store_name(name))
            os.close(number)

    def close(self) -> None:
        """Close this process's descriptors; the service manager keeps its own."""
        for number in self._files.values():
            os.close(number)
        self._files.clear()


def passed_by_systemd(environment: Mapping[str, str]) -> dict[str, int]:
    """The descriptors that this process got from the service manager, by name; children do not inherit them.

    Of two of one name, which our names never are, the last counts. Those of a wrong count are left alone.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count, names = environment.get("LISTEN_FDS", ""), environment.get("LISTEN_FDNAMES", "").split(":")
    if not count.isdecimal() or int(count) != len(names):
        log.warning("systemd passed %s descriptors with %d names: they are not used", count, len(names))
        return {}
    passed = {name: _FIRST + number for number, name in enumerate(names)}
    for number in passed.values():
        os.set_inheritable(number, False)
    return passed


def _store_name(name: str) -> str:
    # systemd takes 255 characters, and no colons
    return _PREFIX + quote(name, safe="")


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIX)


def _own_name(name: str) -> str:
    return unquote(name.removeprefix(_PREFIX))
