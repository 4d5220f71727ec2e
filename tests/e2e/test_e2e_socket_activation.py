"""Sockets of the service manager: while the daemon restarts, clients wait, and none is refused."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pytest

from daemon.api.client import QueryClient
from support.inherited_sockets import inherited_socket
from tests.kit.daemon import FORETICK

CONFIG = """
[[sessions]]
name = "aaa"
symbol = "V:AAA"
[process]
spare_engine = false
"""
# What systemd does between fork and exec: descriptors from 3 on, their names, and whose they are.
START = """
import os, sys
for at, descriptor in enumerate(map(int, sys.argv[1].split(","))):
    os.dup2(descriptor, 3 + at)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:query"}
os.execv(sys.argv[2], sys.argv[2:])
"""


OURS = {"LISTEN_PID": str(os.getpid())}


@pytest.mark.parametrize(
    "environment",
    [
        {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"},
        OURS | {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "query"},
        OURS | {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "query:http"},
        OURS | {"LISTEN_FDS": "", "LISTEN_FDNAMES": "http"},
        {},
    ],
)
def test_sockets_of_other_processes_and_names_are_not_taken(environment: dict[str, str]) -> None:
    assert inherited_socket("http", keyed=False, environment=environment) is None


def passed(made: socket.socket, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a process that gets this socket as the first one."""
    monkeypatch.setattr("support.inherited_sockets._FIRST", made.detach())
    return OURS | {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}


def test_a_socket_of_loopback_is_served_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.create_server(("127.0.0.1", 0))
    port = made.getsockname()[1]
    found = inherited_socket("http", keyed=False, environment=passed(made, monkeypatch))
    assert found is not None
    with found:
        assert (found.getsockname()[1], found.get_inheritable(), found.getblocking()) == (port, False, False)


def test_one_that_others_reach_needs_keys_and_tcp_and_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    public = passed(socket.create_server(("0.0.0.0", 0)), monkeypatch)
    with pytest.raises(OSError, match="need keys"):
        inherited_socket("http", keyed=False, environment=public)
    public = passed(socket.create_server(("0.0.0.0", 0)), monkeypatch)
    with inherited_socket("http", keyed=True, environment=public) or pytest.fail("it was passed"):
        pass
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "socket"))
    with pytest.raises(OSError, match="not of TCP"):
        inherited_socket("http", keyed=True, environment=passed(local, monkeypatch))
    twice = OURS | {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:http"}
    with pytest.raises(OSError, match="2 sockets named http"):
        inherited_socket("http", keyed=True, environment=twice)


class Manager:
    """Two listening sockets that outlive the daemons that it starts."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "foretick.toml"
        self._config.write_text(CONFIG)
        self._log = folder / "log"
        self._sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(2)]
        self.http_port, self.query_port = (each.getsockname()[1] for each in self._sockets)

    def start(self) -> subprocess.Popen[bytes]:
        passed = [each.fileno() for each in self._sockets]
        command = [sys.executable, "-c", START, ",".join(map(str, passed)), FORETICK, "run"]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--config", self._config], pass_fds=passed, stdout=log, stderr=subprocess.STDOUT
            )

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


class Visitor:
    """Asks for /healthz ten times a second, each time by a connection of its own, and keeps what came."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/healthz"
        self.seen: list[int | str] = []
        self._leaves = False
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        while not self._leaves:
            try:
                with urlopen(self._url, timeout=90) as reply:
                    self.seen.append(reply.status)
            except OSError as error:
                self.seen.append(str(error))
            time.sleep(0.1)

    @contextlib.contextmanager
    def visiting(self) -> Iterator["Visitor"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._leaves = True
            self._thread.join()


def test_a_restart_refuses_no_request(manager: Manager) -> None:
    def sessions() -> list[str]:
        with QueryClient(f"tcp://127.0.0.1:{manager.query_port}", timeout_s=90) as client:
            return [each.name for each in client.sessions().sessions]

    with contextlib.ExitStack() as stack:
        first = manager.start()
        stack.callback(first.kill)
        with Visitor(manager.http_port).visiting() as visitor:
            assert sessions() == ["aaa"]
            before = len(visitor.seen)
            first.send_signal(signal.SIGTERM)
            assert first.wait(60) == 0
            second = manager.start()
            stack.callback(second.kill)
            assert sessions() == ["aaa"]
            while len(visitor.seen) <= before + 3:
                time.sleep(0.05)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
    assert set(visitor.seen) == {200}
