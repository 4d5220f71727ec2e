"""The query socket: a ZeroMQ ROUTER that answers each request as its own task, so none waits for another.

Nothing is ever sent by waiting for a client: one that does not read loses its own events and, in the end, its
own replies. Subscriptions end when their client is gone, or was silent for a while.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import count

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.connection_events import ConnectionEvents, Pushed
from daemon.api.events import Events
from daemon.api.limits import REQUESTS, Quota
from daemon.api.messages import (
    ClientRequest,
    ErrorReply,
    QueryError,
    Reply,
    decode_request,
    encode,
    request_id,
)
from daemon.api.router_socket import Route, RouterSocket
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client
from feeds.curve import Keys
from feeds.decoding import Undecodable
from metrics.catalogue import QueryRefusal
from metrics.store import MetricStore

log = logging.getLogger(__name__)

NAME, LEASES = "query socket", "query leases"
_VERSION = version("foretick")
_FORWARDS = b"foretick-forward/"
"""How the names of connections between daemons begin: what comes over one is never forwarded again."""
_GIVEN_BY_US = b"\0"
"""How the name of a connection begins to which its client has given none; it can't be guessed."""
LEASE_S = 30.0
"""Subscriptions end so long after the last message of their client."""
_PATIENCE_S, _RETRY_S = 10.0, 0.02
"""How long a reply waits for a client that does not read, and how often it is tried."""
_AT_ONCE = 64
"""Messages that are taken before other work gets its turn."""

Answering = Reply | Callable[[], Awaitable[Reply]]
"""A reply that is there, or what to await for it."""
AnswerQuery = Callable[[ClientRequest, Client, int], Answering]
"""``answer(request, client, since)``; see `daemon.gateway.queries`."""
Observe = Callable[[ClientRequest, Reply, int], None]
_ControlRequest = (
    messages.Hello | messages.Heartbeat | messages.Cancel | messages.Subscribe | messages.Unsubscribe
)


@dataclass(eq=False)
class _Peer:
    """What one connection has under way, by the ids of its requests. ``last_seen``: monotonic seconds.

    ``sending``: replies that wait for it to read.
    """

    client: Client
    route: Route
    subscriptions: ConnectionEvents
    last_seen: float = 0.0
    sending: int = 0
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self.requests or self.subscriptions or self.sending)

    def seen(self, now: float, client: Client, route: Route) -> None:
        """Note that a message came from it."""
        self.last_seen, self.client, self.route = now, client, route


def forwarding_name(tenant: str) -> bytes:
    """The name of a connection between daemons of a group, over which one forwards a tenant's requests."""
    return b"%s%s/%s" % (_FORWARDS, tenant.encode(), secrets.token_hex(8).encode())


def client_of(route: bytes, user: str, access: Access) -> Client:
    """Who sent a message; limits count by its connection. Raises QueryError.

    ``route``: the connection's name; ``user``: the public key that its user has proven to hold.
    """
    behalf = None
    if route.startswith(_FORWARDS):
        behalf = route.removeprefix(_FORWARDS).partition(b"/")[0].decode(errors="replace")
    if not access.required:
        return Client(LOCAL, route.hex(), forwarded=behalf is not None)
    client = access.by_curve(user, route.hex(), behalf)
    if not (client.forwarded or route.startswith(_GIVEN_BY_US)):
        # its replies and events would go to whoever takes the name next
        raise QueryError(
            "bad_request", "a connection with a key must not have a name of its own (ROUTING_ID)"
        )
    return client


class QueryServer:
    """Serves one endpoint inside the running event loop."""

    def __init__(
        self,
        answer: AnswerQuery,
        endpoint: str,
        *,
        events: Events | None = None,
        store: MetricStore | None = None,
        max_in_flight: int = 256,
        max_in_flight_each: int = 128,
        max_subscriptions: int = 16,
        max_request_bytes: int = messages.MAX_REQUEST_BYTES,
        lease_s: float = LEASE_S,
        access: Access | None = None,
        keys: Keys | None = None,
        observe: Observe = lambda request, reply, latency_ns: None,
    ) -> None:
        """`observe(request, reply, latency_ns)`, per readable request. Without ``events`` none may subscribe.

        ``max_in_flight_each``, ``max_subscriptions``: requests of one connection that are answered at a time,
        and its subscriptions. ``keys``: for CURVE.
        """
        self._answer = answer
        self._access = access or Access()
        self._router = RouterSocket(endpoint, max_request_bytes, self._access, keys)
        self._store = store or MetricStore.local({})
        self._events = events or Events(0, self._store, max_clients=0)
        self._answering, self._max_each = Quota(max_in_flight, *REQUESTS), max_in_flight_each
        self._answered: set[asyncio.Task[None]] = set()
        self._max_request_bytes = max_request_bytes
        self._lease_s, self._max_subscriptions = lease_s, max_subscriptions
        self._observe = observe
        self._in_flight: set[asyncio.Task[None]] = set()
        self._peers: dict[bytes, _Peer] = {}
        self._stopping = False
        self._tasks = Tasks()

    @property
    def endpoint(self) -> str:
        """Where it is bound, with the real port in place of 0 or *."""
        return self._router.endpoint

    async def start(self, tasks: Tasks) -> None:
        """Bind, and serve as one of ``tasks``. Raises OSError when the address cannot be bound."""
        await self._router.bind()
        self._tasks = tasks
        tasks.start(NAME, self._receive, restarts=True)
        tasks.start(LEASES, self._watch_leases, restarts=True)

    async def drain(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds to finish, and refuse the rest.

        Subscriptions go on.
        """
        self._stopping = True
        if self._in_flight:
            _, late = await asyncio.wait(self._in_flight, timeout=drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def stop(self, drain_s: float = 0.0) -> None:
        """`drain`, end the subscriptions, and close."""
        await self.drain(drain_s)
        for peer in list(self._peers.values()):
            self._end(peer, "shutting_down")
        await self._tasks.stop(NAME, LEASES)
        await self._router.close()

    async def _receive(self) -> None:
        for number in count(1):
            if number % _AT_ONCE == 0:  # taking what has arrived gives no other task a turn
                await asyncio.sleep(0)
            arrived, user = await self._router.receive()
            since = time.monotonic_ns()
            route, payload = arrived[:-1], arrived[-1]
            asked = self._read(payload, len(arrived))
            known = self._peers.get(route[0])
            try:
                client = client_of(route[0], user, self._access)
                if known is not None and known.client.credential != client.credential:
                    known = None
                if known is not None:
                    known.seen(since / 1e9, client, route)  # whatever becomes of its request
                self._access.request(client)
            except QueryError as error:
                if error.code == "bad_request":
                    self._refused("bad_request")
                self._send_now(route, error.reply(asked.id))
                continue
            found: Answering | None = None
            underway = known is not None and asked.id in known.requests
            if not (isinstance(asked, ErrorReply | _ControlRequest) or self._stopping or underway):
                found = self._answer(asked, client, since)
                # a reply that is there needs no task, which would begin only once the socket waits
                if not callable(found) and self._router.send(route, encode(found)):
                    self._observe(asked, found, time.monotonic_ns() - since)
                    continue
            with self._peer(route, client, since / 1e9) as peer:
                if isinstance(asked, ErrorReply):
                    self._send_now(route, asked)
                elif isinstance(asked, _ControlRequest):
                    self._send_now(route, self._control(peer, asked))
                elif (refusal := self._refusal(peer, asked, since)) is not None:
                    self._send_now(route, refusal)
                else:
                    assert found is not None  # it is none of a request that is refused
                    task = asyncio.create_task(self._serve(peer, client, asked, since, found))
                    peer.requests[asked.id] = task
                    self._in_flight.add(task)
                    task.add_done_callback(partial(self._done, client))

    def _done(self, client: Client, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if task in self._answered:
            self._answered.discard(task)
        else:  # it was cancelled
            self._answering.leave(client.tenant.name)

    @contextmanager
    def _peer(self, route: Route, client: Client, now: float) -> Iterator[_Peer]:
        """The connection, which is forgotten when it has nothing under way.

        What was under way of another client, whose connection had this name before, is given up.
        """
        peer = self._peers.get(route[0])
        if peer is not None and peer.client.credential != client.credential:
            peer.subscriptions.close()
            for task in peer.requests.values():
                task.cancel()
            peer = None
        if peer is None:
            push = partial(self._push, route)
            subscriptions = ConnectionEvents(
                self._events,
                "zeromq",
                push,
                lambda event: event.msgpack,
                most=self._max_subscriptions,
            )
            peer = self._peers[route[0]] = _Peer(client, route, subscriptions)
        peer.seen(now, client, route)
        try:
            yield peer
        finally:
            self._forget_idle(peer)

    def _forget_idle(self, peer: _Peer) -> None:
        if peer.is_idle and self._peers.get(peer.route[0]) is peer:
            del self._peers[peer.route[0]]

    def _read(self, payload: bytes, frames: int) -> messages.SocketRequest | ErrorReply:
        """The request, or why it cannot be read."""
        if len(payload) > self._max_request_bytes:
            limit = self._max_request_bytes
            self._refused("too_long")
            return ErrorReply(None, "too_long", f"a request has at most {limit} bytes, not {len(payload)}")
        if frames > 3:
            self._refused("bad_request")
            return ErrorReply(None, "bad_request", f"a request is one frame, not {frames - 1}")
        try:
            return decode_request(payload)
        except Undecodable as error:
            self._refused("bad_request" if error.readable else "unreadable")
            return ErrorReply(request_id(payload), "bad_request", str(error))

    def _refusal(self, peer: _Peer, request: ClientRequest, since: int) -> ErrorReply | None:
        """Why a request is not answered; None if it is, and then it is in flight."""
        if request.id in peer.requests:
            # not observed: the request of this id is, when it ends
            self._refused("in_flight")
            return ErrorReply(request.id, "in_flight", f"request {request.id} is still being answered")
        reason: QueryRefusal = "busy"
        try:
            if self._stopping:
                reason = "shutting_down"
                raise QueryError("shutting_down", "the daemon is stopping")
            if len(peer.requests) + peer.sending >= self._max_each:
                reason = "busy_client"
                why = f"{self._max_each} requests are already being answered for this client"
                raise QueryError("busy", why)
            self._answering.enter(peer.client.tenant.name)
        except QueryError as error:
            self._refused(reason)
            refusal = error.reply(request.id)
            self._observe(request, refusal, time.monotonic_ns() - since)
            return refusal
        return None

    async def _serve(
        self, peer: _Peer, client: Client, request: ClientRequest, since: int, found: Answering
    ) -> None:
        route = peer.route
        reply: Reply
        try:
            reply = await found() if callable(found) else found
        except asyncio.CancelledError:
            if not self._stopping:  # the client has cancelled it, and was told
                self._observe(request, _cancelled(request.id), time.monotonic_ns() - since)
                return
            why = "the daemon stopped before the answer was ready"
            reply = ErrorReply(request.id, "shutting_down", why)
        self._observe(request, reply, time.monotonic_ns() - since)
        try:
            payload = encode(reply)
        except Exception:
            log.exception("the reply to %s cannot be encoded", request)
            payload = encode(ErrorReply(request.id, "engine", "the reply cannot be encoded"))
        with self._sending(peer, client, request.id):
            sent = await self._send(route, payload, 0.0 if self._stopping else _PATIENCE_S)
        if not sent:
            self._store.inc("foretick_query_replies_dropped_total")

    @contextmanager
    def _sending(self, peer: _Peer, client: Client, request: int) -> Iterator[None]:
        """The reply is there: until it is sent it counts against its own connection's limit only."""
        peer.requests.pop(request, None)
        peer.sending += 1
        self._answering.leave(client.tenant.name)
        if (task := asyncio.current_task()) is not None:
            self._answered.add(task)
        try:
            yield
        finally:
            peer.sending -= 1
            self._forget_idle(peer)

    # Requests that concern the connection itself.

    def _control(self, peer: _Peer, asked: _ControlRequest) -> messages.Control | ErrorReply:
        match asked:
            case messages.Hello():
                return self._hello(asked)
            case messages.Heartbeat():
                return messages.HeartbeatReply(asked.id, tuple(peer.subscriptions))
            case messages.Cancel():
                return self._cancel(peer, asked)
            case messages.Subscribe():
                return peer.subscriptions.subscribe(asked, peer.client)
            case messages.Unsubscribe():
                return peer.subscriptions.unsubscribe(asked)

    def _hello(self, asked: messages.Hello) -> messages.HelloReply | ErrorReply:
        ours = messages.VERSION
        if asked.version != ours:
            self._refused("unsupported_version")
            why = f"the daemon speaks version {ours} of the protocol, not {asked.version}"
            return ErrorReply(asked.id, "unsupported_version", why)
        return messages.HelloReply(
            asked.id, ours, _VERSION, self._lease_s, self._max_each, self._max_request_bytes
        )

    def _cancel(self, peer: _Peer, asked: messages.Cancel) -> messages.CancelReply:
        task = peer.requests.pop(asked.request, None)
        if task is not None:
            # told here, since a task that has not begun does not learn that it was cancelled
            task.cancel()
            self._send_now(peer.route, _cancelled(asked.request))
        return messages.CancelReply(asked.id, asked.request, task is not None)

    def _end(self, peer: _Peer, reason: messages.EndReason) -> None:
        """End a connection's subscriptions, and tell it."""
        for number in peer.subscriptions:
            self._send_now(peer.route, messages.Ended(number, reason))
        peer.subscriptions.close()
        self._forget_idle(peer)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            oldest = time.monotonic() - self._lease_s
            for peer in list(self._peers.values()):
                if peer.last_seen < oldest:
                    self._end(peer, "lease")
                else:
                    self._forget_idle(peer)  # its subscriptions may have ended by themselves

    # Sending.

    async def _send(self, route: Route, payload: bytes, patience_s: float | None = None) -> bool:
        """Send once there is room, for at most so long. Returns whether it was: the client may be gone."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while True:
            sent = self._router.send(route, payload)
            if sent is not None:
                return sent
            if until is not None and time.monotonic() >= until:
                return False
            await asyncio.sleep(_RETRY_S)

    def _send_now(self, route: Route, message: messages.SocketMessage) -> None:
        """Send if there is room."""
        if not self._router.send(route, encode(message)):
            self._store.inc("foretick_query_replies_dropped_total")

    async def _push(self, route: Route, message: Pushed) -> bool:
        return await self._send(route, encode(message))

    def _refused(self, reason: QueryRefusal) -> None:
        self._store.inc("foretick_query_refused_total", reason=reason)


def _cancelled(request: int) -> ErrorReply:
    return ErrorReply(request, "cancelled", "the client gave the request up")
