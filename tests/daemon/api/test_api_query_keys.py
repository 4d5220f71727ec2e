"""CURVE keys at the query socket: none, a wrong one, a right one, one that is removed, and other daemons."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import zmq

from daemon.api.auth import LOCAL_LABEL, Access, tenant_labels
from daemon.api.client import AsyncQueryClient, QueryClient
from daemon.api.events import Events
from daemon.api.messages import (
    Ask,
    AskReply,
    ClientRequest,
    ErrorReply,
    ListSessions,
    QueryError,
    Reply,
    SessionsReply,
    Subscribe,
)
from daemon.api.subscriptions import SubscriptionUpdate
from daemon.api.zmq import QueryServer
from daemon.config.tenants_file import TenantTable
from daemon.gateway.peers import Peers
from daemon.supervision import Tasks
from daemon.tenants import Client, Tenants
from feeds.curve import Keys
from feeds.market_data import FlashReady
from metrics.catalogue import OTHER
from metrics.store import MetricStore
from tests.kit import until
from tests.kit.fakes import awaited
from tests.kit.gateway import queries

PUBLIC, SECRET = zmq.curve_keypair()
DAEMON = Keys(PUBLIC, SECRET, PUBLIC)


def keys() -> Keys:
    return Keys(*zmq.curve_keypair(), server=PUBLIC)


DESK, RISK, STRANGER = keys(), keys(), keys()
TABLES = (
    TenantTable("desk", sessions=("*",), curve_keys=(DESK.public.decode(),), requests_per_second=2),
    TenantTable("risk", sessions=("*",), curve_keys=(RISK.public.decode(),)),
)


SEER = keys()
SEES = TenantTable("seer", sessions=("btc*",), curve_keys=(SEER.public.decode(),), max_listeners=1)


class Daemon:
    """A query socket that says in each reply who asked."""

    def __init__(self) -> None:
        self.tenants = Tenants((*TABLES, SEES), PUBLIC.decode())
        self.store = MetricStore.local({"tenant": tenant_labels(self.tenants)})
        self.access = Access(self.tenants, self.store, lambda: 0.0)
        self.clients: list[Client] = []
        self.owner = ""
        self.peers = Peers(5.0, DAEMON)
        self.queries = queries(
            lambda request, client: partial(self.answer, request, client, 0),
            owner=lambda session: self.owner or None,
            names=lambda: ("btc", "eth"),
            access=self.access,
            peers=self.peers,
        )
        self.events = Events(1, self.store, max_clients=10)
        self.server = QueryServer(
            self.queries.answer,
            "tcp://127.0.0.1:*",
            events=self.events,
            store=self.store,
            access=self.access,
            keys=DAEMON,
        )

    def publish(self, session: str) -> None:
        self.events.publish(FlashReady(session=session, data_version=1, as_of=0, answers=1))

    async def answer(self, request: ClientRequest, client: Client, since: int) -> Reply:
        self.clients.append(client)
        if isinstance(request, Ask):
            name = client.tenant.name
            return AskReply(id=request.id, session=request.session, data_version=1, text=name)
        return SessionsReply(request.id, ())

    def refusals(self, reason: str) -> float:
        return self.store.value("foretick_unauthenticated_total", reason=reason)

    def client(self, own: Keys | None, timeout_s: float = 60.0) -> AsyncQueryClient:
        return AsyncQueryClient(self.server.endpoint, timeout_s, keys=own)


@pytest.fixture
async def daemons() -> AsyncIterator[list[Daemon]]:
    made = [Daemon(), Daemon()]
    for each in made:
        await each.server.start(Tasks())
    yield made
    for each in made:
        await each.peers.stop()
        await each.server.stop()


async def test_the_key_says_whose_the_client_is(daemons: list[Daemon]) -> None:
    daemon = daemons[0]
    for own, name in ((DESK, "desk"), (RISK, "risk"), (DAEMON, "")):
        async with daemon.client(own) as client:
            reply = await client.request(Ask(1, "btc", "Up?"))
            assert isinstance(reply, AskReply)
            assert reply.text == name
    assert daemon.refusals("unknown") == daemon.refusals("missing") == 0


def asked(endpoint: str, own: Keys | None, timeout_s: float = 20.0) -> None:
    """By the client that blocks."""
    with QueryClient(endpoint, timeout_s, keys=own) as client:
        client.sessions()


def subscribed(endpoint: str, own: Keys | None, timeout_s: float = 20.0) -> None:
    with QueryClient(endpoint, timeout_s, keys=own) as client, client.subscribe():
        pass


@pytest.mark.parametrize(
    ("own", "reason", "told"), [(None, "missing", "asks for keys"), (STRANGER, "unknown", "does not know")]
)
async def test_without_a_known_key_nothing_is_answered_and_the_attempt_counted(
    daemons: list[Daemon], own: Keys | None, reason: str, told: str
) -> None:
    daemon = daemons[0]
    async with daemon.client(own) as client:
        for _ in "once", "again":
            with pytest.raises(QueryError, match=told) as refused:
                await client.request(ListSessions(1))
            assert refused.value.code == "unauthenticated"
        with pytest.raises(QueryError, match=told):
            await client.subscribe()
        await until(lambda: daemon.refusals(reason) >= 1)
    for use in asked, subscribed:
        with pytest.raises(QueryError, match=told):
            await asyncio.to_thread(use, daemon.server.endpoint, own)
    assert not daemon.clients
    assert daemon.refusals({"missing": "unknown", "unknown": "missing"}[reason]) == 0


async def test_a_refusal_that_comes_before_the_first_request_is_not_missed(
    daemons: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a program takes between connecting and asking, as on a busy machine."""
    connects = zmq.Socket.connect

    def slowly(socket: zmq.Socket, address: str) -> None:
        connects(socket, address)
        if address.startswith("tcp:"):
            time.sleep(0.3)

    monkeypatch.setattr(zmq.Socket, "connect", slowly)
    endpoint = daemons[0].server.endpoint
    for use in asked, subscribed:
        with pytest.raises(QueryError, match="asks for keys"):
            await asyncio.to_thread(use, endpoint, None)
    client = await asyncio.to_thread(AsyncQueryClient, endpoint)  # while the daemon's loop runs
    async with client:
        with pytest.raises(QueryError, match="asks for keys"):
            await client.sessions()


async def test_a_stream_ends_when_its_daemon_comes_back_with_other_keys(daemons: list[Daemon]) -> None:
    daemon = daemons[0]
    client = daemon.client(SEER)
    async with client, await client.subscribe() as stream:
        await daemon.server.stop()
        daemon.tenants.replace(TABLES)
        again = QueryServer(
            daemon.queries.answer,
            daemon.server.endpoint,
            events=daemon.events,
            access=daemon.access,
            keys=DAEMON,
        )
        await again.start(Tasks())
        with pytest.raises(QueryError, match="does not know"):
            await asyncio.wait_for(anext(stream), 60)
        await again.stop()


async def test_keys_that_no_daemon_asks_for_are_refused() -> None:
    store = MetricStore.local({"tenant": [LOCAL_LABEL, OTHER]})
    plain = QueryServer(
        queries(lambda request, client: partial(asyncio.sleep, 0)).answer,
        "tcp://127.0.0.1:*",
        events=Events(1, store, max_clients=1),
        store=store,
        access=Access(None, store),
    )
    await plain.start(Tasks())
    try:
        for use in asked, subscribed:
            with pytest.raises(QueryError, match="takes no keys"):
                await asyncio.to_thread(use, plain.endpoint, DESK)
    finally:
        await plain.stop()


async def test_a_server_key_that_is_not_the_daemon_s_is_suspected(daemons: list[Daemon]) -> None:
    """The client cannot know: what the daemon cannot decrypt it answers by closing the connection."""
    for use in asked, subscribed:
        with pytest.raises(QueryError, match="the server key") as refused:
            await asyncio.to_thread(use, daemons[0].server.endpoint, Keys(*zmq.curve_keypair(), SECRET), 1.0)
        assert refused.value.code == "timeout"


async def test_a_key_that_is_removed_is_refused_on_its_connection_and_one_that_is_added_gets_in(
    daemons: list[Daemon],
) -> None:
    daemon = daemons[0]
    async with daemon.client(RISK) as client:
        await client.request(ListSessions(1))
        late = TenantTable("late", curve_keys=(STRANGER.public.decode(),))
        daemon.tenants.replace((TABLES[0], late))
        reply = await client.request(ListSessions(2))
        assert isinstance(reply, ErrorReply)
        assert (reply.code, daemon.refusals("unknown")) == ("unauthenticated", 1)
    async with daemon.client(STRANGER) as client:
        await client.request(ListSessions(3))
    assert daemon.clients[-1].tenant.name == "late"


async def test_too_many_requests_are_told_when_to_come_back(daemons: list[Daemon]) -> None:
    async with daemons[0].client(DESK) as client:
        replies = [await client.request(ListSessions(n)) for n in range(3)]
    assert isinstance(replies[-1], ErrorReply)
    assert (replies[-1].code, replies[-1].retry_after_s) == ("busy", 0.5)


async def test_another_daemon_asks_for_the_tenant_and_no_client_can_pretend_to(daemons: list[Daemon]) -> None:
    first, second = daemons
    first.owner = second.server.endpoint
    async with first.client(DESK) as client:
        reply = await client.request(Ask(1, "btc", "Up?"))
        assert isinstance(reply, AskReply)
        assert reply.text == "desk"
    assert (second.clients[0].tenant.name, second.clients[0].forwarded) == ("desk", True)
    # its name begins like a daemon's, its key is a tenant's
    pretender = AsyncQueryClient(second.server.endpoint, 60.0, identity=b"foretick-forward/risk/1", keys=DESK)
    async with pretender as client:
        reply = await client.request(Ask(1, "btc", "Up?"))
    assert isinstance(reply, ErrorReply)
    assert (reply.code, len(second.clients)) == ("bad_request", 1)
    # a daemon names a tenant that is not in the other's file
    second.tenants.replace(TABLES[1:])
    async with first.client(DESK) as client:
        refused = await client.request(Ask(1, "btc", "Up?"))
    assert isinstance(refused, ErrorReply)
    assert refused.code == "unauthenticated"


async def test_a_subscription_has_events_of_the_tenants_sessions_until_its_key_is_gone(
    daemons: list[Daemon],
) -> None:
    daemon = daemons[0]
    client = daemon.client(SEER)
    async with client, await client.subscribe() as stream:
        with pytest.raises(QueryError, match="of this tenant"):
            await client.subscribe()
        for session in ("eth", "btc1"):
            daemon.publish(session)
        item = await asyncio.wait_for(anext(stream), 60)
        assert isinstance(item, SubscriptionUpdate)
        assert item.message.session == "btc1"
        daemon.tenants.replace(TABLES)
        daemon.events.dismiss(daemon.access.holds)
        stream._feed._next = 0.0  # the next heartbeat
        with pytest.raises(QueryError, match="key is not known"):
            await asyncio.wait_for(anext(stream), 20)
    assert daemon.store.value("foretick_listeners", transport="zeromq") == 0


@pytest.mark.parametrize("asked", [ListSessions(1), Ask(1, "btc", "Up?"), Subscribe(1)])
async def test_a_connection_with_a_name_of_its_own_is_refused(daemons: list[Daemon], asked) -> None:
    """Whoever took the name after it would get its replies and events."""
    daemon = daemons[0]
    async with AsyncQueryClient(daemon.server.endpoint, 60.0, identity=b"mine", keys=RISK) as client:
        reply = await client.request(asked)
    assert isinstance(reply, ErrorReply)
    assert (reply.code, "name of its own" in reply.message) == ("bad_request", True)
    assert daemon.store.value("foretick_query_refused_total", reason="bad_request") == 1
    assert not daemon.clients


async def test_the_socket_closes_and_binds_again(daemons: list[Daemon]) -> None:
    daemon = daemons[0]
    endpoint = daemon.server.endpoint
    await daemon.server.stop()
    again = QueryServer(awaited(daemon.answer), endpoint, access=daemon.access, keys=DAEMON)
    await again.start(Tasks())
    with pytest.raises(OSError, match="cannot bind"):
        await asyncio.wait_for(QueryServer(awaited(daemon.answer), endpoint, keys=DAEMON).start(Tasks()), 20)
    async with AsyncQueryClient(endpoint, 60.0, keys=RISK) as client:
        await asyncio.wait_for(client.request(ListSessions(1)), 60)
    await again.stop()
