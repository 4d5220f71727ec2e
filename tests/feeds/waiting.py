"""Waits for effects of another task or process."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Return once ``condition`` holds; raises TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions watched here announce themselves to nobody
            await asyncio.sleep(0.02)
