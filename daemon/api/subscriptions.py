"""A client's subscription to events: kept over lost connections and restarts of the daemon.

`Feed` has the state and does no I/O. Each subscription has a connection of its own, so that one that is read
slowly delays no replies: the daemon notices, drops its oldest events, and says so.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from daemon.api.dealer import CurvePair, connect
from daemon.api.messages import (
    Ended,
    ErrorReply,
    EventData,
    EventKind,
    EventMessage,
    Heartbeat,
    HeartbeatReply,
    LostMessage,
    QueryError,
    SocketRequest,
    Subscribe,
    Subscribed,
    Unsubscribe,
    decode_event,
    decode_reply,
    encode,
)
from feeds.decoding import Undecodable

BEAT_S = 5.0
"""How often the client sends a heartbeat; it forgets one after `HelloReply.lease_s`."""


@dataclass(frozen=True)
class SubscriptionUpdate:
    """An event. ``id``: the next subscription can go on behind it (``after``)."""

    id: str
    message: EventData


StreamItem = SubscriptionUpdate | LostMessage
"""What a stream of events gives."""


class AsyncEventStream(ABC):
    """Events, as an asynchronous iterator. Use it from one event loop, and close it (or `async with`)."""

    @property
    @abstractmethod
    def last(self) -> str:
        """Id of the newest event that was read: ``subscribe(after=last)`` goes on behind it."""

    @property
    @abstractmethod
    def newest(self) -> str:
        """Id of the daemon's newest event when the subscription began."""

    @abstractmethod
    async def get(self) -> StreamItem:
        """The next event, or what was lost before it; to cancel the wait loses none. Raises QueryError."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the subscription."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        return await self.get()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def subscription(
    sessions: Sequence[str] = (),
    questions: Sequence[str] = (),
    events: Sequence[EventKind] = (),
    after: str = "",
) -> Subscribe:
    """What to subscribe to; empty is all. ``after``: go on behind the event of this id."""
    return Subscribe(0, tuple(sessions), tuple(questions), tuple(events), after)


class Feed:
    """What to send, and what the messages that arrive mean. Times are monotonic seconds."""

    def __init__(self, chosen: Subscribe, beat_s: float = BEAT_S) -> None:
        self.last = chosen.after
        """Id of the newest event that is known."""
        self.confirmed = False
        """Whether the daemon has confirmed a subscription, ever."""
        self.newest = ""
        """Id of the newest event, when that was."""
        self._chosen, self._beat_s = chosen, beat_s
        self._number = 0
        self._subscription = 0
        self._live = False
        self._next = 0.0

    def due(self, now: float) -> SocketRequest | None:
        """What to send now, if it is time: a subscription until one is confirmed, then heartbeats."""
        if now < self._next:
            return None
        self._next = now + self._beat_s
        self._number += 1
        if self._live:
            return Heartbeat(self._number)
        self._subscription = self._number
        return msgspec.structs.replace(self._chosen, id=self._number, after=self.last)

    def wait_s(self, now: float) -> float:
        """Time until something is due."""
        return max(0.0, self._next - now)

    def on_event(self, payload: bytes) -> StreamItem | SocketRequest | None:
        """What a message brings the reader, or what is to be sent because of it. Raises QueryError."""
        try:
            message = decode_reply(payload)
            if isinstance(message, EventMessage) and message.subscription == self._subscription:
                update = SubscriptionUpdate(message.event, decode_event(message.data))
                self.last = update.id
                return update
        except Undecodable as error:
            why = f"the daemon sent a message that is not of this protocol: {error}"
            raise QueryError("engine", why) from None
        match message:
            case LostMessage(subscription=self._subscription):
                self.last = message.after or self.last
                return message
            case Subscribed(id=self._subscription):
                self.last, self.newest = self.last or message.newest, message.newest
                self._live = self.confirmed = True
            case Subscribed():
                # of an earlier try, to which another followed
                self._number += 1
                return Unsubscribe(self._number, message.id)
            case HeartbeatReply() if self._live and self._subscription not in message.subscriptions:
                # the connection was a new one
                self._live, self._next = False, 0.0
            case Ended(subscription=self._subscription):
                self._live = False
            case ErrorReply(code="unauthenticated"):
                raise QueryError.of(message)
            case ErrorReply(id=self._subscription):
                if not (self.confirmed and message.code in ("busy", "shutting_down")):
                    raise QueryError.of(message)
                self._live = False
        return None


class AsyncSocketStream(AsyncEventStream):
    """An `AsyncEventStream` of the query socket: a connection with a `Feed`."""

    def __init__(
        self, endpoint: str, chosen: Subscribe, keys: CurvePair | None, identity: bytes, beat_s: float
    ) -> None:
        """`open` waits for the daemon, too. Raises QueryError."""
        self._feed, self._context = Feed(chosen, beat_s), zmq.asyncio.Context()
        self._ahead: list[StreamItem] = []
        """What has arrived ahead of the confirmation."""
        self._socket, self._handshakes = connect(self._context, endpoint, keys, identity)
        self._poller = zmq.asyncio.Poller()
        for each in (self._socket, self._handshakes.events):
            self._poller.register(each, zmq.POLLIN)

    @classmethod
    async def open(
        cls,
        endpoint: str,
        chosen: Subscribe,
        timeout_s: float,
        keys: CurvePair | None = None,
        *,
        identity: bytes = b"",
        beat_s: float = BEAT_S,
    ) -> Self:
        """A stream that the daemon has confirmed. ``identity``: as an `AsyncQueryClient`'s.

        ``beat_s``: how often it looks whether the daemon still has the subscription. Raises QueryError.
        """
        made = cls(endpoint, chosen, keys, identity, beat_s)
        try:
            async with asyncio.timeout(timeout_s):
                while not made._feed.confirmed:
                    if (item := await made._step()) is not None:
                        made._ahead.append(item)
        except TimeoutError:
            await made.aclose()
            raise made._handshakes.no_reply(timeout_s) from None
        except BaseException:
            await made.aclose()
            raise
        return made

    @property
    def last(self) -> str:
        """See `AsyncEventStream`."""
        return self._feed.last

    @property
    def newest(self) -> str:
        """See `AsyncEventStream`; of the newest confirmation."""
        return self._feed.newest

    async def get(self) -> StreamItem:
        """See `AsyncEventStream`."""
        while not self._ahead:
            if (item := await self._step()) is not None:
                return item
        return self._ahead.pop(0)

    async def aclose(self) -> None:
        """See `AsyncEventStream`."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    async def _step(self) -> StreamItem | None:
        now = time.monotonic()
        if (due := self._feed.due(now)) is not None:
            await self._send(due)
        ready = dict(await self._poller.poll(max(1, round(self._feed.wait_s(now) * 1000))))
        if self._handshakes.events in ready:
            self._handshakes.note(await self._handshakes.events.recv_multipart(zmq.NOBLOCK))
            self._handshakes.check()
        if self._socket not in ready:
            return None
        found = self._feed.on_event(await self._socket.recv(zmq.NOBLOCK))
        if isinstance(found, SubscriptionUpdate | LostMessage) or found is None:
            return found
        await self._send(found)
        return None

    async def _send(self, message: SocketRequest) -> None:
        try:
            await self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:  # nothing has gone out for long; the next heartbeat tells
            return
