"""The query socket: a ZeroMQ ROUTER that answers each request as its own task, so none waits for another.

Nothing is ever sent by waiting for a client: one that does not read loses its own events and, in the end, its
own replies. Subscriptions end when their client is gone, or was silent for a while.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import count

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.events import EventFilter, Events, Subscription
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
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client
from feeds.curve import Keys
from feeds.decoding import Undecodable
from metrics.catalogue import QueryRefusal
from metrics.store import MetricStore

log = logging.getLogger(__name__)

NAME, LEASES = "query socket", "query leases"
# libzmq closes the connection when a frame exceeds the limit by this much, without reading it into
# memory. Shorter ones get an error that says why.
_HARD_LIMIT_FACTOR = 4
_CLOSE_LINGER_MS = 500
_DOMAIN = "foretick"
_NO_CURVE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_FORWARDS = b"foretick-forward/"
"""How the names of connections between daemons begin: what comes over one is never forwarded again."""
_GIVEN_BY_US = b"\0"
"""How the name of a connection begins to which its client has given none; it can't be guessed."""
MAX_SUBSCRIPTIONS = 16
"""Of one connection."""
LEASE_S = 30.0
"""Subscriptions end so long after the last message of their client."""
_PATIENCE_S, _RETRY_S = 10.0, 0.02
"""How long a reply waits for a client that does not read, and how often it is tried."""
_PINGED_MS, _GONE_MS = 5_000, 15_000
"""libzmq pings idle connections, and closes those without an answer."""
_AT_ONCE = 64
"""Messages that are taken, or events that are sent, before other work gets its turn."""

Answering = Reply | Callable[[], Awaitable[Reply]]
"""A reply that is there, or what to await for it."""
AnswerQuery = Callable[[ClientRequest, Client, int], Answering]
"""``answer(request, client, since)``; see `daemon.gateway.queries`."""
Route = Sequence[bytes]
"""The peer's identity, then REQ's empty delimiter if any; what is sent back begins with both."""
Observe = Callable[[ClientRequest, Reply, int], None]
_ControlRequest = (
    messages.Hello | messages.Heartbeat | messages.Cancel | messages.Subscribe | messages.Unsubscribe
)


@dataclass(eq=False)
class _Peer:
    """What one connection has under way, by the ids of its requests. ``last_seen``: monotonic seconds.

    ``sending``: replies that wait for it to read.
    """

    last_seen: float
    client: Client
    route: Route
    sending: int = 0
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    subscriptions: dict[int, tuple[Subscription, asyncio.Task[None]]] = field(default_factory=dict)


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


class _Admitting:
    """ZAP's question whether a public key may connect."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def callback(self, domain: str, key: bytes) -> bool:
        """As pyzmq asks it. ``key``: Z85."""
        del domain
        known = self._access.tenants.holder(key.decode()) is not None
        if not known:
            self._access.refused("zeromq", "unknown")
        return known


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
        max_request_bytes: int = messages.MAX_REQUEST_BYTES,
        lease_s: float = LEASE_S,
        access: Access | None = None,
        keys: Keys | None = None,
        observe: Observe = lambda request, reply, latency_ns: None,
    ) -> None:
        """`observe(request, reply, latency_ns)`, per readable request. Without ``events`` none may subscribe.

        ``max_in_flight_each``: requests of one connection that are answered at a time. ``keys``: for CURVE.
        """
        self._answer = answer
        self._access, self._keys = access or Access(), keys
        self._authenticator: AsyncioAuthenticator | None = None
        self._watching: asyncio.Task[None] | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._asked_endpoint = endpoint
        self._store = store or MetricStore.local({})
        self._events = events or Events(0, self._store, max_clients=0)
        self._answering, self._max_each = Quota(max_in_flight, *REQUESTS), max_in_flight_each
        self._answered: set[asyncio.Task[None]] = set()
        self._max_request_bytes = max_request_bytes
        self._lease_s = lease_s
        self._observe = observe
        self._version = version("foretick")
        self._in_flight: set[asyncio.Task[None]] = set()
        self._peers: dict[bytes, _Peer] = {}
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
        if self._keys is not None:
            self._encrypt(self._socket, self._keys, self._context)
        # sending says when a client is gone or does not read, in place of dropping the message
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PINGED_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _GONE_MS)
        try:
            self._socket.bind(self._asked_endpoint)
        except zmq.ZMQError as error:
            await self._close()
            raise OSError(
                error.errno, f"cannot bind the query socket to {self._asked_endpoint}: {error.strerror}"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = tasks
        tasks.start(NAME, partial(self._receive, self._socket), restarts=True)
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
        if self._socket is None:
            return
        await self.drain(drain_s)
        for peer in list(self._peers.values()):
            self._end(peer, "shutting_down")
        await self._tasks.stop(NAME, LEASES)
        await self._close()

    def _encrypt(self, socket: zmq.asyncio.Socket, keys: Keys, context: zmq.asyncio.Context) -> None:
        """Ask for keys. A context has one authenticator, which must run before the socket is bound."""
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _Admitting(self._access))
        socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
        socket.curve_server = True
        socket.zap_domain = _DOMAIN.encode()
        # a peer without CURVE does not get as far as the authenticator
        self._monitor = socket.get_monitor_socket(_NO_CURVE)
        self._watching = asyncio.create_task(self._watch(self._monitor), name=f"handshakes of the {NAME}")

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            self._access.refused("zeromq", "missing")

    async def _close(self) -> None:
        if self._socket is not None and self._context is not None:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
            if self._monitor is not None:
                # not by the task, which may never have begun; an open one would keep the context from ending
                self._monitor.close(0)
                self._socket.disable_monitor()
            self._socket.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            await asyncio.to_thread(self._context.term)
        self._socket = self._context = self._authenticator = self._watching = self._monitor = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        for number in count(1):
            if number % _AT_ONCE == 0:  # taking what has arrived gives no other task a turn
                await asyncio.sleep(0)
            arrived, user = await self._next(socket)
            since = time.monotonic_ns()
            route, payload = arrived[:-1], arrived[-1]
            asked = self._read(payload, len(arrived))
            known = self._peers.get(route[0])
            try:
                client = client_of(route[0], user, self._access)
                if known is not None and known.client.credential != client.credential:
                    known = None
                if known is not None:
                    known.last_seen = since / 1e9  # whatever becomes of its request
                self._access.request(client)
            except QueryError as error:
                if error.code == "bad_request":
                    self._refused("bad_request")
                self._send_now(route, error.reply(asked.id))
                continue
            found = self._begun(known, client, asked, since)
            if found is not None and self._sent(route, asked, found, since):
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

    async def _next(self, socket: zmq.asyncio.Socket) -> tuple[list[bytes], str]:
        """The next message, and the key that its connection has proven."""
        if self._keys is None:
            return await socket.recv_multipart(), ""
        frames: list[zmq.Frame] = await socket.recv_multipart(copy=False)
        try:
            user = str(frames[-1].get("User-Id"))
        except zmq.ZMQError:
            user = ""
        return [frame.bytes for frame in frames], user

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
            self._gone(peer)
            for task in peer.requests.values():
                task.cancel()
            del self._peers[route[0]]
            peer = None
        if peer is None:
            peer = self._peers[route[0]] = _Peer(now, client, route)
        peer.last_seen, peer.client, peer.route = now, client, route
        try:
            yield peer
        finally:
            self._forget_idle(peer)

    def _forget_idle(self, peer: _Peer) -> None:
        idle = not (peer.requests or peer.subscriptions or peer.sending)
        if idle and self._peers.get(peer.route[0]) is peer:
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

    def _begun(
        self, known: _Peer | None, client: Client, asked: messages.SocketRequest | ErrorReply, since: int
    ) -> Answering | None:
        """What a request is answered with; None for one that the daemon does not answer, or not now."""
        if isinstance(asked, ErrorReply | _ControlRequest) or self._stopping:
            return None
        if known is not None and asked.id in known.requests:
            return None
        return self._answer(asked, client, since)

    def _sent(
        self, route: Route, asked: messages.SocketRequest | ErrorReply, found: Answering, since: int
    ) -> bool:
        """Send a reply that is there. A task would begin only once the socket waits for the next message."""
        if callable(found) or isinstance(asked, ErrorReply | _ControlRequest):
            return False
        if not self._try(route, encode(found)):
            return False
        self._observe(asked, found, time.monotonic_ns() - since)
        return True

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
        reply = await self._reply(request, since, found)
        if reply is None:
            return
        try:
            payload = encode(reply)
        except Exception:
            log.exception("the reply to %s cannot be encoded", request)
            payload = encode(ErrorReply(request.id, "engine", "the reply cannot be encoded"))
        with self._sending(peer, client, request.id):
            sent = await self._send(route, payload, 0.0 if self._stopping else _PATIENCE_S)
        if not sent:
            self._store.inc("foretick_query_replies_dropped_total")

    async def _reply(self, request: ClientRequest, since: int, found: Answering) -> Reply | None:
        """The reply; None when the client has cancelled the request, and was told."""
        reply: Reply
        try:
            reply = await found() if callable(found) else found
        except asyncio.CancelledError:
            if not self._stopping:
                self._observe(request, _cancelled(request.id), time.monotonic_ns() - since)
                return None
            why = "the daemon stopped before the answer was ready"
            reply = ErrorReply(request.id, "shutting_down", why)
        self._observe(request, reply, time.monotonic_ns() - since)
        return reply

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
                return self._subscribe(peer, asked)
            case messages.Unsubscribe():
                found = peer.subscriptions.pop(asked.subscription, None)
                if found is None:
                    return ErrorReply(asked.id, "bad_request", f"no subscription {asked.subscription}")
                self._drop(*found)
                return messages.Unsubscribed(asked.id)

    def _hello(self, asked: messages.Hello) -> messages.HelloReply | ErrorReply:
        ours = messages.VERSION
        if asked.version != ours:
            self._refused("unsupported_version")
            why = f"the daemon speaks version {ours} of the protocol, not {asked.version}"
            return ErrorReply(asked.id, "unsupported_version", why)
        return messages.HelloReply(
            asked.id, ours, self._version, self._lease_s, self._max_each, self._max_request_bytes
        )

    def _cancel(self, peer: _Peer, asked: messages.Cancel) -> messages.CancelReply:
        task = peer.requests.pop(asked.request, None)
        if task is not None:
            # told here, since a task that has not begun does not learn that it was cancelled
            task.cancel()
            self._send_now(peer.route, _cancelled(asked.request))
        return messages.CancelReply(asked.id, asked.request, task is not None)

    def _subscribe(self, peer: _Peer, asked: messages.Subscribe) -> messages.Subscribed | ErrorReply:
        if asked.id in peer.subscriptions:
            return ErrorReply(asked.id, "bad_request", "there is a subscription with this id")
        if len(peer.subscriptions) >= MAX_SUBSCRIPTIONS:
            why = f"a connection has at most {MAX_SUBSCRIPTIONS} subscriptions"
            return ErrorReply(asked.id, "busy", why)
        chosen = EventFilter(frozenset(asked.sessions), frozenset(asked.questions), frozenset(asked.events))
        try:
            newest = self._events.newest
            subscription = self._events.subscribe(peer.client, chosen, "zeromq", asked.after)
        except QueryError as error:
            return error.reply(asked.id)
        pump = asyncio.create_task(self._pump(peer, asked.id, subscription))
        peer.subscriptions[asked.id] = subscription, pump
        return messages.Subscribed(asked.id, newest)

    # Events.

    async def _pump(self, peer: _Peer, number: int, subscription: Subscription) -> None:
        """Send events until the subscription or its client is gone."""
        route = peer.route
        while not subscription.closed:
            await subscription.news.wait()
            lost, waiting = subscription.take()
            for each in lost:
                told = messages.LostMessage(number, *msgspec.structs.astuple(each))
                if not await self._send(route, encode(told)):
                    self._gone(peer)
                    return
            for index, event in enumerate(waiting, 1):
                sent = messages.EventMessage(number, event.id, msgspec.Raw(event.msgpack))
                if not await self._send(route, encode(sent)):
                    self._gone(peer)
                    return
                if index % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        if subscription.dismissed:
            self._send_now(route, messages.Ended(number, "access"))
            self._events.unsubscribe(subscription)
            peer.subscriptions.pop(number, None)
            self._forget_idle(peer)

    def _drop(self, subscription: Subscription, pump: asyncio.Task[None]) -> None:
        self._events.unsubscribe(subscription)
        pump.cancel()

    def _gone(self, peer: _Peer) -> None:
        """The client closed its connection: forget what it has subscribed to."""
        subscriptions, peer.subscriptions = peer.subscriptions, {}
        for each in subscriptions.values():
            self._drop(*each)
        self._forget_idle(peer)

    def _end(self, peer: _Peer, reason: messages.EndReason) -> None:
        """End a connection's subscriptions, and tell it."""
        for number in peer.subscriptions:
            self._send_now(peer.route, messages.Ended(number, reason))
        self._gone(peer)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            oldest = time.monotonic() - self._lease_s
            for peer in list(self._peers.values()):
                if peer.subscriptions and peer.last_seen < oldest:
                    self._end(peer, "lease")

    # Sending.

    async def _send(self, route: Route, payload: bytes, patience_s: float | None = None) -> bool:
        """Send once there is room, for at most so long. Returns whether it was: the client may be gone."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while True:
            sent = self._try(route, payload)
            if sent is not None:
                return sent
            if until is not None and time.monotonic() >= until:
                return False
            await asyncio.sleep(_RETRY_S)

    def _send_now(self, route: Route, message: messages.SocketMessage) -> None:
        """Send if there is room."""
        if not self._try(route, encode(message)):
            self._store.inc("foretick_query_replies_dropped_total")

    def _try(self, route: Route, payload: bytes) -> bool | None:
        """Whether it was sent; None: there is no room, since the client does not read."""
        if self._socket is None:
            return False
        try:
            # done at once, as no sender ever waits: the future's result is an exception or nothing
            done = self._socket.send_multipart([*route, payload], zmq.NOBLOCK)
            assert isinstance(done, asyncio.Future)
            done.result()
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _refused(self, reason: QueryRefusal) -> None:
        self._store.inc("foretick_query_refused_total", reason=reason)


def _cancelled(request: int) -> ErrorReply:
    return ErrorReply(request, "cancelled", "the client gave the request up")
