"""Requests about sessions of another daemon: forwarded once, or refused with its address."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from msgspec.structs import replace

from daemon.api.client import AsyncQueryClient
from daemon.api.generation import Begun, Delta, Event, Finished, Generate, Turn
from daemon.api.messages import (
    MAX_REQUEST_BYTES,
    Answers,
    AnswersReply,
    Ask,
    AskReply,
    ClientRequest,
    ErrorReply,
    GenerateElsewhere,
    KeptAnswers,
    ListSessions,
    QueryError,
    Reply,
    SessionInfo,
    SessionsReply,
    SetQuestion,
    decode_request,
)
from daemon.api.zmq import Answering, QueryServer, forwarding_name
from daemon.gateway import peers as peers_module
from daemon.gateway import queries as module
from daemon.gateway.group_generator import GroupGenerator, generated_here
from daemon.gateway.peers import Peers
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client
from feeds.market_data import Answer
from metrics.store import MetricStore
from tests.daemon.api.generator import FakeGenerator
from tests.kit import until
from tests.kit.engine_events import ANSWER
from tests.kit.gateway import queries

ASK = Ask(5, "btc", "Up?", choices=("Yes", "No"))
Owner = Callable[[str], str | None]


class Daemon:
    """Answers every ask with its own name, one named "slow" when released.

    It knows ``sessions``, whose symbol is its name.
    """

    def __init__(
        self, name: str, owner: Owner, wait_s: float = 5.0, *, forwards: bool = True, sessions: str = ""
    ) -> None:
        self.name, self.release, self.given_up = name, asyncio.Event(), 0
        self.sessions, self.listed = sessions, 0
        self.answers: list[Answer] = []
        self.former: dict[str, str] = {}
        self.store, self.generator = MetricStore.local({}), FakeGenerator()
        self.peers = Peers(wait_s, store=self.store)
        self.queries = queries(
            self.begin,
            wait_s,
            owner=owner,
            peers=self.peers,
            forwards=forwards,
            address=lambda: self.server.endpoint,
            former=lambda session: self.former.get(session, ""),
        )
        self.server = QueryServer(self.queries.answer, "tcp://127.0.0.1:*")

    def outcomes(self, outcome: str) -> int:
        return int(self.store.value("foretick_peer_requests_total", outcome=outcome))

    def begin(self, request: ClientRequest, client: Client) -> Answering:
        if isinstance(request, KeptAnswers):
            return AnswersReply(request.id, request.session, tuple(self.answers))
        if isinstance(request, GenerateElsewhere):
            return partial(generated_here, self.generator, request, client)
        return partial(self.reply, request)

    async def reply(self, request: ClientRequest) -> Reply:
        if isinstance(request, ListSessions):
            self.listed += 1
            members = dict.fromkeys(
                ("data_version", "live_tokens", "live_records", "as_of", "staleness_ns"), 0
            )
            return SessionsReply(
                request.id,
                tuple(SessionInfo(name=s, symbol=self.name, questions=(), **members) for s in self.sessions),
            )
        if isinstance(request, Answers):
            return AnswersReply(request.id, request.session, ())
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
        given = {
            "type": "set_question",
            "id": 2,
            "session": "btc",
            "name": "q",
            "text": "",
            "choices": choices,
        }
        given["text"] = "x" * (MAX_REQUEST_BYTES - len(msgspec.msgpack.encode(given)) - 10)
        sent = msgspec.msgpack.encode(given)
        assert len(sent) < MAX_REQUEST_BYTES
        asked = decode_request(sent)
        assert isinstance(asked, SetQuestion)
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
    first = Daemon("first", lambda session: second.server.endpoint, 0.3)
    second = Daemon("second", lambda session: first.server.endpoint)
    async with running(first, second), AsyncQueryClient(first.server.endpoint) as client:
        reply = await client.request(ASK)
        assert second.outcomes("moved") == 0  # it has asked none
        assert isinstance(reply, ErrorReply)
        assert (reply.id, reply.code, reply.address) == (ASK.id, "moved", first.server.endpoint)


@pytest.mark.parametrize(("address", "forwards"), [("", True), ("tcp://127.0.0.1:9", False)])
async def test_what_cannot_be_forwarded_is_refused_with_the_owners_address(
    address: str, forwards: bool
) -> None:
    first = Daemon("first", lambda session: address, 0.3, forwards=forwards)
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
    refuses = queries(lambda *_: ready, owner=owners.get, forwards=False)
    assert isinstance(refuses.answer(ASK, here, 0), ErrorReply)


# A session that moves.


async def test_a_request_follows_its_session_to_the_new_owner() -> None:
    """The owner that is known says `moved`, or that it stops, until it is known who serves the session."""
    for owner_of_old in (lambda session: "tcp://127.0.0.1:9", lambda session: None):
        owners: dict[str, str] = {}
        first, new = Daemon("first", owners.get), Daemon("new", lambda session: None)
        old = Daemon("old", owner_of_old)
        async with running(first, old, new):
            owners["btc"] = old.server.endpoint
            await old.server.drain() if owner_of_old("") is None else None
            asked = asyncio.create_task(answered(first, ASK, Client(LOCAL, "here")))
            await until(lambda daemon=first: daemon.outcomes("moved") > 1)
            assert not asked.done()
            owners["btc"] = new.server.endpoint
            reply = await asked
        assert isinstance(reply, AskReply)
        assert reply.text == "new"
        assert first.outcomes("answered") == 1


@pytest.mark.parametrize("here", [False, True])
async def test_a_request_does_not_wait_for_an_owner_that_is_gone(here: bool) -> None:
    owners: dict[str, str | None] = {"btc": "tcp://127.0.0.1:9"}
    first, new = Daemon("first", owners.get), Daemon("new", lambda session: None)
    async with running(first, new):
        asked = asyncio.create_task(answered(first, ASK, Client(LOCAL, "here")))
        await asyncio.sleep(0)
        owners["btc"] = None if here else new.server.endpoint
        reply = await asked
    assert isinstance(reply, AskReply)
    assert reply.text == ("first" if here else "new")


async def test_an_owner_without_an_address_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"btc": ""}
    first, new = Daemon("first", owners.get), Daemon("new", lambda session: None)
    async with running(first, new):
        asked = asyncio.create_task(answered(first, ASK, Client(LOCAL, "here")))
        await asyncio.sleep(0)
        owners["btc"] = new.server.endpoint
        assert isinstance(await asked, AskReply)
        owners["btc"] = ""
        monkeypatch.setattr(module, "UNKNOWN_S", 0.1)
        refused = await answered(first, ASK, Client(LOCAL, "here"))
    assert isinstance(refused, ErrorReply)
    assert (refused.code, refused.address) == ("moved", "")


# The list of all sessions.


async def test_any_daemon_lists_all_sessions_as_their_owners_tell_them() -> None:
    owners: dict[str, dict[str, str]] = {"one": {}, "two": {}}
    one, two = (Daemon(name, found.get, sessions="ab") for name, found in owners.items())
    async with running(one, two):
        owners["one"]["b"], owners["two"]["a"] = two.server.endpoint, one.server.endpoint
        for daemon in (one, two):
            async with AsyncQueryClient(daemon.server.endpoint) as client:
                found = await client.sessions()
            assert [(each.name, each.symbol, each.owner, each.owner_failure) for each in found.sessions] == [
                ("a", "one", one.server.endpoint, ""),
                ("b", "two", two.server.endpoint, ""),
            ]
        # each was asked by its client and by the other daemon, and no list was forwarded again
        assert (one.listed, two.listed) == (2, 2)


@pytest.mark.parametrize("failure", ["timeout", "moved", "bad_request", "unknown"])
async def test_a_session_whose_owner_says_nothing_is_listed_with_what_is_known(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "LIST_WAIT_S", 0.2)
    owners: dict[str, str] = {}
    one = Daemon("one", owners.get, sessions="ab")
    two = Daemon("two", lambda session: "tcp://elsewhere:1", sessions="ab")
    where = {"timeout": "tcp://127.0.0.1:9", "bad_request": "nowhere", "unknown": ""}
    async with running(one, two), AsyncQueryClient(one.server.endpoint) as client:
        owners["b"] = where.get(failure, two.server.endpoint)  # which says that another one serves it
        found = (await client.sessions()).sessions
    code = "moved" if failure == "unknown" else failure
    assert [(each.name, each.symbol, each.owner, each.owner_failure) for each in found] == [
        ("a", "one", one.server.endpoint, ""),
        ("b", "one", owners["b"], code),
    ]
    assert one.outcomes("failed") == (failure in ("timeout", "bad_request"))


async def test_a_daemon_that_does_not_forward_lists_what_it_knows_and_who_serves_it() -> None:
    one = Daemon("one", lambda session: "tcp://127.0.0.1:9", forwards=False, sessions="a")
    async with running(one), AsyncQueryClient(one.server.endpoint) as client:
        (found,) = (await client.sessions()).sessions
    assert (found.symbol, found.owner, found.owner_failure) == ("one", "tcp://127.0.0.1:9", "")


async def test_a_session_that_only_another_daemon_has_is_listed_behind_the_others() -> None:
    owners: dict[str, str] = {}
    one, two = Daemon("one", owners.get, sessions="ab"), Daemon("two", lambda session: None, sessions="bc")
    async with running(one, two), AsyncQueryClient(one.server.endpoint) as client:
        owners["b"] = two.server.endpoint
        found = (await client.sessions()).sessions
    assert [(each.name, each.symbol) for each in found] == [("a", "one"), ("b", "two"), ("c", "two")]


# Generations.


def chat(text: str, *, stream: bool = False, **more: Any) -> Generate:
    return Generate(session="btc", turns=(Turn("user", text),), stream=stream, **more)


class Chats:
    """Two daemons of a group; a client of the first asks a session of the second."""

    def __init__(self) -> None:
        self.here, self.there = FakeGenerator(), FakeGenerator()
        self.owners: dict[str, str] = {}
        self.first = Daemon("first", self.owners.get)
        self.second = Daemon("second", lambda session: None)
        self.second.generator = self.there
        self.first.generator = self.here
        self.generator = GroupGenerator(self.here, self.first.queries, self.owners.get)

    async def run(self, *requests: Generate) -> list[tuple[int, Event]]:
        return [each async for each in self.generator.run(requests, Client(LOCAL, "here"))]

    async def count(self, request: Generate) -> int:
        return await self.generator.count(request, Client(LOCAL, "here"))


@pytest.fixture
async def chats() -> AsyncIterator[Chats]:
    made = Chats()
    async with running(made.first, made.second):
        made.owners["btc"] = made.second.server.endpoint
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_with_a_session_of_another_daemon_are_answered_there(chats: Chats, stream: bool) -> None:
    asked = [chat("Up?", stream=stream, top_logprobs=1), chat("Down?", stream=stream, stop=(".",))]
    own = Chats()
    expected = [each async for each in own.here.run(asked, Client(LOCAL, "here"))]
    found = await chats.run(*asked)
    assert chats.here.asked == []
    assert [each.turns for each in chats.there.asked] == [each.turns for each in asked]
    done = {index: event for index, event in found if isinstance(event, Finished)}
    assert done == {index: event for index, event in expected if isinstance(event, Finished)}
    for index in (0, 1):
        kinds = [type(event) for number, event in found if number == index]
        assert kinds == [Begun, Delta, Finished] if stream else [Begun, Finished]
    assert "".join(e.text for n, e in found if n == 0 and isinstance(e, Delta)) == "Up we go" * stream
    assert await chats.count(chat("Up?")) == 3


async def test_a_chat_without_a_session_and_one_with_an_own_session_stay(chats: Chats) -> None:
    await chats.run(Generate(text="Up?"))
    chats.owners.clear()
    await chats.run(chat("Down?"))
    assert await chats.count(chat("Up?")) == 3
    assert (len(chats.here.asked), len(chats.there.asked)) == (2, 0)


async def test_what_the_owner_refuses_is_refused(chats: Chats) -> None:
    for code in ("busy", "unknown_session", "late engine"):
        with pytest.raises(QueryError) as refused:
            await chats.run(chat(code))
        assert refused.value.code == code.removeprefix("late ")
    with pytest.raises(QueryError, match="64 bits"):
        await chats.run(chat("Up?", schema={"minimum": 1 << 70}))


async def test_a_daemon_that_does_not_forward_refuses_chats_with_the_owners_address(chats: Chats) -> None:
    quiet = Daemon("quiet", chats.owners.get, forwards=False)
    generator = GroupGenerator(chats.here, quiet.queries, chats.owners.get)
    with pytest.raises(QueryError) as refused:
        await anext(generator.run([chat("Up?")], Client(LOCAL, "here")))
    assert (refused.value.code, refused.value.address) == ("moved", chats.second.server.endpoint)
    assert chats.there.asked == []


async def test_a_client_that_leaves_ends_its_generation_at_the_owner(chats: Chats) -> None:
    asked = asyncio.create_task(chats.run(chat("slow")))
    await until(lambda: chats.there.running == 1)
    asked.cancel()
    await until(lambda: chats.there.cancelled == 1)
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("data", [b"\xc1", msgspec.msgpack.encode([]), msgspec.msgpack.encode([chat("x")])])
async def test_generations_are_forwarded_by_daemons_only_and_of_the_named_session_only(
    chats: Chats, data: bytes
) -> None:
    request = GenerateElsewhere(3, "eth", data)
    endpoint = chats.second.server.endpoint
    async with AsyncQueryClient(endpoint) as client:
        refused = await client.request(request)
    assert isinstance(refused, ErrorReply)
    assert refused.code == "forbidden"
    async with AsyncQueryClient(endpoint, identity=forwarding_name("")) as client:
        bad = await client.request(request)
    assert isinstance(bad, ErrorReply)
    assert bad.code == "bad_request"


async def test_until_a_session_that_came_is_answered_here_its_former_owner_tells_what_it_answered_last() -> (
    None
):
    first = Daemon("first", lambda session: None)
    second = Daemon("second", lambda session: first.server.endpoint)
    async with running(first, second), AsyncQueryClient(first.server.endpoint) as client:
        assert await client.request(Answers(1, "btc")) == AnswersReply(1, "btc", ())
        first.former["btc"] = second.server.endpoint
        second.answers = [replace(ANSWER, question=each) for each in ("up", "calm")]
        assert await client.request(Answers(2, "btc")) == AnswersReply(2, "btc", tuple(second.answers))
        assert await client.request(Answers(3, "btc", "calm")) == AnswersReply(3, "btc", (second.answers[1],))
        first.former["btc"] = "tcp://127.0.0.1:9"
        began = time.monotonic()
        assert await client.request(Answers(4, "btc")) == AnswersReply(4, "btc", ()), "it is gone"
        assert time.monotonic() - began < 4.0
        refused = await client.request(KeptAnswers(5, "btc"))
        assert isinstance(refused, ErrorReply)
        assert refused.code == "forbidden"
