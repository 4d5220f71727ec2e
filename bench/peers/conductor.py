"""Starts the contestants, and lets one run at a time; the others are held."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from bench.peers.process import Peer, PeerLost, PeerProcess, ended_by_signals
from bench.peers.protocol import Message, Opened, Opening, Reply

_WAIT_S = 1800.0
"""Longest wait for one reply."""


class Conductor:
    """Use it in a ``with`` block: at its end, also by an exception or a signal, every contestant is ended.

    ``about``: engine and versions of those that started; ``lost``: why the others take no part (any more).
    The order of each turn is drawn with ``seed``.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None], wait_s: float = _WAIT_S
    ) -> None:
        self._directory, self._say, self._wait_s = directory, say, wait_s
        self._random = random.Random(seed)
        self._running: dict[str, PeerProcess] = {}
        self._stack = ExitStack()
        self.about: dict[str, str] = {}
        self.lost: dict[str, str] = {}

    def __enter__(self) -> Conductor:
        self._stack.enter_context(ended_by_signals())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.end()
        self._running.clear()
        self._stack.close()

    @property
    def pids(self) -> dict[str, int]:
        """Of the contestants that take part."""
        return {name: process.pid for name, process in self._running.items()}

    def start(self, peers: Sequence[Peer], opening: Opening) -> None:
        """Start the contestants one after the other; each is held when it is ready."""
        for peer in peers:
            self._say(f"{peer.name} ...")
            try:
                process = self._running[peer.name] = PeerProcess(peer, self._directory)
                opened = process.call(opening, self._wait_s)
                process.hold()
            except PeerLost as error:
                self._lose(peer.name, str(error))
                continue
            if isinstance(opened, Opened) and not opened.absent:
                self.about[peer.name] = opened.about
            else:
                self._lose(peer.name, f"absent: {opened.absent if isinstance(opened, Opened) else opened}")

    def turn(self, *messages: Message) -> dict[str, list[Reply]]:
        """Send the messages to each contestant in a drawn order; the replies of those that gave all."""
        order = list(self._running)
        self._random.shuffle(order)
        replies: dict[str, list[Reply]] = {}
        for name in order:
            process = self._running[name]
            try:
                process.resume()
                replies[name] = [process.call(message, self._wait_s) for message in messages]
                process.hold()
            except PeerLost as error:
                self._lose(name, str(error))
        return replies

    def _lose(self, name: str, why: str) -> None:
        if process := self._running.pop(name, None):
            process.end()
        self.lost[name] = why
        self._say(f"{name}: {why}")
