"""Reports the daemon's state to systemd (sd_notify): READY, STATUS, RELOADING, STOPPING and WATCHDOG."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping


class Notifier:
    """Sends the service manager's datagrams; does nothing without NOTIFY_SOCKET in the environment."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; `None` is this process's environment."""
        env = os.environ if environment is None else environment
        name = env.get("NOTIFY_SOCKET", "")
        # "@name" is a socket in the abstract namespace, whose address begins with a zero byte.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._socket: socket.socket | None = None
        if name:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self.watchdog_s = _watchdog_seconds(env) if name else None
        self._serves = self._stops = False

    def ready(self, status: str = "") -> bool:
        """Start-up is finished: model loaded and feeds up."""
        self._serves = True
        return self._send("READY=1", status)

    def starting(self, doing: str) -> bool:
        """One line for `systemctl status`; nothing is sent from READY on, whatever an engine then loads."""
        return not (self._serves or self._stops) and self._send("", f"starting: {doing}")

    @contextlib.contextmanager
    def reloading(self, status: Callable[[], str]) -> Iterator[None]:
        """Within it the daemon reads its configuration again; READY and ``status`` end it.

        Nothing is sent before READY, which it would anticipate, and after STOPPING.
        """
        if self._serves:  # the time is for `Type=notify-reload`
            self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", "")
        try:
            yield
        finally:
            if self._serves:
                self.ready(status())

    def stopping(self, status: str = "") -> bool:
        """Shutdown has begun."""
        self._serves, self._stops = False, True
        return self._send("STOPPING=1", status)

    def alive(self) -> bool:
        """Send the watchdog's keep-alive; see `keep_watchdog`."""
        return self._send("WATCHDOG=1", "")

    async def keep_watchdog(self, progress: Callable[[], bool]) -> None:
        """Until cancelled: send a keep-alive at half the watchdog's interval whenever `progress()` is true.

        `progress()` says whether the worker completed a step since the last call, or is idle. Thus the
        service manager restarts the daemon when a worker hangs, even if the event loop still runs. Returns at
        once when no watchdog is set.
        """
        if self.watchdog_s is None:
            return
        while True:
            if progress():
                self.alive()
            await asyncio.sleep(self.watchdog_s / 2)

    def close(self) -> None:
        """Close the socket; later calls do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, status: str) -> bool:
        """Send; returns whether it went out. A missing service manager never stops the daemon."""
        if self._socket is None:
            return False
        # a newline would start another assignment
        lines = [state, "STATUS=" + " ".join(status.splitlines()) if status else ""]
        try:
            self._socket.sendto("\n".join(filter(None, lines)).encode(), self._address)
        except OSError:
            return False
        return True


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """The watchdog interval for this process in seconds; None when there is none."""
    interval = environment.get("WATCHDOG_USEC", "")
    pid = environment.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or int(interval) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(interval) / 1e6
