"""`foretick run` as a fork of a process that has imported everything: it starts in a fraction of the time."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from tests.kit.daemon import Daemon

_IMPORTED = ["daemon.cli.run", "daemon.engine.service", "daemon.engine.build", "feeds.kafka_source"]
_LOOK_S = 0.02


class ForkedDaemon(Daemon):
    """As `Daemon`, for configurations whose engine is in the same process."""

    def __enter__(self) -> Self:
        arguments = ["run", "--config", str(self._config), "--set=process.spare_engine=false"]
        self._log.touch()
        self._process = _Process(arguments, self._log)  # type: ignore[assignment]  # as much of it as is used
        return self


class _Process:
    """What a `Daemon` uses of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._process = context.Process(target=_run, args=(arguments, str(log)), daemon=True)
        self._process.start()
        self._looking = threading.Lock()
        """The status is there once; two threads may look at the same time."""
        assert self._process.pid is not None, "it was started"
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._looking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("foretick run", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], log: str) -> None:
    """In the fork: become the command."""
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(to, output)
    sys.argv = ["foretick", *arguments]
    from daemon.cli.main import main

    main()
