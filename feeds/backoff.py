"""Connection states logged once per change, pauses between retries, and waits that a stop interrupts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from feeds.source import ConnectionState

Sleep = Callable[[float], Awaitable[None]]
"""Sleep for this many seconds; tests pass one that does not wait."""

FIRST_S = 0.1
CAP_S = 5.0


def delay_s(attempt: int) -> float:
    """Exponential wait before retry number ``attempt`` (0 is the first), at most 5 s."""
    return float(min(CAP_S, FIRST_S * 2.0 ** min(attempt, 16)))


async def until(stop: asyncio.Event, doing: Awaitable[Any]) -> bool:
    """Await ``doing`` unless ``stop`` is set first, which cancels it; returns whether it finished."""
    task, stopping = asyncio.ensure_future(doing), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


class ConnectionLog:
    """A connection's state and its number of retries; every change is logged once."""

    def __init__(self, name: str, peer: str, log: logging.Logger, sleep: Sleep = asyncio.sleep) -> None:
        self.state = ConnectionState.STOPPED
        self.retries, self.why = 0, ""
        """Number of retries, and why the peer is down."""
        self._name = name
        self._peer = peer
        self._log = log
        self._sleep = sleep
        self._attempt = 0

    def connecting(self) -> None:
        """A first attempt begins."""
        self._move(ConnectionState.CONNECTING, logging.INFO, "connecting to %s", self._peer)

    def up(self) -> None:
        """The peer answers."""
        self._attempt, self.why = 0, ""
        self._move(ConnectionState.UP, logging.INFO, "connected to %s", self._peer)

    def down(self, why: object) -> None:
        """The peer does not answer; retries go on."""
        self.why = str(why)
        message = "%s does not answer, retrying at least every %g s: %s"
        self._move(ConnectionState.DOWN, logging.WARNING, message, self._peer, CAP_S, why)

    def stopped(self) -> None:
        """The connection was closed on purpose."""
        self._move(ConnectionState.STOPPED, logging.INFO, "closed %s", self._peer)

    async def wait_before_retry(self, why: object) -> None:
        """Report the failure, count a retry and sleep for its backoff."""
        self.down(why)
        self.retries += 1
        attempt, self._attempt = self._attempt, self._attempt + 1
        await self._sleep(delay_s(attempt))

    def _move(self, state: ConnectionState, level: int, message: str, *values: object) -> None:
        if state is not self.state:
            self.state = state
            self._log.log(level, "%s: " + message, self._name, *values)
