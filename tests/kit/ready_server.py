"""A server of Prometheus' family: it listens on a free port, and says at `/-/ready` when it serves."""

from __future__ import annotations

import subprocess
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from tests.kit.kafka import free_ports

_START_S, _STOP_S = 30.0, 10.0
_ATTEMPTS = 3


class ReadyServer(ABC):
    """Runs ``program`` on loopback, over a folder of its own, within its block.

    ``target``: where it listens, host:port.
    """

    target = ""

    def __init__(self, program: str) -> None:
        self._program = program
        self._temporary = tempfile.TemporaryDirectory(prefix="foretick-server-")
        self._folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.target}"

    @abstractmethod
    def arguments(self) -> list[str]:
        """What it is started with, to listen at ``target``; its files are written when this returns."""

    def __enter__(self) -> Self:
        try:
            for _ in range(_ATTEMPTS):
                # the port may be taken between asking for it and binding it: then try another
                if self._launched(*free_ports(1)):
                    return self
            log = (self._folder / "log").read_text()[-2000:]
            raise RuntimeError(f"{Path(self._program).name} did not start:\n{log}")
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process this object started, and remove its folder."""
        self._end()
        self._temporary.cleanup()

    def _launched(self, port: int) -> bool:
        self._end()
        self.target = f"127.0.0.1:{port}"
        with (self._folder / "log").open("wb") as log:
            command = [self._program, *self.arguments()]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                    return True
            except OSError:
                time.sleep(0.05)
        return False

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
