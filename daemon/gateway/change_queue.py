"""Changes one after the other, each to its end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class ChangeQueue:
    """One change at a time. It goes on where who waits for it is cancelled: the engine has been asked."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._under_way = set[asyncio.Task[object]]()

    async def run(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change behind those that wait already."""

        async def make() -> T:
            async with self._lock:
                return await change()

        task = asyncio.create_task(make())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_note)
            raise


def _note(task: "asyncio.Task[object]") -> None:
    """Log why a change failed whose client is gone."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a change failed after its client had gone: %s", error)
