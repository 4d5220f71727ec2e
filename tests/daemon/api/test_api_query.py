"""The query socket: wire format, refusals, concurrency, and stopping."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from daemon.api.client import QueryClient
from daemon.api.messages import (
    Answers,
    AnswersReply,
    Append,
    Ask,
    AskReply,
    Close,
    ClosedReply,
    ErrorReply,
    Finish,
    ListSessions,
    PromptReply,
    Quantiles,
    QueryError,
    SessionInfo,
    SessionsReply,
    Stats,
    StatsReply,
    Update,
    decode_reply,
    encode,
)
from daemon.api.zmq import QueryServer
from daemon.gateway.services import Services
from daemon.supervision import Tasks
from daemon.tenants import Client, Tenant
from feeds.market_data import Answer, InputRange, Latency
from tests.daemon.api.prompts import FakePrompts
from tests.kit.gateway import queries
from tests.kit.wire import Wire, wired

PUBLISHED = Answer(
    session="a",
    symbol="X:A",
    question="direction",
    question_hash="0f",
    text=" Yes",
    choice="Yes",
    logit_gap=1.25,
    probability=None,
    data_version=7,
    inputs=[InputRange("md.trades.v1", 0, 10, 20)],
    as_of=1,
    staleness_ns=2,
    model="tiny",
    model_revision="r1",
    untrained=True,
    latency=Latency(ring_wait_ns=1, queue_ns=2, forward_ns=3, total_ns=6),
    reused_tokens=100,
    computed_tokens=10,
    flags=("gap",),
    published_at=3,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Backend:
    """Answers "slow" when released, fails on "broken", answers everything else at once."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.arrived = asyncio.Event()
        self.asked: list[Ask] = []

    def ask(self, request: Ask, client: Client) -> Callable[[], Awaitable[AskReply]]:
        return partial(self._computed, request)

    async def _computed(self, request: Ask) -> AskReply:
        self.asked.append(request)
        self.arrived.set()
        if request.session != "a":
            raise QueryError("unknown_session", f"there is no session named {request.session!r}")
        if request.question == "slow":
            await self.release.wait()
        if request.question == "broken":
            raise ZeroDivisionError("secret detail")
        return AskReply(
            id=request.id,
            session=request.session,
            data_version=7,
            text=" Yes",
            choice=request.choices[0] if request.choices else None,
            logit_gap=1.25,
            cached=False,
            untrained=True,
            flags=("gap", "untrained"),
        )

    async def sessions(self, request: ListSessions) -> SessionsReply:
        return SessionsReply(request.id, (SessionInfo("a", "X:A", 7, 100, 5, 1, 2, ("q",)),))

    async def answers(self, request: Answers) -> AnswersReply:
        if request.min_version > 7:
            await asyncio.sleep(request.timeout_s)
            raise QueryError("timeout", f"no version {request.min_version} within {request.timeout_s:g} s")
        return AnswersReply(request.id, request.session, (PUBLISHED,))

    async def stats(self, request: Stats, tenant: Tenant) -> StatsReply:
        return StatsReply(request.id, {"foretick_engine_up": 1.0}, {"ask": Quantiles(3, 0.1, 0.2, 0.3)})


@pytest.fixture
def observed() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def backend() -> Backend:
    return Backend()


@pytest.fixture
def prompts() -> FakePrompts:
    return FakePrompts()


def answering(backend: Backend, prompts: FakePrompts, max_wait_s: float = 1.0) -> Any:
    services = Services(backend, backend, None, None, None, prompts, None, None, None, None).begin
    return queries(services, max_wait_s).answer


@pytest.fixture
def max_wait_s() -> float:
    return 0.5


@pytest.fixture
async def server(backend, prompts, observed, max_wait_s) -> AsyncIterator[QueryServer]:
    made = QueryServer(
        answering(backend, prompts, max_wait_s),
        "tcp://127.0.0.1:0",
        max_request_bytes=1000,
        observe=lambda request, reply, latency_ns: observed.append(
            (type(request).__name__, reply.code if isinstance(reply, ErrorReply) else "ok")
        ),
    )
    await made.start(Tasks())
    yield made
    await made.stop()


@pytest.fixture
async def wire(server) -> AsyncIterator[Wire]:
    async with wired(server.endpoint) as made:
        yield made


async def with_client(server: QueryServer, use: Callable[[QueryClient], Any], timeout_s: float = 60.0) -> Any:
    """Run `use` on the blocking client in a thread while this loop serves it."""

    def run() -> Any:
        with QueryClient(server.endpoint, timeout_s) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_each_request_gets_its_reply(server, backend, observed):
    def use(client: QueryClient) -> list[Any]:
        return [
            client.ask("a", "Up?", 3, ("Yes", "No")),
            client.sessions(),
            client.answers("a"),
            client.stats(),
        ]

    asked, sessions, answers, stats = await with_client(server, use)
    assert backend.asked == [Ask(1, "a", "Up?", 3, ("Yes", "No"))]
    assert (asked.id, asked.data_version, asked.text, asked.choice) == (1, 7, " Yes", "Yes")
    assert asked.flags == ("gap", "untrained")
    assert 0 < asked.latency_ns < 10**9
    assert sessions.sessions[0].symbol == "X:A"
    assert answers == AnswersReply(3, "a", (PUBLISHED,))
    assert stats.stages["ask"] == Quantiles(3, 0.1, 0.2, 0.3)
    assert observed == [("Ask", "ok"), ("ListSessions", "ok"), ("Answers", "ok"), ("Stats", "ok")]


async def test_prompts_go_to_their_own_backend_and_their_client_is_the_connection(server, prompts):
    def use(client: QueryClient) -> list[Any]:
        return [
            client.open_prompt("abc"),
            client.append("p", "defg"),
            client.update("p", "h"),
            client.finish("p"),
            client.close_prompt("p"),
            client.complete("all"),
        ]

    opened, appended, updated, finished, closed, whole = await with_client(server, use)
    await with_client(server, lambda client: client.open_prompt())
    assert (opened, appended, updated) == (
        PromptReply(1, "p", 3),
        PromptReply(2, "p", 4),
        PromptReply(3, "p", 1),
    )
    assert (finished.id, finished.text, finished.waits) == (4, "YES", {"step": 5})
    assert 0 < finished.latency_ns < 10**9
    assert 0 < whole.latency_ns < 10**9
    assert closed == ClosedReply(5, "p")
    assert prompts.asked[1:5] == [Append(2, "p", "defg"), Update(3, "p", "h"), Finish(4, "p"), Close(5, "p")]
    first, again, other = prompts.clients
    assert first == again != other
    with pytest.raises(QueryError) as refused:
        await with_client(server, lambda client: client.finish("q"))
    assert refused.value.code == "unknown_prompt"


@pytest.mark.parametrize(
    "members",
    [
        {"type": "open", "max_tokens": 0},
        {"type": "open", "temperature": -0.1},
        {"type": "open", "temperature": float("nan")},
        {"type": "complete", "text": ""},
        {"type": "append", "prompt": "", "text": "x"},
        {"type": "append", "prompt": "p"},
        {"type": "finish", "prompt": "p", "text": "x"},
    ],
    ids=str,
)
async def test_a_prompt_that_makes_no_sense_is_refused(wire, prompts, members):
    await wire.send(msgspec.msgpack.encode({"id": 3, **members}))
    reply = await wire.read()
    assert (reply.id, reply.code, prompts.asked) == (3, "bad_request", [])


async def test_a_slow_ask_does_not_delay_a_fast_one(wire, backend):
    await wire.send(Ask(1, "a", "slow"))
    await wire.send(Ask(2, "a", "fast"))
    assert (await wire.read()).id == 2
    backend.release.set()
    assert (await wire.read()).id == 1


async def test_a_req_socket_is_served_too(server):
    def use() -> Any:
        context = zmq.Context()
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(server.endpoint)
        socket.send(encode(ListSessions(9)))
        reply = decode_reply(socket.recv())
        socket.close()
        context.term()
        return reply

    assert (await asyncio.to_thread(use)).id == 9


async def test_too_many_frames_are_refused(wire):
    await wire.socket.send_multipart([b"", b"", encode(ListSessions(1))])
    assert (await wire.read()).code == "bad_request"


async def test_an_oversize_request_is_refused_and_a_huge_one_disconnects(wire, server):
    await wire.send(Ask(1, "a", "x" * 1000))
    reply = await wire.read()
    assert (reply.code, reply.id) == ("too_long", None)
    await wire.send(Ask(1, "a", "x" * 10_000_000))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wire.socket.recv_multipart(), 0.3)
    async with wired(server.endpoint) as other:
        assert (await other.request(ListSessions(2))).id == 2


async def test_backend_errors_become_replies_without_inner_details(wire, observed, caplog):
    unknown = await wire.request(Ask(1, "zz", "?", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01"))
    assert unknown == ErrorReply(1, "unknown_session", "there is no session named 'zz'", trace_id=TRACE)
    broken = await wire.request(Ask(2, "a", "broken"))
    assert (broken.id, broken.code) == (2, "engine")
    assert "secret" not in broken.message
    assert "secret detail" in caplog.text
    assert observed == [("Ask", "unknown_session"), ("Ask", "engine")]


async def test_a_request_that_takes_too_long_times_out(wire):
    start = time.monotonic()
    reply = await wire.request(Ask(1, "a", "slow", traceparent=f"00-{TRACE}-00f067aa0ba902b7-00"))
    assert reply == ErrorReply(1, "timeout", "no answer within 0.5 s", trace_id=TRACE)
    assert time.monotonic() - start > 0.4


async def test_requests_that_do_not_finish_in_time_get_an_error(server, wire, backend):
    await wire.send(Ask(1, "a", "slow"))
    await backend.arrived.wait()
    await server.stop(drain_s=0.01)
    reply = await wire.read()
    assert (reply.id, reply.code) == (1, "shutting_down")


async def test_the_client_raises_what_the_server_refuses(server):
    with pytest.raises(QueryError, match="no session named 'zz'") as refused:
        await with_client(server, lambda client: client.ask("zz", "?"))
    assert refused.value.code == "unknown_session"
    with pytest.raises(QueryError, match="no version 9") as late:
        await with_client(server, lambda client: client.answers("a", min_version=9, timeout_s=0.05))
    assert late.value.code == "timeout"


@pytest.mark.parametrize("max_wait_s", [60.0])
async def test_the_client_survives_its_own_timeout_and_ignores_the_late_reply(server, backend):
    loop = asyncio.get_running_loop()

    def use(client: QueryClient) -> Any:
        with pytest.raises(QueryError, match="within 1 s"):
            client.ask("a", "slow")
        loop.call_soon_threadsafe(backend.release.set)
        time.sleep(0.2)  # the late reply arrives before the next request
        return client.ask("a", "fast")

    # request 2 gave request 1 up
    assert (await with_client(server, use, timeout_s=1.0)).id == 3


def test_no_server_is_a_timeout():
    with QueryClient("tcp://127.0.0.1:1", 0.1) as client, pytest.raises(QueryError) as refused:
        client.stats()
    assert refused.value.code == "timeout"


def test_an_address_that_is_none_is_refused():
    with pytest.raises(QueryError, match="address"):
        QueryClient("nowhere")


async def test_a_taken_endpoint_is_an_error_that_names_it(server, backend):
    second = QueryServer(answering(backend, FakePrompts()), server.endpoint)
    with pytest.raises(OSError, match="tcp://127"):
        await second.start(Tasks())


async def test_ipc_and_wildcard_endpoints(backend, tmp_path):
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/q"):
        server = QueryServer(answering(backend, FakePrompts()), endpoint)
        await server.start(Tasks())
        assert "*" not in server.endpoint
        async with wired(server.endpoint) as wire:
            assert (await wire.request(ListSessions(1))).id == 1
        await server.stop()
