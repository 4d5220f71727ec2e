"""`/v1/ws`: the query socket's requests and subscriptions to events over one WebSocket, as JSON.

Back-pressure both ways: a connection with enough requests in flight is not read, and a client that does not
read loses its own events, or its connection.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, NamedTuple

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from daemon.api.auth import Access
from daemon.api.auth_middleware import PROTOCOL, client_of
from daemon.api.connection_events import ConnectionEvents
from daemon.api.events import Events
from daemon.api.http_requests import Requests
from daemon.api.messages import ClientRequest, ErrorReply, QueryError, Subscribe, Unsubscribe, request_id
from feeds.decoding import Undecodable, decoded
from support.token_bucket import TokenBucket

MESSAGE_BYTES = 1 << 18
BURST_S = 2.0
"""Seconds of a connection's messages that may come at once."""
_POLICY_VIOLATION = 1008


Incoming = ClientRequest | Subscribe | Unsubscribe
_decode = msgspec.json.Decoder(Incoming).decode
_encode = msgspec.json.Encoder().encode


class SocketLimits(NamedTuple):
    """Of one connection: ``messages`` a second; ``requests`` that are answered at a time, while the next one
    is not read; and ``subscriptions``.
    """

    messages: float = 200
    requests: int = 32
    subscriptions: int = 16


class Socket:
    """One connection."""

    def __init__(
        self, websocket: WebSocket, requests: Requests, events: Events, access: Access, limits: SocketLimits
    ) -> None:
        self._websocket, self._requests, self._access = websocket, requests, access
        self._rate = limits.messages
        self.client = client_of(websocket)
        self._room = asyncio.Semaphore(limits.requests)
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions = ConnectionEvents(
            events,
            "websocket",
            self._send,
            lambda event: event.json,
            on=self,
            most=limits.subscriptions,
        )

    async def serve(self) -> None:
        """Serve until the client or the daemon closes the connection, which `Events` knows."""
        offered = self._websocket.scope.get("subprotocols", [])
        await self._websocket.accept(PROTOCOL if PROTOCOL in offered else None)
        loop = asyncio.get_running_loop()
        bucket = TokenBucket(self._rate, BURST_S * self._rate, loop.time())
        try:
            while (message := await self._websocket.receive())["type"] == "websocket.receive":
                asked = self._read(message.get("text"))
                try:
                    self._admit(bucket, loop.time())
                except QueryError as error:
                    await self._send(error.reply(asked.id))
                    if error.code == "unauthenticated":
                        await self._close()
                        return
                    continue
                match asked:
                    case ErrorReply():
                        await self._send(asked)
                    case Subscribe():
                        await self._send(self._subscriptions.subscribe(asked, self.client))
                    case Unsubscribe():
                        await self._send(self._subscriptions.unsubscribe(asked))
                    case _:
                        await self._room.acquire()
                        self._start(self._answer(asked))
        finally:
            self._subscriptions.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, bucket: TokenBucket, now: float) -> None:
        """Admit one message. Raises QueryError."""
        if wait_s := bucket.wait(now):
            raise QueryError("busy", f"more than {self._rate:g} messages a second", wait_s)
        bucket.take(now)
        self.client = self._access.again(self.client, "websocket")
        self._access.request(self.client)

    def dismiss(self) -> None:
        """Close the connection: its key is not known any more, or stands for another tenant."""
        self._start(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.close(_POLICY_VIOLATION, "the key is not known")

    def _read(self, text: str | None) -> Incoming | ErrorReply:
        if text is None:
            return ErrorReply(None, "bad_request", "a message is JSON text, not bytes")
        try:
            asked: Incoming = decoded(_decode, text.encode())
        except Undecodable as error:
            return ErrorReply(request_id(text.encode(), msgspec.json.decode), "bad_request", str(error))
        return asked

    async def _answer(self, request: ClientRequest) -> None:
        try:
            reply = await self._requests.ask(request, self.client)
            await self._send(reply)
        finally:
            self._room.release()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, message: msgspec.Struct) -> bool:
        # the connection may end at any time, and `serve` learns of it
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.send({"type": "websocket.send", "text": _encode(message).decode()})
        return True
