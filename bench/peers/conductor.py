"""Starts the contestants in process groups of their own, and lets one run at a time; the others are held."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bench.peers.protocol import Message, Opened, Opening, Reply

_WAIT_S = 1800.0
"""Longest wait for one reply."""
_ROOT = Path(__file__).parents[2]
_START = (
    "import sys; root, own, target, pipe = sys.argv[1:]; sys.path.insert(0 if own else len(sys.path), root); "
    "from bench.peers.contestant import main; main(target, int(pipe))"
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
    """A contestant has ended, or does not answer; it takes no further part."""


class _PeerProcess:
    """One contestant. What it prints goes to a file in ``directory``. Raises PeerLost if it cannot start."""

    def __init__(self, peer: Peer, directory: Path) -> None:
        self._log = directory / f"{peer.name.replace(' ', '-').replace(',', '')}.log"
        own, python = ("own", sys.executable) if peer.python is None else ("", str(peer.python.absolute()))
        environment = {**os.environ, **peer.environment}
        environment.pop("PYTHONPATH", None)
        self._pipe, theirs = multiprocessing.Pipe()
        try:
            with self._log.open("wb") as log, theirs:
                command = [python, "-c", _START, str(_ROOT), own, peer.target, str(theirs.fileno())]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=environment,
                    pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise PeerLost(f"{python} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """Of the contestant, and of its process group."""
        return self._process.pid

    def call(self, message: Message, timeout_s: float) -> Reply:
        """Send a message and wait for its reply. Raises PeerLost."""
        deadline = time.monotonic() + timeout_s
        try:
            self._pipe.send(message)
            # whether it lives, because what it leaves behind may hold the pipe open
            while not self._pipe.poll(_LIVES_S):
                if self._process.poll() is not None:
                    raise EOFError
                if time.monotonic() > deadline:
                    raise PeerLost(f"no reply in time{self._said()}")
            reply: Reply = self._pipe.recv()
        except (EOFError, OSError):
            raise PeerLost(f"ended with status {self._process.wait()}{self._said()}") from None
        return reply

    def signal(self, number: int) -> None:
        """To the whole group, also what the contestant has started and left behind."""
        with suppress(ProcessLookupError):  # the last process of the group has ended
            os.killpg(self.pid, number)

    def end(self) -> None:
        """End the whole group."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _said(self) -> str:
        """The end of what it printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        return "".join(f"\n    {line}" for line in lines)


class Conductor:
    """Use it in the ``with`` block of `conducting`, which ends every contestant.

    ``running``: who takes part; ``about``: engine and versions of those that started; ``lost``: why others
    take no part (any more). The order of each turn is drawn with ``seed``.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None], wait_s: float = _WAIT_S
    ) -> None:
        self._directory, self._say, self.wait_s = directory, say, wait_s
        self._random = random.Random(seed)
        self.running: dict[str, _PeerProcess] = {}
        self.about: dict[str, str] = {}
        self.lost: dict[str, str] = {}

    def start(self, peers: Sequence[Peer], opening: Opening) -> None:
        """Start the contestants one after the other; each is held when it is ready."""
        for peer in peers:
            self._say(f"{peer.name} ...")
            try:
                process = self.running[peer.name] = _PeerProcess(peer, self._directory)
                opened = process.call(opening, self.wait_s)
                process.signal(signal.SIGSTOP)
            except PeerLost as error:
                self._lose(peer.name, str(error))
                continue
            assert isinstance(opened, Opened)  # the reply to an opening
            if opened.absent:
                self._lose(peer.name, f"absent: {opened.absent}")
            else:
                self.about[peer.name] = opened.about

    def turn(self, *messages: Message) -> dict[str, list[Reply]]:
        """Send the messages to each contestant in a drawn order; the replies of those that gave all."""
        order = list(self.running)
        self._random.shuffle(order)
        replies: dict[str, list[Reply]] = {}
        for name in order:
            process = self.running[name]
            process.signal(signal.SIGCONT)
            try:
                replies[name] = [process.call(message, self.wait_s) for message in messages]
            except PeerLost as error:
                self._lose(name, str(error))
            else:
                process.signal(signal.SIGSTOP)
        return replies

    def end(self) -> None:
        """End all contestants."""
        for process in self.running.values():
            process.end()
        self.running.clear()

    def _lose(self, name: str, why: str) -> None:
        if process := self.running.pop(name, None):
            process.end()
        self.lost[name] = why
        self._say(f"{name}: {why}")


@contextmanager
def conducting(conductor: Conductor) -> Iterator[Conductor]:
    """At the end, also by an exception, SIGTERM or SIGHUP, every contestant is ended. Main thread only."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield conductor
    finally:
        conductor.end()
        for number, handler in before.items():
            signal.signal(number, handler)
