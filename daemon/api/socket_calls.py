"""Calls over the query socket: `SocketCalls` one at a time, `AsyncSocketCalls` many."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from daemon.api import messages
from daemon.api.blocking import EventStream
from daemon.api.dealer import CurvePair, connect
from daemon.api.messages import ErrorReply, QueryError, Received, Sent, Subscribe, decode_reply, encode
from daemon.api.subscriptions import AsyncSocketStream
from feeds.decoding import Undecodable


class SocketCalls:
    """One connection, one request at a time. A request that is given up is cancelled at the daemon, too."""

    def __init__(self, endpoint: str, timeout_s: float, keys: CurvePair | None) -> None:
        """Raises QueryError."""
        self._endpoint, self._timeout_s, self._keys = endpoint, timeout_s, keys
        self._number = 0
        self._context = zmq.Context()
        self._socket, self._handshakes = connect(self._context, endpoint, keys)
        self._poller = zmq.Poller()
        for each in (self._socket, self._handshakes.events):
            self._poller.register(each, zmq.POLLIN)

    def exchange(self, request: Sent) -> Received:
        """The reply, errors included. Raises QueryError where there is none."""
        deadline = time.monotonic() + self._timeout_s
        self._number = number = self._number + 1
        self._send(_encoded(request, number))
        try:
            while True:
                reply = self._receive(deadline)
                if isinstance(reply, Received) and reply.id in (number, None):
                    return reply
        except BaseException:
            with contextlib.suppress(QueryError):
                self._number += 1
                self._send(encode(messages.Cancel(self._number, number)))
            raise

    def subscribe(self, chosen: Subscribe) -> EventStream:
        """A subscription on a connection of its own. Raises QueryError."""
        return EventStream(
            partial(AsyncSocketStream.open, self._endpoint, chosen, self._timeout_s, self._keys)
        )

    def close(self) -> None:
        """Close the connection; unsent requests are dropped."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            # so is a connection that was refused
            self._watch()
            raise QueryError("timeout", f"{self._endpoint} accepts no further requests") from None

    def _watch(self) -> None:
        while self._handshakes.events.poll(0):
            self._handshakes.note(self._handshakes.events.recv_multipart())
        self._handshakes.check()

    def _receive(self, deadline: float) -> object:
        while not self._socket.poll(0):
            self._watch()
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0 or not self._poller.poll(left_ms):
                raise self._handshakes.no_reply(self._timeout_s)
        try:
            return decode_reply(self._socket.recv())
        except Undecodable as error:
            raise _unreadable(self._endpoint, error) from None


class AsyncSocketCalls:
    """One connection, many requests at a time, on one event loop.

    A request whose task is cancelled, or whose time is up, is cancelled at the daemon, too.
    """

    def __init__(
        self, endpoint: str, timeout_s: float, keys: CurvePair | None, identity: bytes = b""
    ) -> None:
        """Raises QueryError."""
        self._endpoint, self._timeout_s, self._keys = endpoint, timeout_s, keys
        self._waiting: dict[int, asyncio.Future[Received]] = {}
        self._number = 0
        self._reading: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket, self._handshakes = connect(self._context, endpoint, keys, identity)

    async def subscribe(self, chosen: Subscribe) -> AsyncSocketStream:
        """A subscription on a connection of its own. Raises QueryError."""
        return await AsyncSocketStream.open(self._endpoint, chosen, self._timeout_s, self._keys)

    async def exchange(self, request: Sent) -> Received:
        """The reply, errors included. Raises QueryError where there is none."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_all())
        self._handshakes.check()
        self._number += 1
        number = self._number
        sent = _encoded(request, number)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        sending = asyncio.ensure_future(self._socket.send(sent))
        try:
            async with asyncio.timeout(self._timeout_s):
                # a connection that was refused never takes it: then the reply fails
                await asyncio.wait((sending, reply), return_when=asyncio.FIRST_COMPLETED)
                found: Received = await reply
                return found
        except TimeoutError:
            self._cancel(number)
            raise self._handshakes.no_reply(self._timeout_s) from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            sending.cancel()
            del self._waiting[number]

    async def close(self) -> None:
        """Close the connection; requests that wait fail with QueryError."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail(QueryError("shutting_down", f"the connection to {self._endpoint} was closed"))
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    def _cancel(self, request: int) -> None:
        """Tell the daemon to give a request up, if the message can be sent now."""
        self._number += 1
        with contextlib.suppress(zmq.ZMQError):
            sent = self._socket.send(encode(messages.Cancel(self._number, request)), zmq.NOBLOCK)
            assert isinstance(sent, asyncio.Future)
            sent.exception() if sent.done() else sent.cancel()

    async def _read_all(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch())
            both.create_task(self._read())

    async def _watch(self) -> None:
        while True:
            self._handshakes.note(await self._handshakes.events.recv_multipart())
            if self._handshakes.refused:
                self._fail(QueryError("unauthenticated", self._handshakes.refused))

    async def _read(self) -> None:
        while True:
            try:
                reply = decode_reply(await self._socket.recv())
            except Undecodable as error:
                self._fail(_unreadable(self._endpoint, error))
                continue
            if isinstance(reply, messages.EventMessage | messages.LostMessage | messages.Ended):
                continue
            if isinstance(reply, ErrorReply) and reply.id is None:
                # it was too malformed for the daemon to tell which it was
                self._fail(QueryError.of(reply))
                continue
            waiting = self._waiting.get(reply.id) if reply.id is not None else None
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)

    def _fail(self, error: QueryError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


def _encoded(request: Sent, number: int) -> bytes:
    """Return the request's message, with ``number`` as its id. Raises QueryError."""
    sent = encode(msgspec.structs.replace(request, id=number))
    if len(sent) > messages.MAX_REQUEST_BYTES:
        # the daemon could not say which one it refuses, and all that wait would fail
        why = f"a request has at most {messages.MAX_REQUEST_BYTES} bytes, not {len(sent)}"
        raise QueryError("too_long", why)
    return sent


def _unreadable(endpoint: str, error: Undecodable) -> QueryError:
    return QueryError("engine", f"{endpoint} sent a reply that is not of this protocol: {error}")
