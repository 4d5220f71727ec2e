"""The subscriptions to events of one connection, a ZeroMQ peer or a WebSocket."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from daemon.api.events import EventFilter, Events, Lost, PublishedEvent, Subscriber, Subscription, Transport
from daemon.api.messages import (
    Ended,
    ErrorReply,
    EventMessage,
    LostMessage,
    QueryError,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
)
from daemon.tenants import Client

_AT_ONCE = 64
"""Events that are sent before other work gets its turn."""

Pushed = LostMessage | EventMessage | Ended


class ConnectionEvents:
    """Subscribes, and sends what comes. Iterating gives the ids of the requests that have subscribed.

    ``send(message)``: whether the connection is still there. ``data``: an event in the connection's encoding.
    ``on``: the connection, where `Events` knows it, which then ends as a whole when its key is gone.
    ``most``: subscriptions that it may have.
    """

    def __init__(
        self,
        events: Events,
        transport: Transport,
        send: Callable[[Pushed], Awaitable[bool]],
        data: Callable[[PublishedEvent], bytes],
        on: Subscriber | None = None,
        most: int = 16,
    ) -> None:
        self._events, self._transport, self._send, self._data, self._on = events, transport, send, data, on
        self._most = most
        self._open: dict[int, tuple[Subscription, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def subscribe(self, asked: Subscribe, client: Client) -> Subscribed | ErrorReply:
        """Begin a subscription."""
        if asked.id in self._open:
            return ErrorReply(asked.id, "bad_request", "there is a subscription with this id")
        if len(self._open) >= self._most:
            return ErrorReply(asked.id, "busy", f"a connection has at most {self._most} subscriptions")
        chosen = EventFilter(frozenset(asked.sessions), frozenset(asked.questions), frozenset(asked.events))
        try:
            newest = self._events.own if client.forwarded else self._events.newest
            made = self._events.subscribe(client, chosen, self._transport, asked.after, self._on)
        except QueryError as error:
            return error.reply(asked.id)
        self._open[asked.id] = made, asyncio.create_task(self._pump(asked.id, made))
        return Subscribed(asked.id, newest)

    def unsubscribe(self, asked: Unsubscribe) -> Unsubscribed | ErrorReply:
        """End one."""
        if asked.subscription not in self._open:
            return ErrorReply(asked.id, "bad_request", f"no subscription {asked.subscription}")
        self._drop(asked.subscription)
        return Unsubscribed(asked.id)

    def close(self) -> None:
        """End all: the client is gone."""
        for number in list(self._open):
            self._drop(number)

    def _drop(self, number: int) -> None:
        subscription, pump = self._open.pop(number)
        self._events.unsubscribe(subscription)
        pump.cancel()

    async def _pump(self, number: int, subscription: Subscription) -> None:
        """Send events until the subscription or its client is gone."""
        while not subscription.closed:
            await subscription.news.wait()
            told = self._messages(number, *subscription.take(), forwarded=subscription.client.forwarded)
            for index, message in enumerate(told, 1):
                if not await self._send(message):
                    self.close()
                    return
                if index % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        if subscription.dismissed and self._on is None:
            del self._open[number]
            self._events.unsubscribe(subscription)
            await self._send(Ended(number, "access"))

    def _messages(
        self, number: int, lost: list[Lost], events: list[PublishedEvent], *, forwarded: bool
    ) -> Iterator[Pushed]:
        for each in lost:
            yield LostMessage(number, *msgspec.structs.astuple(each))
        for event in events:
            id_ = event.own_id if forwarded else event.id
            yield EventMessage(number, id_, msgspec.Raw(self._data(event)))
