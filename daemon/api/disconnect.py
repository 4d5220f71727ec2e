"""Clients that close their connection before the reply: their work ends with it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

T = TypeVar("T")
GONE = 499
"""Status of a reply whose client has gone."""
_WATCH_S = 0.05
"""A client is watched from so long after its request."""


class ClientDisconnected(Exception):
    """The client closed the connection."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``. Raises ClientDisconnected, with it cancelled, when the client goes first."""
    loop = asyncio.get_running_loop()
    watching: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(None) as limit:

            async def watch() -> None:
                await gone(request.receive)
                limit.reschedule(loop.time())

            # most replies are there before anybody could go: they cost no task
            later = loop.call_later(_WATCH_S, lambda: watching.append(asyncio.ensure_future(watch())))
            try:
                return await work
            finally:
                later.cancel()
    except TimeoutError:
        if limit.expired():
            raise ClientDisconnected from None
        raise
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def client_gone(_: Request, __: Exception) -> Response:
    """The reply to a client that has closed its connection."""
    return Response(status_code=GONE)


async def gone(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
