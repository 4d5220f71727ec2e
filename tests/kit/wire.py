"""A bare client of the query socket: it sends and receives messages as they are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from daemon.api.messages import decode_reply, encode


class Wire:
    """A DEALER; ``options``: of the socket, by their names."""

    def __init__(self, endpoint: str, **options: int) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    async def send(self, *requests: Any) -> None:
        for request in requests:
            await self.socket.send(request if isinstance(request, bytes) else encode(request))

    async def read(self) -> Any:
        return decode_reply((await asyncio.wait_for(self.socket.recv_multipart(), 60))[-1])

    async def request(self, request: Any) -> Any:
        await self.send(request)
        return await self.read()

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@asynccontextmanager
async def wired(endpoint: str, **options: int) -> AsyncIterator[Wire]:
    made = Wire(endpoint, **options)
    try:
        yield made
    finally:
        made.close()
