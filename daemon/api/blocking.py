"""Calls that block, made of those that are awaited: an event loop in a thread of its own.

So they also work in a notebook, whose own event loop runs already.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from functools import partial
from threading import Thread
from typing import Any, Protocol, TypeVar

from daemon.api.messages import QueryError, Received, Sent, Subscribe
from daemon.api.subscriptions import AsyncEventStream, StreamItem

T = TypeVar("T")


class AsyncCalls(Protocol):
    """How an `AsyncQueryClient` reaches its daemon. All raise QueryError where there is no reply."""

    async def exchange(self, request: Sent) -> Received:
        """The reply, errors included."""

    async def subscribe(self, chosen: Subscribe) -> AsyncEventStream:
        """A subscription, which has begun."""

    async def close(self) -> None:
        """Close the connection."""


class LoopThread:
    """An event loop that runs until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="foretick-client", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin ``work``."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled where the wait ends early, as by Ctrl-C."""
        begun = self.start(work)
        try:
            return begun.result()
        finally:
            begun.cancel()

    def close(self) -> None:
        """Cancel what runs, end the loop, and wait for it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


class BlockingCalls:
    """Waits for calls that are awaited."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls, self._thread = calls, LoopThread()

    def exchange(self, request: Sent) -> Received:
        """The reply, errors included. Raises QueryError where there is none."""
        return self._thread.run(self._calls.exchange(request))

    def subscribe(self, chosen: Subscribe) -> EventStream:
        """A subscription, which has begun. Raises QueryError."""
        return EventStream(partial(self._calls.subscribe, chosen))

    def close(self) -> None:
        """Close the connection."""
        self._thread.run(self._calls.close())
        self._thread.close()


class EventStream:
    """Events, as an iterator that waits for them. Use it from one thread, and close it (or use `with`).

    They are awaited on a thread of its own: it outlasts the client.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, AsyncEventStream]]) -> None:
        """Raises QueryError."""
        self._thread = LoopThread()
        self._next: concurrent.futures.Future[StreamItem] | None = None
        try:
            self._stream = self._thread.run(begin())
        except BaseException:
            self._thread.close()
            raise

    @property
    def last(self) -> str:
        """Id of the newest event that was read: ``subscribe(after=last)`` goes on behind it."""
        return self._stream.last

    @property
    def newest(self) -> str:
        """Id of the daemon's newest event when the subscription began."""
        return self._stream.newest

    def get(self, timeout_s: float | None = None) -> StreamItem:
        """The next event, or what was lost before it. Raises QueryError when the time is up."""
        # what is awaited goes on when the time is up: to cancel it might lose an event
        self._next = self._next or self._thread.start(self._stream.get())
        try:
            told = self._next.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise QueryError("timeout", f"no event within {timeout_s:g} s") from None
        self._next = None
        return told

    def close(self) -> None:
        """End the subscription."""
        if self._next is not None:
            self._next.cancel()
        self._thread.run(self._stream.aclose())
        self._thread.close()

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> StreamItem:
        return self.get()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
