"""Clients' requests that wait for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from daemon import protocol
from daemon.api import messages

T = TypeVar("T")


class Waiting(Generic[T]):
    """Commands in flight, by number, each until the engine's event of its number. On the event loop."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[T]] = {}
        self._numbers = count(1)

    async def reply(
        self, send: Callable[[int], None], cancel: Callable[[int], None] = lambda number: None
    ) -> T:
        """Send a command under a new number and wait. Raises QueryError when it is refused.

        ``cancel``: called when the wait itself ends early, since the time is up or the client is gone.
        """
        number = next(self._numbers)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._futures[number] = future
        try:
            send(number)
            return await future
        finally:
            if self._futures.pop(number, None) is not None:
                cancel(number)

    def done(self, number: int, result: T) -> None:
        """The engine carried it out."""
        future = self._futures.pop(number, None)
        if future is not None and not future.done():
            future.set_result(result)

    def refused(
        self,
        event: protocol.AskFailed
        | protocol.QuestionsRefused
        | protocol.SessionRefused
        | protocol.LabelRefused,
    ) -> None:
        """The engine refused it, or failed."""
        self._fail(event.id, messages.code_of(event.code), event.message)

    def engine_gone(self, message: str) -> None:
        """Fail every command in flight: the engine is gone."""
        for number in list(self._futures):
            self._fail(number, "engine", message)

    def _fail(self, number: int, code: messages.Code, message: str) -> None:
        future = self._futures.pop(number, None)
        if future is not None and not future.done():
            future.set_exception(messages.QueryError(code, message))
