"""Events for clients that listen: answers and new data versions, numbered, with a bounded past.

Every client has a queue of its own, which holds references to shared events. One that reads too slowly loses
its own oldest events and learns how many; it delays no one else.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import msgspec

from daemon.api.limits import Quota
from daemon.api.messages import EventKind, LostReason, QueryError
from daemon.tenants import ALL, Client, Tenant
from feeds.codec import encode
from feeds.market_data import Answer, AnyMessage, DataUpdated, FlashReady
from metrics.store import MetricStore

KINDS: tuple[EventKind, ...] = get_args(EventKind)
Transport = Literal["sse", "websocket", "zeromq", "mcp"]
_ID = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,19})")
"""Of an event: the daemon's start, and the event's number since then."""
KEPT = 4096
"""Events that are kept for clients that come back, and most that wait for one client."""


class PublishedEvent:
    """One event. Its bytes are made when the first client gets it, and shared."""

    __slots__ = ("_json", "_msgpack", "_sse", "id", "kind", "message", "question", "session")

    def __init__(self, id_: str, kind: EventKind, message: Answer | DataUpdated | FlashReady) -> None:
        self.id, self.kind, self.message = id_, kind, message
        self.session = message.session
        self.question = message.question if isinstance(message, Answer) else ""
        self._json = self._sse = self._msgpack = b""

    @property
    def json(self) -> bytes:
        """The message, as sinks get it."""
        self._json = self._json or encode(self.message)
        return self._json

    @property
    def msgpack(self) -> bytes:
        """The message in msgpack."""
        self._msgpack = self._msgpack or encode(self.message, "msgpack")
        return self._msgpack

    @property
    def sse(self) -> bytes:
        """As server-sent events are written."""
        self._sse = self._sse or sse(self.kind, self.json, self.id)
        return self._sse


class Lost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client has missed; the members are those of `daemon.api.messages.LostMessage`."""

    events: int | Literal["unknown"]
    exact: bool
    reason: LostReason
    after: str = ""


class EventFilter(msgspec.Struct, frozen=True):
    """Which events a client gets; empty is all. A question selects among answers only."""

    sessions: frozenset[str] = frozenset()
    questions: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()

    def matches(self, event: PublishedEvent) -> bool:
        """Whether the client gets it."""
        return (
            (not self.sessions or event.session in self.sessions)
            and (not self.kinds or event.kind in self.kinds)
            and (not self.questions or event.kind != "answer" or event.question in self.questions)
        )


class News:
    """Whether there is something to take: an `asyncio.Event` for one waiter.

    It is set and waited for once for each event and client, and asyncio's takes 10 of the 38 us that an event
    then takes a client (`foretick bench query --part events`).
    """

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Whether `wait` returns at once."""
        return self._is_set

    def set(self) -> None:
        """Wake the waiter, now or when it comes."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Nothing more to take."""
        self._is_set = False

    async def wait(self) -> None:
        """Return once it is set."""
        if self._is_set:
            return
        assert self._waiter is None, "one waiter at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Subscription:
    """What waits for one client. ``news`` is set while there is something to take, or it is ``closed``.

    ``dismissed``: closed because the client's tenant has changed or its key is gone; it may come back.
    """

    def __init__(
        self, client: Client, chosen: EventFilter, transport: Transport, on: Subscriber | None = None
    ) -> None:
        self.client, self.chosen, self.transport, self.on = client, chosen, transport, on
        self.wanted = client.tenant, chosen
        self.news = News()
        self.closed = self.dismissed = False
        self._waiting: deque[PublishedEvent] = deque()
        self._missed: Lost | None = None
        self._dropped = 0

    def matches(self, event: PublishedEvent) -> bool:
        """Whether the client may see it, and wants it."""
        return self.client.tenant.sees(event.session) and self.chosen.matches(event)

    @property
    def selects(self) -> bool:
        """Whether anything is left out."""
        return self.chosen != EventFilter() or self.client.tenant.sessions != ALL

    def take(self) -> tuple[list[Lost], list[PublishedEvent]]:
        """What was lost since the last call, and what waits after it."""
        lost = [] if self._missed is None else [self._missed]
        if self._dropped:
            lost.append(Lost(self._dropped, True, "slow"))
        waiting = list(self._waiting)
        self._waiting.clear()
        self._missed, self._dropped = None, 0
        if not self.closed:
            self.news.clear()
        return lost, waiting

    def close(self, *, dismissed: bool = False) -> None:
        """Nothing more will come."""
        self.closed, self.dismissed = True, dismissed
        self.news.set()

    def begin(self, missed: Lost | None, waiting: Iterable[PublishedEvent]) -> None:
        """What a client that comes back has missed."""
        self._missed = missed
        self._waiting.extend(waiting)
        if missed is not None or self._waiting:
            self.news.set()

    def put(self, event: PublishedEvent, most: int) -> bool:
        """Append; returns whether nothing had to be dropped for it."""
        fits = len(self._waiting) < most
        if not fits:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self.news.set()
        return fits


class Subscriber(Protocol):
    """A connection that lasts, and whose client may lose its key meanwhile."""

    client: Client

    def dismiss(self) -> None:
        """Close it."""


@dataclass
class _Open:
    """A connection that lasts: whose it was when it was opened, and its subscriptions."""

    tenant: Tenant
    subscriptions: int = 0


class Events:
    """The daemon's events since its start. ``epoch``: names this start, ns since 1970."""

    def __init__(self, epoch: int, store: MetricStore, *, max_clients: int, kept: int = KEPT) -> None:
        self._epoch, self._store = f"{epoch:x}", store
        self._most = kept
        self._kept: deque[PublishedEvent] = deque(maxlen=kept)
        self._number = 0
        self._groups: dict[str, dict[tuple[Tenant, EventFilter], set[Subscription]]] = {}
        """By session, "" for all of them, and by what is wanted: so often is an event matched."""
        self._clients: dict[Transport, int] = dict.fromkeys(get_args(Transport), 0)
        self._share = Quota(max_clients, "clients", "listening")
        self._closed = False
        self.connections: dict[Subscriber, _Open] = {}
        """Those that last, with or without subscriptions. One without takes the place of one with one."""
        self._dropped = {kind: store.counter("foretick_events_dropped_total", transport=kind)
                         for kind in get_args(Transport)}  # fmt: skip

    @property
    def newest(self) -> str:
        """The id of the newest event: what comes after it is new to a client that knows it."""
        return f"{self._epoch}.{self._number}"

    def publish(self, message: AnyMessage) -> None:
        """Tell the clients that listen for it; DLQ records are not for them."""
        kind = str(message.__struct_config__.tag)
        if not isinstance(message, Answer | DataUpdated | FlashReady) or kind not in KINDS:
            return
        self._number += 1
        event = PublishedEvent(self.newest, kind, message)
        self._kept.append(event)
        for name in ("", event.session):
            for (tenant, chosen), clients in self._groups.get(name, {}).items():
                for client in clients if tenant.sees(event.session) and chosen.matches(event) else ():
                    if not client.put(event, self._most):
                        self._dropped[client.transport].inc()

    def connect(self, connection: Subscriber) -> None:
        """A WebSocket is there, and counts as a client that listens. Raises QueryError."""
        tenant = connection.client.tenant
        self._check(tenant)
        self.connections[connection] = _Open(tenant)
        self._enter(tenant, "websocket", 1)

    def disconnect(self, connection: Subscriber) -> None:
        """It is gone, and has unsubscribed before."""
        self._enter(self.connections.pop(connection).tenant, "websocket", -1)

    def subscribe(
        self,
        client: Client,
        chosen: EventFilter,
        transport: Transport,
        after: str = "",
        on: Subscriber | None = None,
    ) -> Subscription:
        """Events from now on, or from the one after ``after``. Raises QueryError where there is no room.

        What is no longer kept is said, as the first thing that the client gets; so is an ``after`` that is
        no event's id: refusing it would end a browser's stream for good. ``on``: a connection of
        `connect`, whose first subscription takes its place.
        """
        there = None if on is None else self.connections[on]
        tenant, new = (client.tenant, True) if there is None else (there.tenant, there.subscriptions > 0)
        if new or self._closed:
            self._check(tenant)
        made = Subscription(client, chosen, transport, on)
        if after:
            made.begin(*self._since(made, after))
        if there is not None:
            there.subscriptions += 1
        if new:
            self._enter(tenant, transport, 1)
        for name in chosen.sessions or ("",):
            self._groups.setdefault(name, {}).setdefault(made.wanted, set()).add(made)
        return made

    def unsubscribe(self, client: Subscription) -> None:
        """The client is gone."""
        for name in client.chosen.sessions or ("",):
            group = self._groups[name][client.wanted]
            group.discard(client)
            if not group:
                del self._groups[name][client.wanted]
            if not self._groups[name]:
                del self._groups[name]
        if client.on is None:
            self._enter(client.client.tenant, client.transport, -1)
            return
        there = self.connections[client.on]
        there.subscriptions -= 1
        if there.subscriptions:
            self._enter(there.tenant, client.transport, -1)

    def _check(self, tenant: Tenant) -> None:
        """Whether one more client may listen. Raises QueryError."""
        if self._closed:
            raise QueryError("shutting_down", "the daemon is stopping")
        self._share.check(tenant.name, max_each=tenant.max_listeners)

    def _enter(self, tenant: Tenant, transport: Transport, n: int) -> None:
        self._clients[transport] += n
        self._share.take(tenant.name, n)
        self._store.set("foretick_listeners", self._clients[transport], transport=transport)

    def dismiss(self, stays: Callable[[Client], bool]) -> None:
        """Close the subscriptions and connections of clients that do not stay."""
        for client in self._everyone():
            if not stays(client.client):
                client.close(dismissed=True)
        for connection in list(self.connections):
            if not stays(connection.client):
                connection.dismiss()

    def close(self) -> None:
        """The daemon stops: let every client go."""
        self._closed = True
        for client in self._everyone():
            client.close()

    def _everyone(self) -> Iterator[Subscription]:
        for groups in self._groups.values():
            for group in groups.values():
                yield from group

    def _since(self, made: Subscription, after: str) -> tuple[Lost | None, list[PublishedEvent]]:
        """What is gone and what is kept of the events after the one with this id."""
        found = _ID.fullmatch(after)
        epoch, number = (found[1], int(found[2])) if found else ("", 0)
        if found is None or (epoch == self._epoch and number > self._number):
            return Lost("unknown", False, "unknown_id", self.newest), []
        oldest = self._number - len(self._kept)
        begins = f"{self._epoch}.{oldest}"
        if epoch != self._epoch:
            return Lost("unknown", False, "restarted", begins), [e for e in self._kept if made.matches(e)]
        gone, skip = oldest - number, max(0, number - oldest)
        kept = [event for index, event in enumerate(self._kept) if index >= skip and made.matches(event)]
        return (Lost(gone, not made.selects, "expired", begins) if gone > 0 else None), kept


def sse(kind: str, data: bytes, id_: str = "") -> bytes:
    """One server-sent event; ``data`` without line breaks."""
    name = f"id: {id_}\nevent: {kind}\ndata: " if id_ else f"event: {kind}\ndata: "
    return name.encode() + data + b"\n\n"
