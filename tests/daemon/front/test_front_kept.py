"""Memory in systemd's file-descriptor store: given once, found again by name, given up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.front.kept import KeptMemory, passed_by_systemd
from daemon.front.notify import Notifier


class Manager:
    """A service manager that keeps what it is given."""

    def __init__(self, path: Path) -> None:
        self.kept: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def take(self) -> None:
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except BlockingIOError:
                return
            fields = dict(line.split("=", 1) for line in message.decode().splitlines())
            if fields.get("FDSTORE") == "1":
                assert fields["FDPOLL"] == "0"  # a file is never hung up
                (self.kept[fields["FDNAME"]],) = descriptors
            elif fields.get("FDSTOREREMOVE") == "1":
                os.close(self.kept.pop(fields["FDNAME"]))

    def close(self) -> None:
        self._socket.close()
        for number in self.kept.values():
            os.close(number)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.close()


@pytest.fixture
def notifier(manager: Manager, tmp_path: Path) -> Iterator[Notifier]:
    made = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    yield made
    made.close()


def test_what_was_written_is_there_for_the_next_process(manager: Manager, notifier: Notifier) -> None:
    first = KeptMemory(notifier)
    names = ["btc:usdt 0", "ü" * 20]
    for name in names:
        first.make(name).write_bytes(name.encode())
        assert first.make(name) == first.path(name)
    manager.take()
    assert all(":" not in name and name.isascii() and len(name) < 256 for name in manager.kept)
    first.close()
    assert first.names == []
    second = KeptMemory(notifier, {name: os.dup(number) for name, number in manager.kept.items()})
    assert sorted(second.names) == sorted(names)
    for name in names:
        path = second.path(name)
        assert path is not None
        assert path.read_bytes() == name.encode()
    second.close()


def test_another_process_reads_and_writes_it(manager: Manager, notifier: Notifier) -> None:
    memory = KeptMemory(notifier)
    path = memory.make("a")
    code = "import sys; f = open(sys.argv[1], 'r+b'); f.write(b'from there')"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert path.read_bytes() == b"from there"
    memory.close()


def test_what_is_given_up_is_gone_there_too(manager: Manager, notifier: Notifier) -> None:
    memory = KeptMemory(notifier)
    memory.make("a")
    memory.make("b")
    memory.drop("a")
    memory.drop("never")
    manager.take()
    assert list(manager.kept) == ["kv-b"]
    assert (memory.names, memory.path("a")) == (["b"], None)
    memory.close()


def test_without_a_service_manager_nothing_is_made() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="did not take"):
        KeptMemory(Notifier({})).make("a")
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_of_others_are_left_alone(notifier: Notifier) -> None:
    own = os.memfd_create("x")
    memory = KeptMemory(notifier, {"http.socket": 0, "kv-a": own})
    assert memory.names == ["a"]
    memory.close()


def test_systemd_passes_descriptors_by_name() -> None:
    code = (
        "import os, sys; from daemon.front.kept import passed_by_systemd as p; "
        "[os.dup2(int(end), 3 + n) for n, end in enumerate(sys.argv[1:])]; "
        "os.environ['LISTEN_PID'] = str(os.getpid()); found = p(os.environ); "
        "print(found, [os.get_inheritable(n) for n in found.values()])"
    )
    ends = [os.memfd_create("a"), os.memfd_create("b")]
    try:
        environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "kv-a:other"}
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, ends)],
            env=environment, pass_fds=ends, check=True, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        for end in ends:
            os.close(end)
    assert done.stdout.strip() == "{'kv-a': 3, 'other': 4} [False, False]"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "kv-a"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "two", "LISTEN_FDNAMES": "kv-a:kv-b"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "kv-a:kv-b"},
    ],
)
def test_what_is_not_for_this_process_or_not_countable_is_not_used(environment: dict[str, str]) -> None:
    assert passed_by_systemd(environment) == {}
