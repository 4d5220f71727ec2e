"""One fault: how it is caused, the alert that names it, and what `foretick doctor` finds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

B = TypeVar("B")
"""The daemon and its surroundings."""


@dataclass(frozen=True)
class Fault(Generic[B]):
    """``cause``: it is there while the block lasts, and mended behind it.

    ``alert`` and ``says``: the one alert, and words of its sentence. ``check`` and ``shows``: what the doctor
    finds once the alert is there, and words of what it saw. ``before_s``: how long the daemon is watched
    before, by the clock of alerts, where the alert compares with what was. ``after``: what may be told behind
    its end: a fault's series end with it, so that windows do not clear.
    """

    name: str
    cause: Callable[[B], AbstractAsyncContextManager[None]]
    alert: str
    says: str
    check: str
    shows: str
    before_s: float = 0.0
    after: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def again(act: Callable[[], Awaitable[object]], every_s: float = 0.3) -> AsyncIterator[None]:
    """Do something at once and again and again, while the block lasts; what was begun is finished."""
    ended = asyncio.Event()

    async def repeat() -> None:
        while not ended.is_set():
            await act()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), every_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        ended.set()
        await task
