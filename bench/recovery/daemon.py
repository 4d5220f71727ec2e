"""A daemon in processes of its own, and the engines of one."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.run import MeasurementFailed
from feeds.synthetic import Instrument

_START = "from daemon.cli.main import main; main()"
_LOOK_S = 0.2


@dataclass
class Daemon:
    """`foretick run`."""

    folder: Path
    config: str
    endpoint: str = ""
    """Of its query socket."""
    _process: subprocess.Popen[bytes] | None = None
    _port: int = 0

    def start(self) -> None:
        """Start it on free ports."""
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "foretick.toml"
        self._port, query = free_port(), free_port()
        self.endpoint = f"tcp://127.0.0.1:{query}"
        file.write_text(
            f'{self.config}\n[http]\nport = {self._port}\n[query]\nendpoint = "{self.endpoint}"\n'
        )
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, "run", "--config", str(file)], stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        """What it logged."""
        return (self.folder / "log").read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None, "it was started"
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """Process id of its gateway."""
        assert self._process is not None, "it was started"
        return self._process.pid

    def kill(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def gone(self) -> None:
        """Wait for its end."""
        assert self._process is not None, "it was started"
        await asyncio.to_thread(self._process.wait)

    async def until(self, *states: str) -> None:
        """Wait until /readyz says one of these. Raises MeasurementFailed if it ends before."""
        while await asyncio.to_thread(self._state) not in states:
            if self._process is not None and self._process.poll() is not None:
                raise MeasurementFailed(f"a daemon ended\n{self.log[-3000:]}")
            await asyncio.sleep(_LOOK_S)

    def _state(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5) as reply:
                return str(json.load(reply)["status"])
        except urllib.error.HTTPError as error:
            with error:
                return str(json.load(error)["status"])
        except OSError:
            return ""


def session_tables(markets: Iterable[Instrument], bars: int) -> list[str]:
    """A session of each market, with a window of ``bars``, as configuration."""
    return [
        f'[[sessions]]\nname = "{each.symbol.lower()}"\nsymbol = "{each.key}"\nretention_records = {bars}'
        for each in markets
    ]


def engine_of(gateway: int) -> int:
    """Process id of the oldest engine of a gateway; the other one is its spare."""
    tasks = Path(f"/proc/{gateway}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return min(
        child for child in children if "daemon.engine.process" in Path(f"/proc/{child}/cmdline").read_text()
    )


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
