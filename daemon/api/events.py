"""Events for clients that listen: answers and new data versions, numbered, with a bounded past.

Each daemon numbers its own. Those of the group's other daemons, where they are followed, keep their numbers:
an event's id, which has the newest number of each daemon, means the same at all of them.

Every client has a queue of its own, which holds references to shared events. One that reads too slowly loses
its own oldest events and learns how many; it delays no one else.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol, get_args

import msgspec

from daemon.api.limits import Quota
from daemon.api.messages import EventData, EventKind, LostReason, QueryError
from daemon.tenants import ALL, Client, Tenant
from feeds.codec import encode
from feeds.market_data import Answer, AnyMessage, DataUpdated, FlashReady, Signal
from metrics.store import MetricStore

KINDS: tuple[EventKind, ...] = get_args(EventKind)
Transport = Literal["sse", "websocket", "zeromq", "mcp"]
_PART = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,19})")
"""Of an id: the start of a daemon, and the number of an event since then."""
KEPT = 4096
"""Events of a daemon that are kept for clients that come back, and most that wait for one client."""
DAEMON_LIMIT, _GONE_DAEMONS = 64, 4
"""In an id; and how many that are not followed any more are still known."""
Positions = Mapping[str, int]
"""Numbers of events, by the start of their daemon."""
Reached = Mapping[str, tuple[int, int]]
"""By session, epoch and data version of its newest event."""
_NOWHERE = (1 << 63, 0)


def positions_of(id_: str) -> dict[str, int] | None:
    """What an event's id says; None for what is no id."""
    found = [_PART.fullmatch(part) for part in id_.split(",", DAEMON_LIMIT)]
    return None if None in found else {part[1]: int(part[2]) for part in found if part is not None}


def id_of(positions: Positions) -> str:
    """The id that says this."""
    return ",".join([f"{start}.{number}" for start, number in positions.items()])


class PublishedEvent:
    """One event, by the ``start`` of its daemon and its ``number`` there; ``order``: of its arrival here.

    Its bytes are made when the first client gets it, and shared.
    """

    __slots__ = (
        *("_json", "_msgpack", "_sse", "also", "id", "kind", "message", "number", "order", "question"),
        *("session", "start"),
    )

    def __init__(self, start: str, number: int, message: EventData, id_: str = "", order: int = 0) -> None:
        self.start, self.number, self.message, self.id, self.order = start, number, message, id_, order
        self.kind: EventKind = message.__struct_config__.tag  # type: ignore[assignment]  # one of them
        self.session = message.session
        self.question = message.question if isinstance(message, Answer) else ""
        self.also = [each.session for each in message.answers] if isinstance(message, Signal) else []
        self._json = self._sse = self._msgpack = b""

    def is_seen_by(self, tenant: Tenant) -> bool:
        """Whether the tenant sees all sessions that it tells of."""
        return tenant.sees(self.session) and all(map(tenant.sees, self.also))

    @property
    def identity(self) -> int:
        """Equal for what a session's next engine publishes again."""
        told = self.message
        if isinstance(told, Answer) and told.answer_id:
            return hash((told.answer_id, self.question))
        if isinstance(told, Signal):
            return hash(told.signal_id)
        return hash((told.session, self.kind, self.question, told.data_version, told.as_of))

    @property
    def own_id(self) -> str:
        """The id among its own daemon's events."""
        return id_of({self.start: self.number})

    def at(self, id_: str) -> PublishedEvent:
        """The same under another id."""
        if id_ == self.id:
            return self
        return PublishedEvent(self.start, self.number, self.message, id_, self.order)

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
        self.began_ns = time.time_ns()
        self.known: dict[str, int] | None = None
        """What a client that comes back has got, where it says that."""
        self.ahead: dict[str, int] = {}
        """The part of it that has not arrived at this daemon yet."""
        self._waiting: deque[PublishedEvent] = deque()
        self._missed: list[Lost] = []
        self._dropped = 0

    def expects(self, event: PublishedEvent, *, live: bool) -> bool:
        """Whether an event is new to the client, which matches it; ``live``: it is published now."""
        if self.known is None:
            return live or int(event.start, 16) > self.began_ns
        return event.number > self.known.get(event.start, 0)

    def matches(self, event: PublishedEvent) -> bool:
        """Whether the client may see it, and wants it."""
        return event.is_seen_by(self.client.tenant) and self.chosen.matches(event)

    @property
    def selects(self) -> bool:
        """Whether anything is left out."""
        return self.chosen != EventFilter() or self.client.tenant.sessions != ALL

    def take(self) -> tuple[list[Lost], list[PublishedEvent]]:
        """What was lost since the last call, and what waits after it."""
        lost = self._missed
        if self._dropped:
            lost.append(Lost(self._dropped, True, "slow"))
        waiting = list(self._waiting)
        self._waiting.clear()
        self._missed, self._dropped = [], 0
        if not self.closed:
            self.news.clear()
        return lost, waiting

    def close(self, *, dismissed: bool = False) -> None:
        """Nothing more will come."""
        self.closed, self.dismissed = True, dismissed
        self.news.set()

    def begin(self, known: dict[str, int], waiting: Iterable[PublishedEvent]) -> None:
        """A client comes back that has got all up to there; this is what it has not."""
        self.known = known
        self._waiting.extend(waiting)
        if self._waiting:
            self.news.set()

    def lose(self, lost: Lost) -> None:
        """Tell it, before all that waits."""
        self._missed.append(lost)
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


class _Daemon:
    """A daemon's events since a start of it: those that are kept, and the newest number that is known."""

    def __init__(self, kept: int, number: int = 0) -> None:
        self.number, self.got = number, 0
        self.kept: deque[PublishedEvent] = deque(maxlen=kept)

    @property
    def gone(self) -> int:
        """Number of the newest event that is not kept, nor will be."""
        return self.kept[0].number - 1 if self.kept else self.got


class Events:
    """The events of this daemon since its start, and of those that it follows.

    ``epoch``: its start, ns since 1970. ``in_group``: others may be followed. ``ended(start)``: number of the
    newest event that a daemon had published when it stored its progress; None where that is not known.
    """

    def __init__(
        self,
        epoch: int,
        store: MetricStore,
        *,
        max_clients: int,
        kept: int = KEPT,
        in_group: bool = False,
        ended: Callable[[str], int | None] = lambda start: None,
    ) -> None:
        self.start, self._store = f"{epoch:x}", store
        self._most, self.in_group, self._ended = kept, in_group, ended
        self._daemons = {self.start: _Daemon(kept)}
        self._arrived = 0
        self._seen: dict[int, tuple[str, int]] = {}
        """Of the newest events, the daemon and the epoch."""
        self._reached: dict[str, tuple[int, int]] = {}
        self._unsettled: dict[Subscription, dict[str, int]] = {}
        """Clients that came back with events of daemons that are not known yet."""
        self._groups: dict[str, dict[tuple[Tenant, EventFilter], set[Subscription]]] = {}
        """By session, "" for all of them, and by what is wanted: so often is an event matched."""
        self._clients: dict[Transport, int] = dict.fromkeys(get_args(Transport), 0)
        self._share = Quota(max_clients, "clients", "listening")
        self._closed = False
        self.listening = asyncio.Event()
        """Clients of this daemon listen."""
        self.connections: dict[Subscriber, _Open] = {}
        """Those that last, with or without subscriptions. One without takes the place of one with one."""
        self._dropped = {kind: store.counter("foretick_events_dropped_total", transport=kind)
                         for kind in get_args(Transport)}  # fmt: skip

    @property
    def newest(self) -> str:
        """The id of the newest event: what comes after it is new to a client that knows it."""
        return id_of({start: each.number for start, each in self._daemons.items()})

    @property
    def own(self) -> str:
        """The same of this daemon's own events, which other daemons follow."""
        return id_of({self.start: self._daemons[self.start].number})

    def publish(self, message: AnyMessage) -> None:
        """Tell the clients that listen of an event of this daemon; DLQ records are not for them."""
        if isinstance(message, Answer | Signal | DataUpdated | FlashReady):
            self._tell(PublishedEvent(self.start, self._daemons[self.start].number + 1, message), live=True)

    # Other daemons.

    def receive(self, start: str, number: int, message: EventData, before: Reached | None = None) -> None:
        """An event of a daemon that is followed; one that is known is skipped.

        ``before``: of one that was published before it was followed, how far sessions were known then. It
        is news for those who listen only where its session has moved there meanwhile.
        """
        there = self._daemon(start)
        if number <= there.got:
            return
        for client, known in self._unsettled.items() if not there.got else ():
            if (gone := number - 1 - known.get(start, number)) > 0:
                client.lose(Lost(gone, False, "expired"))
        if there.got and (gone := number - 1 - there.got) > 0:
            there.kept.clear()
            self._count("lost", gone)
            if before is None:
                self.lose(Lost(gone, False, "expired"))
        stood = (message.epoch, message.data_version)
        live = before is None or stood > before.get(message.session, _NOWHERE)
        self._tell(PublishedEvent(start, number, message), live=live)

    def reached(self) -> Reached:
        """How far sessions are known."""
        return dict(self._reached)

    def lose(self, lost: Lost) -> None:
        """Tell the clients of this daemon."""
        for client in set(self._everyone()):
            if not client.client.forwarded:
                client.lose(lost)

    def settle(self, followed: Collection[str]) -> None:
        """These starts of daemons are followed, and all others that are known have ended."""
        for client, known in self._unsettled.items():
            ended = {start: number for start, number in known.items() if start not in followed}
            if (lost := self._missed(ended)) is not None:
                client.lose(lost)
        self._unsettled.clear()
        gone = [start for start in self._daemons if start not in (self.start, *followed)]
        for start in gone[:-_GONE_DAEMONS]:
            del self._daemons[start]

    def _daemon(self, start: str, number: int = 0) -> _Daemon:
        """What is known of a daemon; of a new one, all up to ``number``."""
        if start not in self._daemons:
            self._daemons[start] = _Daemon(self._most, number)
        return self._daemons[start]

    def _tell(self, event: PublishedEvent, *, live: bool) -> None:
        """Keep an event, and tell the clients that wait for it, unless they were told before."""
        message, there, identity = event.message, self._daemons[event.start], event.identity
        is_new = self._seen.get(identity) in (None, (event.start, message.epoch))
        if is_new or event.start != self.start:  # numbers of own events have no gaps
            there.got, there.number = event.number, max(there.number, event.number)
        if not is_new:
            self._count("repeated")
            return
        if event.start != self.start:
            self._count("passed")
        self._seen[identity] = event.start, message.epoch
        if len(self._seen) > 2 * self._most:
            del self._seen[next(iter(self._seen))]
        stood = message.epoch, message.data_version
        self._reached[event.session] = max(stood, self._reached.get(event.session, stood))
        self._arrived += 1
        event.id, event.order = self.newest, self._arrived
        there.kept.append(event)
        for name in ("", event.session):
            for (tenant, chosen), clients in self._groups.get(name, {}).items():
                for client in clients if event.is_seen_by(tenant) and chosen.matches(event) else ():
                    is_own = event.start == self.start or not client.client.forwarded
                    if is_own and client.expects(event, live=live):
                        told = event.at(self._id_for(client)) if client.ahead else event
                        if not client.put(told, self._most):
                            self._dropped[client.transport].inc()

    def _id_for(self, client: Subscription) -> str:
        """The id of the newest event, for a client that has got what has not arrived here yet."""
        here = {start: each.number for start, each in self._daemons.items()}
        client.ahead = {start: n for start, n in client.ahead.items() if n > here.get(start, 0)}
        return id_of(here | client.ahead)

    def _count(self, outcome: str, events: int = 1) -> None:
        self._store.inc("foretick_peer_events_total", events, outcome=outcome)

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
            self._go_on(made, after)
        if there is not None:
            there.subscriptions += 1
        if new:
            self._enter(tenant, transport, 1)
        for name in chosen.sessions or ("",):
            self._groups.setdefault(name, {}).setdefault(made.wanted, set()).add(made)
        if not client.forwarded:
            self.listening.set()
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
        self._unsettled.pop(client, None)
        if all(each.client.forwarded for each in self._everyone()):
            self.listening.clear()
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

    def _go_on(self, made: Subscription, after: str) -> None:
        """Give a client what is kept of the events after the one with this id, and say what is not."""
        forwarded, own = made.client.forwarded, self._daemons[self.start]
        known = positions_of(after)
        if known is None or known.get(self.start, 0) > own.number:
            made.lose(Lost("unknown", False, "unknown_id", self.own if forwarded else self.newest))
            return
        others = {} if forwarded else {start: each for start, each in self._daemons.items() if each.got}
        daemons = {self.start: own} | others
        unknown = {start: number for start, number in known.items() if start not in daemons}
        begins = {start: max(known.get(start, 0), each.gone) for start, each in daemons.items()}
        gone = sum(number - known.get(start, 0) for start, number in begins.items())
        pending = unknown if self.in_group and not forwarded else {}
        exact = not made.selects and len(daemons) == 1
        if (lost := self._missed({} if pending else unknown, gone, exact=exact)) is not None:
            made.lose(msgspec.structs.replace(lost, after=id_of(begins | pending)))
        arrived = {start: each.number for start, each in daemons.items()}
        made.ahead = {s: n for s, n in known.items() if s in pending or n > arrived.get(s, n)}
        if pending:
            self._unsettled[made] = pending
            for start, number in pending.items():
                if len(self._daemons) < DAEMON_LIMIT:
                    there = self._daemon(start, number)
                    there.number = max(there.got, min(there.number, number))
        kept = sorted((event for each in daemons.values() for event in each.kept), key=attrgetter("order"))
        made.begin(known, list(self._replayed(made, kept, begins | pending)))

    def _missed(self, ended: Positions, gone: int = 0, *, exact: bool = False) -> Lost | None:
        """What is missing behind these events of daemons that have ended, and ``gone`` ones of others."""
        ends = [(self._ended(start), number) for start, number in ended.items()]
        if any(end is None for end, _ in ends):
            return Lost("unknown", False, "restarted")
        unseen = sum(max(0, (end or 0) - number) for end, number in ends)
        if unseen:
            return Lost(gone + unseen, False, "restarted")
        return Lost(gone, exact, "expired") if gone else None

    def _replayed(
        self, made: Subscription, kept: Iterable[PublishedEvent], begins: dict[str, int]
    ) -> Iterator[PublishedEvent]:
        """Those behind ``begins`` that the client wants, under ids that say what it has then."""
        for event in kept:
            if event.number > begins[event.start]:
                begins[event.start] = event.number
                if made.matches(event):
                    yield event.at(id_of(begins))


def sse(kind: str, data: bytes, id_: str = "") -> bytes:
    """One server-sent event; ``data`` without line breaks."""
    name = f"id: {id_}\nevent: {kind}\ndata: " if id_ else f"event: {kind}\ndata: "
    return name.encode() + data + b"\n\n"
