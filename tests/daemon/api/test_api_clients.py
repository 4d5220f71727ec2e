"""The Python clients, by one set of tests over both transports: the query socket, and HTTP."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from daemon.api import messages
from daemon.api.client import AsyncQueryClient, QueryClient
from daemon.api.dealer import ClientKeys
from daemon.api.messages import ErrorReply, LostMessage, QueryError
from daemon.api.subscriptions import SubscriptionUpdate
from daemon.config.schema import HttpConfig
from daemon.gateway.credentials import tls_of
from daemon.tenants import Tenants, new_key
from feeds.curve import Keys
from tests.daemon.api.doors import CURVE, DESK, PUBLIC, TABLES, Daemon, plain
from tests.daemon.api.test_api_access import pem  # noqa: F401  # a fixture
from tests.daemon.api.test_api_query import PUBLISHED
from tests.kit import START, until

QUESTION = messages.QuestionInfo("q", "Up?", ("YES", "NO"), 8, "text", "always", 0.8, 2.0, "0", 1, 1, 0, 0)
SESSION = messages.SessionInfo("a", "X:A", 7, 100, 5, 1, 2, ("q",), more_symbols=("X:B",))
FINISHED = messages.FinishReply(0, "p", "YES", "YES", 0.5, True, 3, 1, 0, 0, 0, 0, 7, {"step": 5})
QUESTIONS = messages.QuestionsReply(0, "a", (QUESTION,))
SESSIONS = messages.SessionsReply(0, (SESSION,))
PROMPT = messages.PromptReply(0, "p", 3)
PAST = messages.PastAnswer("q", "YES", 0.5, 0.75, ("YES",), ("gap",), "NO")
TALLY = messages.Tally(3, 2, 1, 0.75, 2, 2)
QUALITY = messages.QuestionQuality(
    "a", "q", 5, TALLY, (messages.ProbabilityBin(0.7, TALLY),), (messages.Regime("calm", TALLY),),
    (messages.AgeBlock(0, 5, 0.5, TALLY),), 1.25,
)  # fmt: skip
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], messages.ClientRequest, messages.Reply]] = [
    ("ask", ("a", "Up?", 3, ("YES", "NO")), {"deadline_ms": 900, "max_age_s": 0.5, "early_exit": 0.0},
     messages.Ask(0, "a", "Up?", 3, ("YES", "NO"), 0.0, 0.5, 900),
     messages.AskReply(id=0, session="a", data_version=7, text="YES", choice="YES", choice_set=("YES",),
                       probability=0.75, flags=("gap",))),
    ("describe", ("a",), {}, messages.Describe(0, "a"),
     messages.DescribeReply(0, SESSION, (QUESTION,), (PUBLISHED,))),
    ("show_prompt", ("a", "Up & down?"), {}, messages.ShowPrompt(0, "a", "Up & down?"),
     messages.PromptShown(0, "a", 7, *(messages.Region(text, 3) for text in "xyz"))),
    ("trace", ("5" * 32,), {}, messages.GetTrace(0, "5" * 32), messages.TraceReply(0, ())),
    ("sessions", (), {}, messages.ListSessions(0), SESSIONS),
    ("add_session", ("b", "X:B"), {"retention_tokens": 64, "stale_after": "5s"},
     messages.AddSession(0, {"name": "b", "symbol": "X:B", "retention_tokens": 64, "stale_after": "5s"}),
     SESSIONS),
    ("change_session", ("a",), {"warm_up_records": 3}, messages.ChangeSession(0, "a", {"warm_up_records": 3}),
     SESSIONS),
    ("remove_session", ("a b",), {}, messages.RemoveSession(0, "a b"), SESSIONS),
    ("answers", ("a",), {}, messages.Answers(0, "a"), messages.AnswersReply(0, "a", (PUBLISHED,))),
    ("answers", ("a", "Up & down?", 7, 0.5), {}, messages.Answers(0, "a", "Up & down?", 7, 0.5),
     messages.AnswersReply(0, "a", ())),
    ("questions", ("a",), {}, messages.ListQuestions(0, "a"), QUESTIONS),
    ("set_question", ("a", "q", "Up?", ("YES", "NO")), {"level": "1.5", "provisional": True},
     messages.SetQuestion(0, "a", "q", "Up?", ("YES", "NO"), level="1.5", provisional=True), QUESTIONS),
    ("remove_question", ("a", "q"), {}, messages.RemoveQuestion(0, "a", "q"), QUESTIONS),
    ("pause", ("a", "q", False), {}, messages.Pause(0, "a", "q", False), QUESTIONS),
    ("label", ("a", "q", 7, "YES"), {}, messages.Label(0, "a", "q", 7, "YES"),
     messages.LabelReply(0, "a", "q", 7, True, False, 0.9)),
    ("versions", ("a", 3), {}, messages.ListVersions(0, "a", 3),
     messages.VersionsReply(0, "a", 9, 1, 2, (messages.PastVersion(2, 5, "1.5", (PAST,)),))),
    ("quality", ("a", "Up & down?"), {}, messages.Quality(0, "a", "Up & down?"),
     messages.QualityReply(0, QUALITY)),
    ("stats", (), {}, messages.Stats(0),
     messages.StatsReply(0, {"x": 1.0}, {"ask": messages.Quantiles(3, 0.1, 0.2, 0.3)})),
    ("budgets", (), {}, messages.ListBudgets(0),
     messages.BudgetsReply(0, 10.0, (messages.TenantBudget("desk", 0.1, 0.5, 0.0, 3.25),))),
    ("open_prompt", ("abc", 3), {"retention_priority": 80}, messages.Open(0, "abc", 3, retention_priority=80),
     PROMPT),
    ("append", ("p", "de"), {}, messages.Append(0, "p", "de"), PROMPT),
    ("update", ("p", "f"), {}, messages.Update(0, "p", "f"), PROMPT),
    ("finish", ("p",), {}, messages.Finish(0, "p"), FINISHED),
    ("finish", ("p", 700), {}, messages.Finish(0, "p", 700), FINISHED),
    ("complete", ("all", 9), {"temperature": 0.5}, messages.Complete(0, "all", 9, temperature=0.5), FINISHED),
    ("close_prompt", ("p",), {}, messages.Close(0, "p"), messages.ClosedReply(0, "p")),
]  # fmt: skip
"""Methods with their arguments, what the daemon gets, and what it replies; all without ids."""


@pytest.fixture(params=["zeromq", "http"])
async def daemon(request: pytest.FixtureRequest) -> AsyncIterator[Daemon]:
    made = await Daemon(request.param).start()
    yield made
    await made.server.stop()


@pytest.fixture(params=["zeromq", "http"])
async def guarded(request: pytest.FixtureRequest) -> AsyncIterator[Daemon]:
    tenants = Tenants(TABLES, PUBLIC.decode() if request.param == "zeromq" else "")
    made = await Daemon(request.param, tenants=tenants).start()
    yield made
    await made.server.stop()


async def in_thread(work: Any, *arguments: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(work, *arguments), 60)


async def test_every_method_asks_and_gets_the_same(daemon: Daemon) -> None:
    def blocking() -> list[Any]:
        with QueryClient(daemon.address, 20) as client:
            return [getattr(client, name)(*given, **named) for name, given, named, _, _ in CALLS]

    daemon.replies = [(request, reply) for _, _, _, request, reply in CALLS]
    wanted = [reply for *_, reply in CALLS]
    assert [plain(reply) for reply in await in_thread(blocking)] == [plain(reply) for reply in wanted]
    assert daemon.asked == [plain(request) for _, _, _, request, _ in CALLS]
    async with AsyncQueryClient(daemon.address, 20) as client:
        calls = [getattr(client, name)(*given, **named) for name, given, named, _, _ in CALLS]
        assert [plain(reply) for reply in await asyncio.gather(*calls)] == [plain(reply) for reply in wanted]


async def test_hello_says_which_daemon_it_is_and_refuses_another_version(daemon: Daemon) -> None:
    async with AsyncQueryClient(daemon.address, 20) as client:
        reply = await client.hello()
        assert (reply.version, bool(reply.daemon)) == (messages.VERSION, True)
        with pytest.raises(QueryError) as refused:
            await client.hello(99)
    assert refused.value.code == "unsupported_version"


async def test_records_are_pushed_and_counted(daemon: Daemon) -> None:
    at = START
    record = {"type": "trade", "venue": "V", "symbol": "A", "ts_event": at, "ts_recv": at, "price": "9.5",
              "size": "1"}  # fmt: skip

    def blocking() -> list[Any]:
        with QueryClient(daemon.address, 20) as client:
            lines = b"".join(msgspec.json.encode(each) + b"\n" for each in (record, {"type": "trade"}))
            found = [
                client.push([record, record]),
                client.push([{}]),
                client.push(lines, "lines", replay=True),
            ]
            for options in ({"content": "csv"}, {"format": "none"}, {"source": "none"}):
                with pytest.raises(QueryError) as refused:
                    client.push(b"x", **options)
                found.append(refused.value.code)
            with pytest.raises(QueryError) as refused:
                client.push(b"x", kind="none")
            return [*found, refused.value.code]

    *pushed, _, _, _, _ = found = await in_thread(blocking)
    counts = [(each.pushed.accepted, each.pushed.refused) for each in pushed]
    assert counts == [(2, 0), (0, 1), (1, 1)]
    assert [each.line for each in pushed[2].pushed.errors] == [2]
    assert found[3:] == ["bad_request"] * 4


@pytest.mark.parametrize(
    ("method", "given", "code"),
    [
        ("ask", ("a", "Up?"), "unknown_session"),
        ("questions", ("nowhere",), "unknown_session"),
        ("answers", ("",), "bad_request"),
        ("ask", ("a", ""), "bad_request"),
        ("remove_session", ("",), "bad_request"),
        ("label", ("a", "q", 0, "YES"), "bad_request"),
        ("complete", ("x" * (1 << 18),), "too_long"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_refusals_have_the_same_codes(daemon: Daemon, method: str, given: Any, code: str) -> None:
    def blocking() -> str:
        with QueryClient(daemon.address, 20) as client, pytest.raises(QueryError) as refused:
            getattr(client, method)(*given)
        return refused.value.code

    assert await in_thread(blocking) == code
    async with AsyncQueryClient(daemon.address, 20) as client:
        with pytest.raises(QueryError) as refused:
            await getattr(client, method)(*given)
    assert refused.value.code == code


async def test_a_busy_daemon_says_when_to_come_back(daemon: Daemon) -> None:
    daemon.replies = [(messages.ListSessions(0), ErrorReply(0, "busy", "later", "", 3.0))]
    async with AsyncQueryClient(daemon.address, 20) as client:
        with pytest.raises(QueryError, match="later") as refused:
            await client.sessions()
    assert (refused.value.code, refused.value.retry_after_s) == ("busy", 3.0)


async def test_what_is_given_up_is_cancelled_at_the_daemon_and_the_client_goes_on(daemon: Daemon) -> None:
    daemon.replies = [(messages.ListSessions(0), SESSIONS)]

    def blocking() -> Any:
        with QueryClient(daemon.address, 0.3) as client:
            with pytest.raises(QueryError, match=r"within 0\.3 s") as late:
                client.ask("a", "slow")
            assert late.value.code == "timeout"
            return plain(client.sessions())

    assert await in_thread(blocking) == plain(SESSIONS)
    await until(lambda: daemon.given_up == 1)
    async with AsyncQueryClient(daemon.address, 20) as client:
        asking = asyncio.create_task(client.ask("a", "slow"))
        await until(lambda: len(daemon.asked) == 3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: daemon.given_up == 2)
        assert plain(await client.sessions()) == plain(SESSIONS)


async def test_a_client_may_be_there_before_its_daemon(daemon: Daemon) -> None:
    port, address = daemon.port, daemon.address
    await daemon.server.stop()
    async with AsyncQueryClient(address, 0.3) as client:
        with pytest.raises(QueryError, match=r"within 0\.3 s") as late:
            await client.sessions()
        assert late.value.code == "timeout"
        with pytest.raises(QueryError, match=r"within 0\.3 s"):
            await client.subscribe()
    async with AsyncQueryClient(address, 20) as client:
        asking = asyncio.create_task(client.sessions())
        await asyncio.sleep(0.3)
        daemon.replies = [(messages.ListSessions(0), SESSIONS)]
        await daemon.start(port)
        assert plain(await asking) == plain(SESSIONS)


async def test_events_come_filtered_and_go_on_behind_an_id(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()

    def blocking() -> tuple[list[Any], str]:
        with QueryClient(daemon.address, 20) as client, client.subscribe(sessions=("s",)) as stream:
            loop.call_soon_threadsafe(daemon.publish, 1)
            loop.call_soon_threadsafe(daemon.publish, 9, "other")
            loop.call_soon_threadsafe(daemon.publish, 2)
            seen = [next(stream), stream.get(20)]
            with pytest.raises(QueryError, match="no event") as none:
                stream.get(0.05)
            assert none.value.code == "timeout"
            loop.call_soon_threadsafe(daemon.publish, 3)
            return [*seen, stream.get(20)], stream.last

    seen, last = await in_thread(blocking)
    assert [each.message.data_version for each in seen] == [1, 2, 3]
    assert all(isinstance(each, SubscriptionUpdate) for each in seen)
    assert last == daemon.events.newest == seen[-1].id
    async with AsyncQueryClient(daemon.address, 20) as client:
        async with await client.subscribe(
            sessions=("s",), events=("flash_ready",), after=seen[0].id
        ) as stream:
            assert [await asyncio.wait_for(anext(stream), 20) for _ in seen[1:]] == seen[1:]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)  # a wait that ends loses nothing
            daemon.publish(4)
            assert (await asyncio.wait_for(anext(stream), 20)).message.data_version == 4
        async with await client.subscribe(after="nonsense") as stream:
            lost = await asyncio.wait_for(anext(stream), 20)
            assert isinstance(lost, LostMessage)
            assert (lost.reason, lost.events, stream.last) == ("unknown_id", "unknown", daemon.events.newest)
        with pytest.raises(QueryError) as refused:
            await client.subscribe(events=("nothing",))
        assert refused.value.code == "bad_request"


async def test_a_stream_survives_its_daemon_and_says_what_is_lost(daemon: Daemon) -> None:
    async with AsyncQueryClient(daemon.address, 20) as client, await client.subscribe() as stream:
        assert (stream.newest, stream.last) == (daemon.events.newest, daemon.events.newest)
        port = daemon.port
        await daemon.server.stop()
        again = await Daemon(daemon.transport, epoch=2).start(port)
        again.publish(2)
        lost = await asyncio.wait_for(anext(stream), 60)
        assert isinstance(lost, LostMessage)
        assert (lost.events, lost.reason) == ("unknown", "restarted")
        assert (await asyncio.wait_for(anext(stream), 60)).message.data_version == 2
        await again.server.stop()


async def test_a_reader_that_is_too_slow_is_told_so(daemon: Daemon) -> None:
    async with AsyncQueryClient(daemon.address, 20) as client, await client.subscribe() as stream:
        for n in range(1, 301):  # 100 are kept
            daemon.publish(n, f"s{n}" * 30)
        seen, lost = 0, 0
        while seen + lost < 300:
            item = await asyncio.wait_for(anext(stream), 20)
            seen += isinstance(item, SubscriptionUpdate)
            lost += item.events if isinstance(item, LostMessage) else 0
        assert lost >= 200


async def test_a_key_lets_in_and_its_lack_is_named(guarded: Daemon) -> None:
    guarded.replies = [(messages.ListSessions(0), SESSIONS)]
    async with AsyncQueryClient(guarded.address, 20, keys=guarded.keys()) as client:
        assert plain(await client.sessions()) == plain(SESSIONS)
        async with await client.subscribe() as stream:
            guarded.publish(1)
            assert (await asyncio.wait_for(anext(stream), 20)).message.data_version == 1
    stranger = Keys(*zmq.curve_keypair(), server=PUBLIC) if guarded.transport == "zeromq" else new_key()
    for own in (None, stranger):
        async with AsyncQueryClient(guarded.address, 20, keys=own) as client:
            for use in (client.sessions, client.subscribe):
                with pytest.raises(QueryError, match="key") as refused:
                    await use()
                assert refused.value.code == "unauthenticated"

        def blocking(own: Any = own) -> str:
            with QueryClient(guarded.address, 20, keys=own) as client, pytest.raises(QueryError) as refused:
                client.subscribe()
            return refused.value.code

        assert await in_thread(blocking) == "unauthenticated"


async def test_https_is_trusted_by_its_authority_alone(pem: tuple[Path, Path]) -> None:  # noqa: F811
    config = HttpConfig(tls_certificate_file=str(pem[0]), tls_key_file=str(pem[1]))
    made = await Daemon("http", tenants=Tenants(TABLES), tls=tls_of(config)).start()
    made.replies = [(messages.ListSessions(0), SESSIONS)]
    trusted = ssl.create_default_context(cafile=str(pem[0]))

    def blocking() -> Any:
        with QueryClient(made.address, 20, keys=DESK, tls=trusted) as client:
            return plain(client.sessions())

    assert await in_thread(blocking) == plain(SESSIONS)
    begun = time.monotonic()
    async with AsyncQueryClient(made.address, 20, keys=DESK) as client:
        for use in (client.sessions, client.subscribe):
            with pytest.raises(QueryError, match="certificate") as refused:
                await use()
            assert refused.value.code == "unauthenticated"
    assert time.monotonic() - begun < 15, "no other try will do better"
    await made.server.stop()


async def test_a_blocking_client_works_inside_a_running_event_loop(daemon: Daemon) -> None:
    """As a notebook has one; the daemon needs this one, so it is asked from a loop elsewhere."""
    daemon.replies = [(messages.ListSessions(0), SESSIONS)]

    async def cell() -> Any:
        with QueryClient(daemon.address, 20) as client:
            return plain(client.sessions())

    assert await in_thread(asyncio.run, cell()) == plain(SESSIONS)


def test_keys_and_addresses_of_the_other_kind_are_refused() -> None:
    curve = ClientKeys(PUBLIC, CURVE.public, CURVE.secret)
    for address, options in (
        ("tcp://127.0.0.1:1", {"keys": DESK}),
        ("tcp://127.0.0.1:1", {"tls": ssl.create_default_context()}),
        ("http://127.0.0.1:1", {"keys": curve}),
        ("http://[::1", {}),
        ("http://", {}),
        ("nowhere", {}),
    ):
        for kind in (QueryClient, AsyncQueryClient):
            with pytest.raises(QueryError) as refused:
                kind(address, 0.5, **options)  # type: ignore[arg-type]  # by name
            assert refused.value.code == "bad_request", address


async def test_a_server_that_is_no_daemon_is_named() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nproxy"[:-1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncQueryClient(f"http://127.0.0.1:{port}", 5) as client:
        for use in (client.sessions, client.subscribe):
            with pytest.raises(QueryError, match="502") as refused:
                await use()
            assert refused.value.code == "engine"
