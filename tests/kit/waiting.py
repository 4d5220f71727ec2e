"""Waiting for a condition."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T], timeout_s: float = 60.0, what: str = "") -> T:
    """The first truthy value of ``condition``, checked every 5 ms; TimeoutError names the condition."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or condition}")
        await asyncio.sleep(0.005)
    return value


async def until_slowly(condition: Callable[[], object], timeout_s: float = 120.0, what: str = "") -> None:
    """Like `until`, for blocking or costly conditions: checked every 100 ms, in a thread."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or condition}")
        await asyncio.sleep(0.1)
