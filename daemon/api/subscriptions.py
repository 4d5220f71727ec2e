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
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from daemon.api.dealer import CurvePair, Handshakes, connect
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


Told = SubscriptionUpdate | LostMessage


class Position(ABC):
    """Where a subscription is, by ids of events."""

    @property
    @abstractmethod
    def last(self) -> str:
        """Id of the newest event that was read: ``subscribe(after=last)`` goes on behind it."""

    @property
    @abstractmethod
    def newest(self) -> str:
        """Id of the daemon's newest event when the subscription began."""


class EventStream(Position):
    """Events, as an iterator that waits for them. Use it from one thread, and close it (or use `with`)."""

    @abstractmethod
    def get(self, timeout_s: float | None = None) -> Told:
        """The next event, or what was lost before it. Raises QueryError when the time is up."""

    @abstractmethod
    def close(self) -> None:
        """End the subscription."""

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Told:
        return self.get()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEventStream(Position):
    """Events, as an asynchronous iterator. Use it from one event loop, and close it (or `async with`)."""

    @abstractmethod
    async def get(self) -> Told:
        """The next event, or what was lost before it; to cancel the wait loses none. Raises QueryError."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the subscription."""

    def __aiter__(self) -> AsyncEventStream:
        return self

    async def __anext__(self) -> Told:
        return await self.get()

    async def __aenter__(self) -> AsyncEventStream:
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

    def on_event(self, payload: bytes) -> Told | SocketRequest | None:
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


class _Stream:
    """A connection with a `Feed`, and what has arrived ahead of the confirmation."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        chosen: Subscribe,
        keys: CurvePair | None,
        identity: bytes = b"",
        beat_s: float = BEAT_S,
    ) -> None:
        self._feed, self._context = Feed(chosen, beat_s), context
        self._ahead: list[Told] = []
        self._socket: Any
        self._handshakes: Handshakes[Any]
        self._socket, self._handshakes = connect(context, endpoint, keys, identity)

    @property
    def last(self) -> str:
        """Id of the newest event that was read."""
        return self._feed.last

    @property
    def newest(self) -> str:
        """Id of the daemon's newest event when it confirmed the subscription last."""
        return self._feed.newest

    def close(self) -> None:
        """End the subscription."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()


class SocketStream(_Stream, EventStream):
    """An `EventStream` of the query socket."""

    def __init__(
        self, endpoint: str, chosen: Subscribe, timeout_s: float, keys: CurvePair | None = None
    ) -> None:
        """Raises QueryError if the daemon refuses, or has not confirmed within ``timeout_s``."""
        super().__init__(zmq.Context(), endpoint, chosen, keys)
        self._poller = zmq.Poller()
        for each in (self._socket, self._handshakes.events):
            self._poller.register(each, zmq.POLLIN)
        try:
            until = time.monotonic() + timeout_s
            while not self._feed.confirmed:
                if (item := self._step(until)) is not None:
                    self._ahead.append(item)
                elif time.monotonic() >= until:
                    raise self._handshakes.no_reply(timeout_s)
        except BaseException:
            self.close()
            raise

    def get(self, timeout_s: float | None = None) -> Told:
        """The next event, or what was lost before it. Raises QueryError when the time is up."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ahead:
            if (item := self._step(until)) is not None:
                return item
            if until is not None and time.monotonic() >= until:
                raise QueryError("timeout", f"no event within {timeout_s:g} s")
        return self._ahead.pop(0)

    def _step(self, until: float | None) -> Told | None:
        now = time.monotonic()
        if (due := self._feed.due(now)) is not None:
            self._send(due)
        wait_s = self._feed.wait_s(now) if until is None else min(self._feed.wait_s(now), until - now)
        ready = dict(self._poller.poll(max(0, round(wait_s * 1000))))
        if self._handshakes.events in ready:
            self._handshakes.note(self._handshakes.events.recv_multipart())
            self._handshakes.check()
        if self._socket not in ready:
            return None
        found = self._feed.on_event(self._socket.recv())
        if isinstance(found, SubscriptionUpdate | LostMessage) or found is None:
            return found
        self._send(found)
        return None

    def _send(self, message: SocketRequest) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:  # nothing has gone out for long; the next heartbeat tells
            return


class AsyncSocketStream(_Stream, AsyncEventStream):
    """An `AsyncEventStream` of the query socket."""

    def __init__(
        self,
        endpoint: str,
        chosen: Subscribe,
        keys: CurvePair | None = None,
        *,
        identity: bytes = b"",
        beat_s: float = BEAT_S,
    ) -> None:
        """`begin` waits for the daemon. ``identity``: as an `AsyncQueryClient`'s. Raises QueryError.

        ``beat_s``: how often it looks whether the daemon still has the subscription.
        """
        super().__init__(zmq.asyncio.Context(), endpoint, chosen, keys, identity, beat_s)
        self._poller = zmq.asyncio.Poller()
        for each in (self._socket, self._handshakes.events):
            self._poller.register(each, zmq.POLLIN)

    async def begin(self, timeout_s: float) -> None:
        """Wait until the daemon has confirmed. Raises QueryError, after closing."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._feed.confirmed:
                    if (item := await self._step()) is not None:
                        self._ahead.append(item)
        except TimeoutError:
            self.close()
            raise self._handshakes.no_reply(timeout_s) from None
        except BaseException:
            self.close()
            raise

    async def get(self) -> Told:
        """See `AsyncEventStream`."""
        while not self._ahead:
            if (item := await self._step()) is not None:
                return item
        return self._ahead.pop(0)

    async def aclose(self) -> None:
        """See `AsyncEventStream`."""
        self.close()

    async def _step(self) -> Told | None:
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
