"""The query socket: a ZeroMQ ROUTER that answers each request as its own task, so none waits for another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

import zmq
import zmq.asyncio

from daemon.api.messages import ClientRequest, ErrorReply, Reply, decode_request, encode, request_id
from daemon.supervision import Tasks
from feeds.decoding import Undecodable

log = logging.getLogger(__name__)

NAME = "query socket"
# libzmq closes the connection when a frame exceeds the limit by this much, without reading it into
# memory. Shorter ones get an error that says why.
_HARD_LIMIT_FACTOR = 4
_CLOSE_LINGER_MS = 500

AnswerQuery = Callable[[ClientRequest, str, int], Awaitable[Reply]]
"""``answer(request, client, since)``; see `daemon.front.queries`."""


class QueryServer:
    """Serves one endpoint inside the running event loop."""

    def __init__(
        self,
        answer: AnswerQuery,
        endpoint: str,
        *,
        max_in_flight: int = 256,
        max_request_bytes: int = 1 << 18,
        observe: Callable[[ClientRequest, Reply, int], None] = lambda request, reply, latency_ns: None,
    ) -> None:
        """`observe(request, reply, latency_ns)`, per readable request."""
        self._answer = answer
        self._asked_endpoint = endpoint
        self._max_in_flight = max_in_flight
        self._max_request_bytes = max_request_bytes
        self._observe = observe
        self._in_flight: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks = Tasks()
        self.endpoint = ""

    async def start(self, tasks: Tasks) -> None:
        """Bind, and serve as one of ``tasks``; sets `endpoint`, with the real port in place of 0 or *.

        Raises OSError when the address cannot be bound.
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _CLOSE_LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_request_bytes * _HARD_LIMIT_FACTOR)
        self._socket.setsockopt(zmq.IPV6, int("[" in self._asked_endpoint))
        try:
            self._socket.bind(self._asked_endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(
                error.errno, f"cannot bind the query socket to {self._asked_endpoint}: {error.strerror}"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = tasks
        tasks.start(NAME, partial(self._receive, self._socket), restarts=True)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds to finish, refuse the rest, and close."""
        if self._socket is None:
            return
        self._stopping = True
        if self._in_flight:
            _, late = await asyncio.wait(self._in_flight, timeout=drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late)
        await self._tasks.stop(NAME)
        self._close()

    def _close(self) -> None:
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.term()
        self._socket = self._context = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            arrived: list[bytes] = await socket.recv_multipart()
            since = time.monotonic_ns()
            # Peer identity, then REQ's empty delimiter if any; the reply repeats both.
            route, payload = arrived[:-1], arrived[-1]
            request = self._admit(payload, len(arrived), since)
            if isinstance(request, ErrorReply):
                await socket.send_multipart([*route, encode(request)])
                continue
            task = asyncio.create_task(self._serve(socket, route, request, since))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    def _admit(self, payload: bytes, frames: int, since: int) -> ClientRequest | ErrorReply:
        """The request, or the reply that refuses it."""
        if len(payload) > self._max_request_bytes:
            limit = self._max_request_bytes
            return ErrorReply(None, "too_long", f"a request has at most {limit} bytes, not {len(payload)}")
        if frames > 3:
            return ErrorReply(None, "bad_request", f"a request is one frame, not {frames - 1}")
        try:
            request = decode_request(payload)
        except Undecodable as error:
            return ErrorReply(request_id(payload), "bad_request", str(error))
        refusal: ErrorReply | None = None
        if self._stopping:
            refusal = ErrorReply(request.id, "shutting_down", "the daemon is stopping")
        elif len(self._in_flight) >= self._max_in_flight:
            refusal = ErrorReply(
                request.id, "busy", f"{self._max_in_flight} requests are already being answered"
            )
        if refusal is None:
            return request
        self._observe(request, refusal, time.monotonic_ns() - since)
        return refusal

    async def _serve(
        self, socket: zmq.asyncio.Socket, route: list[bytes], request: ClientRequest, since: int
    ) -> None:
        try:
            reply = await self._answer(request, route[0].hex(), since)
        except asyncio.CancelledError:
            # Only `stop` cancels a request; its client gets an error.
            reply = ErrorReply(request.id, "shutting_down", "the daemon stopped before the answer was ready")
        self._observe(request, reply, time.monotonic_ns() - since)
        try:
            payload = encode(reply)
        except Exception:
            log.exception("the reply to %s cannot be encoded", request)
            payload = encode(ErrorReply(request.id, "engine", "the reply cannot be encoded"))
        await socket.send_multipart([*route, payload])
