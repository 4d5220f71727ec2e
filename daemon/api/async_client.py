"""A client of the query socket for an event loop: many requests at a time over one connection."""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from daemon.api.messages import ClientRequest, ErrorReply, QueryError, Reply, decode_reply, encode
from feeds.decoding import Undecodable


class AsyncQueryClient:
    """One connection. Use it from one event loop, and close it (or use ``async with``).

    ``identity``: the connection's name at the daemon, unique among its clients; by default it gets one.
    """

    def __init__(self, endpoint: str, timeout_s: float = 30.0, *, identity: bytes = b"") -> None:
        """``timeout_s`` bounds every request, including the connection. Raises QueryError."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._number = 0
        self._reading: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            why = f"{endpoint} is not an address to connect to: {error.strerror}"
            raise QueryError("bad_request", why) from None

    async def request(self, request: ClientRequest) -> Reply:
        """The reply to ``request``, with its id, errors included. Raises QueryError for a timeout."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        self._number += 1
        number = self._number
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send(encode(msgspec.structs.replace(request, id=number)))
                found = await reply
        except TimeoutError:
            why = f"no reply from {self._endpoint} within {self._timeout_s:g} s"
            raise QueryError("timeout", why) from None
        finally:
            del self._waiting[number]
        mine: Reply = msgspec.structs.replace(found, id=request.id)
        return mine

    async def close(self) -> None:
        """Close the connection; requests that wait fail with QueryError."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail(QueryError("shutting_down", f"the connection to {self._endpoint} was closed"))
        self._socket.close()
        self._context.term()

    async def __aenter__(self) -> AsyncQueryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self) -> None:
        while True:
            try:
                reply = decode_reply(await self._socket.recv())
            except Undecodable as error:
                why = f"{self._endpoint} sent a reply that is not of this protocol: {error}"
                self._fail(QueryError("engine", why))
                continue
            if isinstance(reply, ErrorReply) and reply.id is None:
                # it was too malformed for the daemon to tell which it was
                self._fail(QueryError(reply.code, reply.message))
                continue
            waiting = self._waiting.get(reply.id) if reply.id is not None else None
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)

    def _fail(self, error: QueryError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
