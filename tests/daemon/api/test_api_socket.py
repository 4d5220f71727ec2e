"""The query socket's connections: versions, limits, cancelling, subscriptions, and clients that misbehave."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.api import messages
from daemon.api.client import AsyncQueryClient, QueryClient
from daemon.api.dealer import ClientKeys
from daemon.api.events import Events
from daemon.api.messages import (
    Ask,
    AskReply,
    Cancel,
    CancelReply,
    Ended,
    ErrorReply,
    EventMessage,
    Heartbeat,
    HeartbeatReply,
    Hello,
    ListSessions,
    LostMessage,
    QueryError,
    SessionInfo,
    SessionsReply,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
    decode_event,
    encode,
)
from daemon.api.operations import OPERATIONS
from daemon.api.subscriptions import Feed, SubscriptionUpdate
from daemon.api.zmq import Answering, QueryServer
from daemon.supervision import Tasks
from daemon.tenants import Client
from feeds.market_data import FlashReady
from metrics.catalogue import QueryRefusal
from metrics.store import MetricStore
from tests.kit import until
from tests.kit.wire import Wire, wired

KEPT = 64
MOST = 9
"""Subscriptions of one connection."""


def yes(request: Ask) -> AskReply:
    """A reply that is there."""
    return AskReply(id=request.id, session=request.session, data_version=7, text="yes", cached=True)


@dataclass
class Desk:
    """A server over a backend that holds asks until ``release``."""

    server: QueryServer
    events: Events
    store: MetricStore
    release: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[messages.ClientRequest] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    size: int = 0
    """Of the other replies, in bytes."""

    def answer(self, request: messages.ClientRequest, client: Client, since: int) -> Answering:
        if not isinstance(request, Ask) or request.question != "ready":
            return partial(self.later, request)
        return yes(request)

    async def later(self, request: messages.ClientRequest) -> messages.Reply:
        self.asked.append(request)
        if not isinstance(request, Ask):
            info = SessionInfo("x" * self.size, "X:A", 7, 100, 5, 1, 2, ())
            return SessionsReply(request.id, (info,) if self.size else ())
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.given_up.append(request.id)
            raise
        return ErrorReply(request.id, "unknown_session", "none here")

    def publish(self, n: int, session: str = "s", size: int = 0) -> None:
        self.events.publish(FlashReady(session=session + "x" * size, data_version=n, as_of=0, answers=1))

    def refused(self, reason: str) -> int:
        return int(self.store.value("foretick_query_refused_total", reason=reason))

    @property
    def listeners(self) -> float:
        return self.store.value("foretick_listeners", transport="zeromq")


async def serving(endpoint: str = "tcp://127.0.0.1:*", epoch: int = 1, **options: Any) -> Desk:
    store = MetricStore.local({})
    events = Events(epoch, store, max_clients=40, kept=KEPT)

    def answer(request: messages.ClientRequest, client: Client, since: int) -> Answering:
        return desk.answer(request, client, since)

    server = QueryServer(answer, endpoint, events=events, store=store, **options)
    desk = Desk(server, events, store)
    await desk.server.start(Tasks())
    return desk


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = await serving(
        max_in_flight=4, max_in_flight_each=3, max_request_bytes=1000, max_subscriptions=MOST
    )
    yield made
    await made.server.stop()


@pytest.fixture
async def wire(desk) -> AsyncIterator[Wire]:
    async with wired(desk.server.endpoint) as made:
        yield made


@pytest.fixture
async def other(desk) -> AsyncIterator[Wire]:
    async with wired(desk.server.endpoint) as made:
        yield made


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(work), 20)


# Requests.


async def test_hello_says_version_and_limits_and_refuses_others(desk, wire):
    reply = await wire.request(Hello(1))
    assert (reply.version, reply.max_in_flight, reply.max_request_bytes) == (messages.VERSION, 3, 1000)
    assert reply.lease_s == 30
    other = await wire.request(Hello(2, 99))
    assert (other.id, other.code, desk.refused("unsupported_version")) == (2, "unsupported_version", 1)
    assert "version 1" in other.message


async def test_an_id_that_is_still_being_answered_is_refused(desk, wire):
    await wire.send(Ask(7, "a", "?"), Ask(7, "a", "?"))
    assert (await wire.read()).code == "in_flight"
    assert (len(desk.asked), desk.refused("in_flight")) == (1, 1)
    desk.release.set()
    assert (await wire.read()).code == "unknown_session"
    assert (await wire.request(Ask(7, "a", "?"))).code == "unknown_session"  # the id is free again


async def test_the_same_id_of_two_clients_is_two_requests(desk, wire, other):
    await wire.send(Ask(7, "a", "?"))
    await other.send(Ask(7, "a", "?"))
    await until(lambda: len(desk.asked) == 2)
    desk.release.set()
    assert (await wire.read()).id == (await other.read()).id == 7


async def test_each_client_has_its_own_limit_and_all_have_one(desk, wire, other):
    await wire.send(*(Ask(n, "a", "?") for n in range(4)))
    full = await wire.read()
    assert (full.id, full.code, desk.refused("busy_client"), desk.refused("busy")) == (3, "busy", 1, 0)
    await other.send(Ask(0, "a", "?"), Ask(1, "a", "?"))
    full = await other.read()
    assert (full.id, full.code, desk.refused("busy")) == (1, "busy", 1)
    desk.release.set()
    assert {(await wire.read()).id for _ in range(3)} == {0, 1, 2}


async def test_a_reply_that_is_there_takes_no_place_but_its_id_must_be_free(desk, wire):
    await wire.send(*(Ask(n, "a", "?") for n in range(3)))
    ready = await wire.request(Ask(3, "a", "ready"))
    assert isinstance(ready, AskReply)
    assert (ready.id, ready.text) == (3, "yes")
    assert (await wire.request(Ask(2, "a", "ready"))).code == "in_flight"
    assert (await wire.request(Ask(4, "a", "?"))).code == "busy"
    desk.release.set()
    assert {(await wire.read()).id for _ in range(3)} == {0, 1, 2}
    assert isinstance(await wire.request(Ask(2, "a", "ready")), AskReply)
    desk.release.clear()
    await wire.send(Ask(5, "a", "?"))
    await until(lambda: len(desk.asked) == 4)
    draining = asyncio.create_task(desk.server.drain(5))
    await asyncio.sleep(0.01)
    assert (await wire.request(Ask(6, "a", "ready"))).code == "shutting_down"
    desk.release.set()
    assert (await wire.read()).id == 5
    await draining


async def test_replies_that_are_there_leave_others_their_turn(desk, wire):
    turn, turns = 0, Counter[int]()

    def answer(request, client, since):
        turns[turn] += 1
        return yes(request)

    async def take_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    desk.answer = answer
    await wire.request(Ask(0, "a", "ready"))
    await wire.send(*(Ask(n, "a", "ready") for n in range(1, 500)))
    time.sleep(0.2)  # noqa: ASYNC251 - all arrive, and nothing of this loop runs meanwhile
    taking = asyncio.create_task(take_turns())
    assert [(await wire.read()).id for _ in range(1, 500)] == list(range(1, 500))
    taking.cancel()
    assert max(turns.values()) <= 64


async def test_a_request_is_cancelled_by_its_own_client_only(desk, wire, other):
    await wire.send(Ask(1, "a", "?"))
    await until(lambda: desk.asked)
    assert await other.request(Cancel(2, 1)) == CancelReply(2, 1, False)
    await wire.send(Cancel(2, 1))
    told = await wire.read()
    assert (told.id, told.code) == (1, "cancelled")
    assert await wire.read() == CancelReply(2, 1, True)
    await until(lambda: desk.given_up == [1])
    assert await wire.request(Cancel(3, 1)) == CancelReply(3, 1, False)


async def test_a_request_cancelled_before_it_began_fails_as_well(desk, wire):
    await wire.send(Ask(1, "a", "?"), Cancel(2, 1))
    assert (await wire.read()).code == "cancelled"
    assert (await wire.read()).cancelled
    assert (await wire.request(ListSessions(1))).id == 1


async def test_clients_give_up_at_the_daemon_what_they_give_up(desk):
    async with AsyncQueryClient(desk.server.endpoint, 60) as client:
        task = asyncio.create_task(client.ask("a", "?"))
        await until(lambda: desk.asked)
        task.cancel()
        await until(lambda: len(desk.given_up) == 1)
        await asyncio.gather(task, return_exceptions=True)
        assert (await client.hello()).version == 1

    def use() -> None:
        with QueryClient(desk.server.endpoint, 1.0) as client:
            with pytest.raises(QueryError, match="timeout"):
                client.ask("a", "?")
            client.sessions()

    await in_thread(use)
    await until(lambda: len(desk.given_up) == 2)


async def test_replies_to_clients_that_are_gone_are_dropped_and_counted(desk, wire):
    leaving = Wire(desk.server.endpoint)
    await leaving.send(Ask(1, "a", "?"))
    await until(lambda: desk.asked)
    leaving.close()
    await asyncio.sleep(1.0)  # the server's socket sees the connection end
    desk.release.set()
    await until(lambda: desk.store.value("foretick_query_replies_dropped_total") == 1)
    assert (await wire.request(ListSessions(5))).id == 5
    assert desk.server._peers == {}


async def test_a_client_that_reads_no_replies_delays_nobody():
    desk = await serving(max_in_flight=30, max_in_flight_each=20)
    desk.size = 20_000
    deaf, other = Wire(desk.server.endpoint, RCVHWM=1, RCVBUF=4096), Wire(desk.server.endpoint)
    n = 0
    while not desk.store.value("foretick_query_replies_dropped_total"):
        n += 1
        await deaf.send(*(ListSessions(n * 10 + i) for i in range(10)))
        assert isinstance(await other.request(ListSessions(n)), SessionsReply)
    await until(lambda: [peer.sending for peer in desk.server._peers.values()] == [20])
    assert isinstance(await other.request(ListSessions(0)), SessionsReply)
    await asyncio.wait_for(desk.server.stop(), 60)
    deaf.close()
    other.close()


# Bad input.


def packed(**members: object) -> bytes:
    return msgspec.msgpack.encode(members)


@pytest.mark.parametrize(
    ("payload", "reason", "number", "part"),
    [
        (b"", "unreadable", None, "truncated"),
        (encode(Ask(1, "a", "?"))[:-1], "unreadable", None, "truncated"),
        (b"\xc1", "unreadable", None, "invalid opcode"),
        (b"hello", "bad_request", None, "xpected"),
        (b"\xa3\xff\xfe\xfd", "bad_request", None, "got `str`"),
        (b"\x82\xa2id\x04\xa4type\xa2\xff\xfe", "unreadable", None, "utf-8"),
        (packed(id=4, type="order"), "bad_request", 4, "Invalid value 'order'"),
        (packed(id=4), "bad_request", 4, "missing required field `type`"),
        (packed(id=4, type="ask", session="a"), "bad_request", 4, "missing required field `question`"),
        (packed(id=4, type="stats", sesion="a"), "bad_request", 4, "unknown field `sesion`"),
        (packed(id=4, type="ask", session="a", question="?", max_tokens=0), "bad_request", 4, ">= 1"),
        (packed(id=-1, type="ask", session="a", question="?"), "bad_request", None, ">= 0"),
        (packed(id="x", type="stats"), "bad_request", None, "got `str`"),
        (encode(Ask(1, "a", "x" * 1000)), "too_long", None, "at most 1000 bytes"),
        (encode(Hello(1, 2)), "unsupported_version", 1, "version 1"),
    ],
)
async def test_bad_input_gets_its_error_and_its_counter(desk, wire, payload, reason, number, part):
    reply = await wire.request(payload)
    assert (reply.id, reply.code) == (number, "bad_request" if reason == "unreadable" else reason)
    assert part in reply.message
    counted = {each: desk.refused(each) for each in get_args(QueryRefusal)}
    assert counted == {each: int(each == reason) for each in get_args(QueryRefusal)}
    assert (await wire.request(ListSessions(5))).id == 5


REQUESTS = [
    each
    for each in get_args(messages.SocketRequest)
    if each not in (Subscribe,)  # its events would come between
]


def fits(request: Any) -> bool:
    """Whether it can be written: msgpack has integers of 64 bits."""
    try:
        return bool(encode(request))
    except (OverflowError, UnicodeEncodeError):
        return False


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_message_gets_one_reply_and_the_socket_lives(desk, wire, data):
    """Valid requests, cut and altered ones, and bytes at random."""
    desk.release.set()
    request = data.draw(st.one_of(*(st.from_type(each) for each in REQUESTS)).filter(fits))
    payload = data.draw(
        st.one_of(
            st.just(encode(request)),
            st.integers(0, 40).map(lambda n: encode(request)[:n]),
            st.binary(max_size=60),
            st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=4)).map(
                lambda found: encode(request)[: found[0]] + found[1] + encode(request)[found[0] + 1 :]
            ),
        )
    )
    reply = await wire.request(payload)
    assert isinstance(reply, get_args(messages.SocketMessage))
    assert (await wire.request(ListSessions(5))).id == 5
    assert desk.server._peers == {}


# Subscriptions.


async def test_a_subscription_gets_what_it_chose_and_ends(desk, wire):
    reply = await wire.request(Subscribe(1, sessions=("b",), events=("flash_ready",)))
    assert reply == Subscribed(1, desk.events.newest)
    desk.publish(1, "a")
    desk.publish(2, "b")
    event = await wire.read()
    assert (event.subscription, event.event) == (1, desk.events.newest)
    assert decode_event(event.data) == FlashReady(session="b", data_version=2, as_of=0, answers=1)
    assert await wire.request(Heartbeat(2)) == HeartbeatReply(2, (1,))
    assert await wire.request(Unsubscribe(3, 1)) == Unsubscribed(3)
    assert (await wire.request(Unsubscribe(4, 1))).code == "bad_request"
    desk.publish(3, "b")
    assert await wire.request(Heartbeat(5)) == HeartbeatReply(5, ())
    assert (desk.listeners, desk.server._peers) == (0, {})


async def test_a_subscription_goes_on_behind_the_last_event_and_says_what_fell_out(desk, wire):
    desk.publish(1)
    known = desk.events.newest
    for n in range(KEPT + 6):
        desk.publish(n + 2)
    await wire.send(Subscribe(1, after=known))
    assert isinstance(await wire.read(), Subscribed)
    assert await wire.read() == LostMessage(1, 6, True, "expired", known.replace(".1", ".7"))
    first = await wire.read()
    assert decode_event(first.data).data_version == 8
    for _ in range(KEPT - 1):
        last = await wire.read()
    assert last.event == desk.events.newest
    await wire.send(Subscribe(2, after="ff.1"))
    assert isinstance(await wire.read(), Subscribed)
    oldest = known.replace(".1", ".7")
    assert await wire.read() == LostMessage(2, "unknown", False, "restarted", oldest)


async def test_a_subscription_after_no_event_begins_now_and_says_so(desk, wire):
    desk.publish(1)
    for number, after in enumerate(["nonsense", "9" * 300, desk.events.newest + "0"], 1):
        await wire.send(Subscribe(number, after=after))
        assert isinstance(await wire.read(), Subscribed)
        lost = LostMessage(number, "unknown", False, "unknown_id", desk.events.newest)
        assert await wire.read() == lost


async def test_subscriptions_are_limited_and_named_once(desk, wire):
    assert isinstance(await wire.request(Subscribe(0)), Subscribed)
    assert (await wire.request(Subscribe(0))).code == "bad_request"
    for n in range(1, MOST):
        assert isinstance(await wire.request(Subscribe(n)), Subscribed)
    assert (await wire.request(Subscribe(99))).code == "busy"
    assert desk.listeners == MOST


async def test_a_slow_reader_loses_only_its_own_events_and_is_told(desk, wire):
    slow = Wire(desk.server.endpoint, RCVHWM=1, RCVBUF=4096)
    await slow.send(Subscribe(1))
    await until(lambda: desk.listeners == 1)
    await wire.request(Subscribe(1))
    for n in range(3000):  # more than buffers between the two hold
        desk.publish(n, size=10_000)
        event = await wire.read()
        assert decode_event(event.data).data_version == n
    assert desk.store.value("foretick_events_dropped_total", transport="zeromq") > 0
    assert isinstance(await slow.read(), Subscribed)
    seen = lost = 0
    while seen + lost < 3000:
        message = await slow.read()
        if isinstance(message, LostMessage):
            assert message.reason == "slow"
            lost += int(message.events)
        else:
            seen += 1
    assert (lost > 0, seen + lost) == (True, 3000)
    slow.close()


async def test_a_client_that_is_gone_is_forgotten(desk, wire):
    leaving = Wire(desk.server.endpoint)
    await leaving.request(Subscribe(1))
    await wire.request(Subscribe(1))
    leaving.close()
    await asyncio.sleep(1.0)  # the server's socket sees the connection end
    desk.publish(1)
    await until(lambda: desk.listeners == 1)
    assert (await wire.read()).subscription == 1


async def test_a_client_that_says_nothing_loses_its_lease():
    desk = await serving(lease_s=2.0)
    silent, alive = Wire(desk.server.endpoint), Wire(desk.server.endpoint)
    await silent.request(Subscribe(1))
    await alive.request(Subscribe(1))
    for n in range(8):
        assert await alive.request(Heartbeat(n + 2)) == HeartbeatReply(n + 2, (1,))
        await asyncio.sleep(0.3)
    assert await silent.read() == Ended(1, "lease")
    assert desk.listeners == 1
    await desk.server.stop()
    assert await alive.read() == Ended(1, "shutting_down")
    silent.close()
    alive.close()


# Iterators.


async def test_iterators_give_updates_and_resume(desk):
    endpoint = desk.server.endpoint

    def use() -> tuple[list[int], str]:
        with QueryClient(endpoint, 60) as client, client.subscribe(sessions=("s",)) as stream:
            loop.call_soon_threadsafe(desk.publish, 1)
            loop.call_soon_threadsafe(desk.publish, 2)
            seen = [next(stream), stream.get(5)]
            with pytest.raises(QueryError, match="no event"):
                stream.get(0.05)
            return [
                item.message.data_version for item in seen if isinstance(item, SubscriptionUpdate)
            ], stream.last

    loop = asyncio.get_running_loop()
    versions, last = await in_thread(use)
    assert (versions, last) == ([1, 2], desk.events.newest)
    desk.publish(3)
    async with AsyncQueryClient(endpoint, 60) as client, await client.subscribe(after=last) as stream:
        item = await asyncio.wait_for(anext(stream), 60)
        assert isinstance(item, SubscriptionUpdate)
        assert item.message.data_version == 3
        async with await client.subscribe(after="nonsense") as stream:
            lost = await asyncio.wait_for(anext(stream), 60)
            assert (lost.reason, stream.last) == ("unknown_id", desk.events.newest)
    async with AsyncQueryClient("tcp://127.0.0.1:1", 0.1) as client:
        with pytest.raises(QueryError, match=r"within 0\.1 s"):
            await client.subscribe()


async def test_a_subscription_survives_the_daemon():
    first = await serving()
    endpoint = first.server.endpoint
    async with AsyncQueryClient(endpoint, 60) as client, await client.subscribe() as stream:
        stream._feed._beat_s = 0.1
        stream._feed._next = 0.0
        first.publish(1)
        assert (await anext(stream)).message.data_version == 1
        await first.server.stop()
        second = await serving(endpoint, epoch=2)
        second.publish(2)
        lost = await asyncio.wait_for(anext(stream), 60)
        assert (lost.events, lost.reason) == ("unknown", "restarted")
        assert (await asyncio.wait_for(anext(stream), 60)).message.data_version == 2
        await second.server.stop()


def test_a_feed_subscribes_again_when_its_connection_is_a_new_one():
    feed = Feed(Subscribe(0, sessions=("a",)), beat_s=5)
    assert feed.due(0.0) == Subscribe(1, sessions=("a",))
    assert (feed.due(1.0), feed.wait_s(1.0)) == (None, 4.0)
    assert feed.due(5.0) == Subscribe(2, sessions=("a",))  # no reply: try again
    assert feed.on_event(encode(Subscribed(1, "e.3"))) == Unsubscribe(3, 1)
    assert not feed.confirmed
    assert feed.on_event(encode(Subscribed(2, "e.3"))) is None
    assert (feed.confirmed, feed.last) == (True, "e.3")
    ready = FlashReady(session="a", data_version=1, as_of=0, answers=1)
    raw = msgspec.Raw(encode(ready))
    assert feed.on_event(encode(EventMessage(1, "e.4", raw))) is None  # the earlier subscription's
    assert feed.on_event(encode(EventMessage(2, "e.4", raw))) == SubscriptionUpdate("e.4", ready)
    assert feed.due(10.0) == Heartbeat(4)
    assert feed.on_event(encode(HeartbeatReply(4, (2,)))) is None
    assert feed.on_event(encode(HeartbeatReply(4, ()))) is None
    assert feed.due(10.1) == Subscribe(5, sessions=("a",), after="e.4")
    assert feed.on_event(encode(ErrorReply(5, "shutting_down", ""))) is None
    assert feed.due(20.0) == Subscribe(6, sessions=("a",), after="e.4")
    with pytest.raises(QueryError, match="late"):
        feed.on_event(encode(ErrorReply(6, "bad_request", "late")))
    with pytest.raises(QueryError, match="protocol"):
        feed.on_event(b"\xc1")


# Keys.


async def test_a_client_with_keys_talks_to_a_server_with_keys(tmp_path):
    public, secret = zmq.curve_keypair()
    _, own = zmq.curve_keypair()
    (tmp_path / "daemon.public").write_bytes(public + b"\n")
    (tmp_path / "desk.secret").write_bytes(own + b"\n")
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey, router.curve_publickey = True, secret, public
    router.bind("tcp://127.0.0.1:*")
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)

    async def echo() -> None:
        while True:
            route, payload = await router.recv_multipart()
            asked = messages.decode_request(payload)
            await router.send_multipart([route, encode(SessionsReply(asked.id, ()))])

    serve = asyncio.create_task(echo())
    keys = ClientKeys.read(tmp_path / "daemon.public", tmp_path / "desk.secret")
    assert own.decode() not in repr(keys)
    async with AsyncQueryClient(endpoint, 60, keys=keys) as client:
        assert await client.sessions() == SessionsReply(1, ())

    def use() -> SessionsReply:
        with QueryClient(endpoint, 60, keys=keys) as client:
            return client.sessions()

    assert (await in_thread(use)).sessions == ()
    async with AsyncQueryClient(endpoint, 60) as client:
        with pytest.raises(QueryError, match="asks for keys"):
            await client.sessions()
    with pytest.raises(QueryError, match="cannot be read"):
        ClientKeys.read(tmp_path / "none", tmp_path / "desk.secret")
    (tmp_path / "bad.secret").write_text("short")
    with pytest.raises(QueryError, match="cannot be read"):
        ClientKeys.read(tmp_path / "daemon.public", tmp_path / "bad.secret")
    serve.cancel()
    await asyncio.gather(serve, return_exceptions=True)
    router.close()
    context.term()


# What there is.


def test_every_operation_of_http_is_one_of_the_query_socket() -> None:
    """And the other way round, but for what concerns a connection itself and pushes, which have a route."""
    direct = {each.request for each in OPERATIONS if each.perform is None}
    assert direct <= set(get_args(messages.ClientRequest))
    composed = {each.request.__name__ for each in OPERATIONS if each.perform is not None}
    assert composed == {"Describe", "FindQuestions", "FindAnswers", "FindQuality"}
    left = {each.__name__ for each in set(get_args(messages.ClientRequest)) - direct - {messages.Push}}
    # what the composed ones are made of, and what only daemons ask
    assert left == {"ListQuestions", "Answers", "Quality", "GenerateElsewhere", "KeptAnswers"}
