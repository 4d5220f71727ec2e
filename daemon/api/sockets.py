"""`/v1/ws`: the query socket's requests and subscriptions to events over one WebSocket, as JSON.

Back-pressure both ways: a connection with enough requests in flight is not read, and a client that does not
read loses its own events, or its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.websockets import WebSocket, WebSocketDisconnect

from daemon.api.events import EventKind, Events, Filter, Subscription
from daemon.api.guard import client_of
from daemon.api.http_requests import Requests
from daemon.api.messages import ClientRequest, ErrorReply, Id, Name, QueryError
from feeds.decoding import Undecodable, decoded

MESSAGE_BYTES = 1 << 18
MAX_IN_FLIGHT = 32
"""Requests of one connection that are answered at a time; the next one is read when one is done."""
MAX_SUBSCRIPTIONS = 16
RATE, BURST = 200.0, 400.0
"""Messages a second that a connection may send, and how many at once."""


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe", forbid_unknown_fields=True):
    """Get events from now on, or from the one after the event ``after``; empty filters are all."""

    id: Id
    sessions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    questions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    events: tuple[EventKind, ...] = ()
    after: Annotated[str, Meta(max_length=64)] = ""


class Unsubscribe(msgspec.Struct, frozen=True, tag="unsubscribe", forbid_unknown_fields=True):
    """Get no more events of the subscription that request ``subscription`` made."""

    id: Id
    subscription: Id


class Subscribed(msgspec.Struct, frozen=True, tag="subscribed"):
    """The subscription begins; ``newest``: the id of the newest event."""

    id: Id
    newest: str


class Unsubscribed(msgspec.Struct, frozen=True, tag="unsubscribed"):
    """The subscription has ended."""

    id: Id


class EventMessage(msgspec.Struct, frozen=True, tag="event"):
    """One event of a subscription, by the id of its request; ``data`` is the message that sinks get."""

    subscription: Id
    event: str
    data: msgspec.Raw


class LostMessage(msgspec.Struct, frozen=True, tag="lost"):
    """The subscription has missed events; members as in `Lost`."""

    subscription: Id
    events: int | Literal["unknown"]
    exact: bool
    reason: Literal["slow", "expired", "restarted"]


Incoming = ClientRequest | Subscribe | Unsubscribe
_decode = msgspec.json.Decoder(Incoming).decode
_encode = msgspec.json.Encoder().encode


class Bucket:
    """A token bucket: ``rate`` a second, ``burst`` at once. ``now``: monotonic seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Socket:
    """One connection."""

    def __init__(
        self, websocket: WebSocket, requests: Requests, events: Events, sent: Callable[[int], None]
    ) -> None:
        self._websocket, self._requests, self._events, self._sent = websocket, requests, events, sent
        self._client = client_of(websocket)
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: dict[int, tuple[Subscription, asyncio.Task[None]]] = {}

    async def serve(self) -> None:
        """Serve until the client or the daemon closes the connection."""
        await self._websocket.accept()
        loop = asyncio.get_running_loop()
        bucket = Bucket(RATE, BURST, loop.time())
        try:
            while (message := await self._websocket.receive())["type"] == "websocket.receive":
                asked = self._read(message.get("text"))
                if not bucket.take(loop.time()):
                    number = None if asked is None or isinstance(asked, ErrorReply) else asked.id
                    asked = ErrorReply(number, "busy", f"more than {RATE:g} messages a second")
                match asked:
                    case ErrorReply():
                        await self._send(asked)
                    case Subscribe():
                        await self._subscribe(asked)
                    case Unsubscribe():
                        await self._unsubscribe(asked)
                    case _:
                        await self._room.acquire()
                        self._start(self._answer(asked))
        finally:
            for subscription, pump in self._subscriptions.values():
                self._events.unsubscribe(subscription)
                self._tasks.add(pump)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _read(self, text: str | None) -> Incoming | ErrorReply:
        if text is None:
            return ErrorReply(None, "bad_request", "a message is JSON text, not bytes")
        try:
            asked: Incoming = decoded(_decode, text.encode())
        except Undecodable as error:
            return ErrorReply(_id_of(text), "bad_request", str(error))
        return asked

    async def _answer(self, request: ClientRequest) -> None:
        try:
            reply = await self._requests.ask(request, self._client)
            await self._send(reply)
        finally:
            self._room.release()

    async def _subscribe(self, asked: Subscribe) -> None:
        if asked.id in self._subscriptions:
            await self._send(ErrorReply(asked.id, "bad_request", "there is a subscription with this id"))
            return
        if len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
            why = f"a connection has at most {MAX_SUBSCRIPTIONS} subscriptions"
            await self._send(ErrorReply(asked.id, "busy", why))
            return
        chosen = Filter(frozenset(asked.sessions), frozenset(asked.questions), frozenset(asked.events))
        try:
            newest = self._events.newest
            subscription = self._events.subscribe(chosen, "websocket", asked.after)
        except QueryError as error:
            await self._send(ErrorReply(asked.id, error.code, error.message))
            return
        pump = asyncio.ensure_future(self._pump(asked.id, subscription))
        self._subscriptions[asked.id] = subscription, pump
        await self._send(Subscribed(asked.id, newest))

    async def _unsubscribe(self, asked: Unsubscribe) -> None:
        found = self._subscriptions.pop(asked.subscription, None)
        if found is None:
            await self._send(ErrorReply(asked.id, "bad_request", f"no subscription {asked.subscription}"))
            return
        self._events.unsubscribe(found[0])
        found[1].cancel()
        await self._send(Unsubscribed(asked.id))

    async def _pump(self, number: int, subscription: Subscription) -> None:
        while not subscription.closed:
            await subscription.news.wait()
            lost, waiting = subscription.take()
            for each in lost:
                await self._send(LostMessage(number, each.events, each.exact, each.reason))
            for event in waiting:
                await self._send(EventMessage(number, event.id, msgspec.Raw(event.json)))
                self._sent(1)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, message: msgspec.Struct) -> None:
        # the connection may end at any time, and `serve` is told
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.send({"type": "websocket.send", "text": _encode(message).decode()})


def _id_of(text: str) -> int | None:
    """The id of an otherwise unreadable message; None if that is unreadable too."""
    try:
        found = decoded(msgspec.json.decode, text)
    except Undecodable:
        return None
    number = found.get("id") if isinstance(found, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None
