"""A venue's WebSocket server on loopback."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

Venue = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def venue(handle: Venue, **more: Any) -> AsyncIterator[str]:
    """A server on loopback; yields its address."""

    async def quiet(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            await handle(connection)

    async with serve(quiet, "127.0.0.1", 0, **more) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws{'s' if 'ssl' in more else ''}://127.0.0.1:{port}"
