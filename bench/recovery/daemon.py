"""A daemon in processes of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from bench.run import MeasurementFailed

_START = "from daemon.cli.main import main; main()"
_LOOK_S = 0.2


class Daemon:
    """`foretick run` with the configuration ``config``, which lacks its ports; files are in ``folder``."""

    def __init__(self, folder: Path, config: str) -> None:
        self._log, file = folder / "log", folder / "foretick.toml"
        self._port, query = _free_port(), _free_port()
        self.endpoint = f"tcp://127.0.0.1:{query}"
        """Of its query socket."""
        ports = f'[http]\nport = {self._port}\n[query]\nendpoint = "{self.endpoint}"\n'
        file.write_text(f"{config}\n{ports}")
        self._command = [sys.executable, "-c", _START, "run", "--config", str(file)]
        self._process = self._started()

    @property
    def log(self) -> str:
        """The end of what it logged."""
        return self._log.read_text(errors="replace")[-3000:]

    @property
    def engine(self) -> int:
        """Process id of its oldest engine; the other one is its spare."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        children = [
            Path("/proc", child) for task in tasks for child in (task / "children").read_text().split()
        ]
        engines = [child for child in children if "daemon.engine.process" in (child / "cmdline").read_text()]
        return int(min(engines, key=_started_at).name)

    def send(self, number: int) -> None:
        """Send its gateway a signal."""
        self._process.send_signal(number)

    async def start_again(self) -> None:
        """Once it has ended."""
        await asyncio.to_thread(self._process.wait)
        self._process = self._started()

    async def ready(self) -> None:
        """Wait until /readyz says so. Raises MeasurementFailed if it ends before."""
        while await asyncio.to_thread(self._state) != "ready":
            if self._process.poll() is not None:
                raise MeasurementFailed(f"a daemon ended\n{self.log}")
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """Kill it, if it runs."""
        self._process.kill()
        self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def _state(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5) as reply:
                return str(json.load(reply)["status"])
        except urllib.error.HTTPError as error:
            with error:
                return str(json.load(error)["status"])
        except OSError:
            return ""


def _started_at(process: Path) -> int:
    """Clock ticks since boot (proc(5))."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[19])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
