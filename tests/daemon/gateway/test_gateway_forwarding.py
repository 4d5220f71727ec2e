"""Requests about sessions of another daemon: forwarded once, or refused with its address."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
import zmq.asyncio

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import (
    MAX_REQUEST_BYTES,
    Ask,
    AskReply,
    ClientRequest,
    ErrorReply,
    ListSessions,
    QueryError,
    Reply,
    SessionsReply,
    decode_request,
)
from daemon.api.zmq import Answering, QueryServer
from daemon.gateway.peers import Peers
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client
from tests.kit import until
from tests.kit.gateway import queries

ASK = Ask(5, "btc", "Up?", choices=("Yes", "No"))
Owner = Callable[[str], str | None]


class Daemon:
    """Answers every ask with its own name, one named "slow" when released."""

    def __init__(self, name: str, owner: Owner, wait_s: float = 5.0, *, forwards: bool = True) -> None:
        self.name, self.release, self.given_up = name, asyncio.Event(), 0
        self.peers = Peers(wait_s)
        self.queries = queries(self.begin, wait_s, owner=owner, peers=self.peers, forwards=forwards)
        self.server = QueryServer(self.queries.answer, "tcp://127.0.0.1:*")

    def begin(self, request: ClientRequest, client: Client) -> Answering:
        return partial(self.reply, request)

    async def reply(self, request: ClientRequest) -> Reply:
        if isinstance(request, ListSessions):
            return SessionsReply(request.id, ())
        assert isinstance(request, Ask)
        if request.question == "slow":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return AskReply(id=request.id, session=request.session, data_version=3, text=self.name)


async def answered(daemon: Daemon, request: ClientRequest, client: Client) -> Reply:
    found = daemon.queries.answer(request, client, time.monotonic_ns())
    return await found() if callable(found) else found


@asynccontextmanager
async def running(*daemons: Daemon) -> AsyncIterator[None]:
    tasks = [Tasks() for _ in daemons]
    for daemon, own in zip(daemons, tasks, strict=True):
        await daemon.server.start(own)
    try:
        yield
    finally:
        for daemon in daemons:
            await daemon.server.stop()
            await daemon.peers.stop()


async def test_a_request_reaches_the_owner_with_its_own_id_and_all_others_stay() -> None:
    owners: dict[str, str] = {}
    first, second = Daemon("first", owners.get), Daemon("second", lambda session: None)
    async with running(first, second), AsyncQueryClient(first.server.endpoint) as client:
        owners["btc"] = second.server.endpoint
        reply = await client.request(ASK)
        assert isinstance(reply, AskReply)
        assert (reply.text, reply.id) == ("second", ASK.id)
        own = await client.request(Ask(6, "eth", "Up?"))
        assert isinstance(own, AskReply)
        assert own.text == "first"
        assert await client.request(ListSessions(7)) == SessionsReply(7, ())


async def test_forwarded_requests_do_not_wait_for_each_other() -> None:
    second = Daemon("second", lambda session: None)
    first = Daemon("first", lambda session: second.server.endpoint)
    async with running(first, second), AsyncQueryClient(first.server.endpoint) as client:
        slow = asyncio.create_task(client.request(Ask(1, "btc", "slow")))
        quick = await client.request(ASK)
        assert isinstance(quick, AskReply)
        assert not slow.done()
        second.release.set()
        assert (await slow).id == 1


async def test_a_request_that_is_too_long_for_the_owner_fails_alone() -> None:
    """Just short enough as it came, too long with the defaults that its client left out."""
    owners: dict[str, str] = {}
    first, second = Daemon("first", owners.get), Daemon("second", lambda session: None)
    async with running(first, second):
        owners["btc"] = second.server.endpoint
        me = Client(LOCAL, "me")
        other = asyncio.create_task(answered(first, Ask(1, "btc", "slow"), me))
        choices = [f"{n:0250}" for n in range(1024)]
        given = {"type": "ask", "id": 2, "session": "btc", "question": "", "choices": choices}
        given["question"] = "x" * (MAX_REQUEST_BYTES - len(msgspec.msgpack.encode(given)) - 10)
        sent = msgspec.msgpack.encode(given)
        assert len(sent) < MAX_REQUEST_BYTES
        asked = decode_request(sent)
        assert isinstance(asked, Ask)
        refused = await answered(first, asked, me)
        assert isinstance(refused, ErrorReply)
        assert (refused.id, refused.code) == (2, "too_long")
        second.release.set()
        assert isinstance(await other, AskReply)


async def test_a_cancelled_request_is_given_up_by_its_owner() -> None:
    second = Daemon("second", lambda session: None)
    first = Daemon("first", lambda session: second.server.endpoint)
    async with running(first, second), AsyncQueryClient(first.server.endpoint) as client:
        slow = asyncio.create_task(client.request(Ask(1, "btc", "slow")))
        await client.request(ASK)
        slow.cancel()
        await until(lambda: second.given_up == 1)
        await asyncio.gather(slow, return_exceptions=True)


async def test_two_daemons_that_take_each_other_for_the_owner_refuse_instead_of_forwarding_for_ever() -> None:
    first = Daemon("first", lambda session: second.server.endpoint)
    second = Daemon("second", lambda session: first.server.endpoint)
    async with running(first, second), AsyncQueryClient(first.server.endpoint) as client:
        reply = await client.request(ASK)
        assert isinstance(reply, ErrorReply)
        assert (reply.id, reply.code, reply.address) == (ASK.id, "moved", first.server.endpoint)


@pytest.mark.parametrize(("address", "forwards"), [("", True), ("tcp://127.0.0.1:9", False)])
async def test_what_cannot_be_forwarded_is_refused_with_the_owners_address(
    address: str, forwards: bool
) -> None:
    first = Daemon("first", lambda session: address, forwards=forwards)
    async with running(first), AsyncQueryClient(first.server.endpoint) as client:
        reply = await client.request(ASK)
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.address) == ("moved", address)


async def test_an_owner_that_is_gone_is_an_error_that_names_it() -> None:
    first = Daemon("first", lambda session: "tcp://127.0.0.1:9", 0.2)
    async with running(first), AsyncQueryClient(first.server.endpoint) as client:
        reply = await client.request(ASK)
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.address) == ("timeout", "tcp://127.0.0.1:9")


async def test_a_forwarded_request_is_given_up_at_its_own_deadline() -> None:
    first = Daemon("first", lambda session: "tcp://127.0.0.1:9", 60.0)
    asked = msgspec.structs.replace(ASK, deadline_ms=50)
    async with asyncio.timeout(30):
        reply = await answered(first, asked, Client(LOCAL, "here"))
    await first.peers.stop()
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.address) == ("timeout", "tcp://127.0.0.1:9")


async def test_an_address_that_cannot_be_one_is_an_error_of_the_request() -> None:
    first = Daemon("first", lambda session: "nowhere")
    async with running(first), AsyncQueryClient(first.server.endpoint) as client:
        reply = await client.request(ASK)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "bad_request"
        assert (await client.request(ListSessions(8))).id == 8


async def test_a_closed_connection_fails_what_waits() -> None:
    first = Daemon("first", lambda session: None)
    async with running(first):
        client = AsyncQueryClient(first.server.endpoint)
        waiting = asyncio.create_task(client.request(Ask(1, "btc", "slow")))
        await client.request(ASK)
        await client.close()
        with pytest.raises(QueryError, match="closed"):
            await waiting


async def test_a_reply_that_is_no_message_fails_what_waits() -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with AsyncQueryClient(f"tcp://127.0.0.1:{port}") as client:
            waiting = asyncio.create_task(client.request(ASK))
            route, _ = await router.recv_multipart()
            await router.send_multipart([route, b"\xc1"])
            with pytest.raises(QueryError, match="not of this protocol"):
                await waiting
    finally:
        router.close()
        context.term()


async def test_what_is_ready_here_is_given_at_once_and_what_is_elsewhere_is_not() -> None:
    owners: dict[str, str] = {}
    ready = AskReply(id=5, session="btc", data_version=3, text="ready", logit_gap=1.0, cached=True)
    here = Client(LOCAL, "client")
    asked = queries(lambda *_: ready, owner=owners.get)
    found = asked.answer(ASK, here, time.monotonic_ns())
    assert isinstance(found, AskReply)
    assert found.text == "ready"
    owners["btc"] = "tcp://127.0.0.1:9"
    assert callable(asked.answer(ASK, here, 0))
    owners["btc"] = ""
    assert isinstance(asked.answer(ASK, here, 0), ErrorReply)
