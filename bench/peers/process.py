"""The conductor's side of one contestant: its process group, held while others run, and ended for certain."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bench.peers.protocol import Message, Reply, decode, encode

_ROOT = Path(__file__).parents[2]
_START = (
    "import sys; root, own, target = sys.argv[1:]; sys.path.insert(0 if own else len(sys.path), root); "
    "from bench.peers.contestant import main; main(target)"
)
"""Another environment finds our package behind everything of its own."""
_LINES = 12
_LIVES_S = 0.5


@dataclass(frozen=True)
class Peer:
    """Whom to run: ``target`` is its contestant, "module:class".

    ``python``: of its environment, None for ours; ``environment``: variables added to ours.
    """

    name: str
    target: str
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class PeerLost(RuntimeError):
    """A contestant has ended, does not answer, or answered something else; it takes no further part."""


class PeerProcess:
    """One contestant in a process group of its own. What it prints goes to a file in ``directory``.

    Raises PeerLost if it cannot be started.
    """

    def __init__(self, peer: Peer, directory: Path) -> None:
        self.peer = peer
        self._log = directory / f"{peer.name.replace(' ', '-').replace(',', '')}.log"
        own = "own" if peer.python is None else ""
        python = sys.executable if peer.python is None else str(peer.python.absolute())
        environment = {**os.environ, **peer.environment}
        environment.pop("PYTHONPATH", None)
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [python, "-c", _START, str(_ROOT), own, peer.target],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=directory,
                    env=environment, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise PeerLost(f"{python} cannot be started: {error.strerror}") from None
        self._received = b""

    @property
    def pid(self) -> int:
        """Of the contestant, and of its process group."""
        return self._process.pid

    def call(self, message: Message, timeout_s: float) -> Reply:
        """Send a message and wait for its reply. Raises PeerLost."""
        assert self._process.stdin is not None  # a pipe
        try:
            self._process.stdin.write(encode(message).encode())
            self._process.stdin.flush()
            reply: Reply = decode(self._line(time.monotonic() + timeout_s))
        except (BrokenPipeError, EOFError):
            raise PeerLost(f"ended with status {self._process.wait()}{self._said()}") from None
        except (TimeoutError, ValueError) as error:
            raise PeerLost(f"{error}{self._said()}") from None
        return reply

    def hold(self) -> None:
        """Stop the whole group until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the group run."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End the whole group, also what the contestant has started and left behind."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # both are pipes
            with suppress(BrokenPipeError):  # a message that was never read
                pipe.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the last process of the group has ended
            os.killpg(self.pid, number)

    def _line(self, until: float) -> str:
        """The next line of its replies. Raises TimeoutError, and EOFError when the process has ended."""
        assert self._process.stdout is not None  # a pipe
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._received:
            # whether it lives, because what it leaves behind may hold the pipe open
            if select.select([descriptor], [], [], _LIVES_S)[0]:
                some = os.read(descriptor, 1 << 16)
                if not some:
                    raise EOFError
                self._received += some
            elif self._process.poll() is not None:
                raise EOFError
            elif time.monotonic() > until:
                raise TimeoutError("no reply in time")
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _said(self) -> str:
        """The end of what it printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        return "".join(f"\n    {line}" for line in lines)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block like an exception: contestants are ended. Main thread only."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
