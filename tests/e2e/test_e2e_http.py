"""The HTTP API of one real daemon: reading and changing, pushed records, events by SSE and WebSocket."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio

from feeds.connectors.http import HttpSourceConnector
from feeds.push_source import PushedSource
from tests.kit import SECOND, START, QueueSource, inproc_config, trade, until
from tests.kit.http import conversing, listening
from tests.kit.inproc import ANSWERS, DEAD, RunningDaemon, Tape, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
LINES, MSGPACK, CSV, OURS = (
    {"content-type": kind}
    for kind in ("application/x-ndjson", "application/msgpack", "text/csv", "application/json")
)


@dataclass
class Desk(RunningDaemon):
    pushed: PushedSource


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk() -> AsyncIterator[Desk]:
    pushed = HttpSourceConnector(max_waiting=50, max_body_bytes=4096).open("http", 1.0)
    assert isinstance(pushed, PushedSource)
    config = inproc_config(("V:AAA", "V:BBB", "V:PPP"))
    async with running(config, [QueueSource(), pushed], Tape("V:AAA", "V:BBB")) as daemon:
        yield Desk(daemon.gateway, daemon.source, daemon.sink, daemon.tape, pushed)


async def test_every_read_is_that_of_the_query_socket(desk: Desk) -> None:
    await desk.advance(2)
    listed = (await desk.http("GET", "/v1/sessions")).json["sessions"]
    assert [each["name"] for each in listed] == ["aaa", "bbb", "ppp"]
    assert listed[0]["data_version"] == (await desk.call("sessions")).sessions[0].data_version
    one = (await desk.http("GET", "/v1/sessions/bbb")).json
    assert (one["name"], one["symbol"], len(one["questions"])) == ("bbb", "V:BBB", 6)
    questions = (await desk.http("GET", "/v1/questions")).json["sessions"]
    assert [each["session"] for each in questions] == ["aaa", "bbb", "ppp"]
    expected = msgspec.to_builtins((await desk.call("questions", "aaa")).questions)
    assert questions[0]["questions"] == msgspec.json.decode(msgspec.json.encode(expected))
    assert (await desk.http("GET", "/v1/questions?session=aaa")).json["sessions"] == questions[:1]
    answers = (await desk.http("GET", "/v1/answers")).json["answers"]
    assert len(answers) == 12
    name = answers[0]["question"]
    found = await desk.http("GET", f"/v1/answers?session=aaa&question={name}&min_version=1")
    assert [(a["session"], a["question"]) for a in found.json["answers"]] == [("aaa", name)]
    assert (await desk.http("GET", "/v1/stats")).json["values"]
    ask = {"session": "aaa", "question": "up?", "choices": ["YES", "NO"]}
    asked = await desk.http("POST", "/v1/ask", ask)
    assert (asked.status, asked.json["text"] in ("YES", "NO")) == (200, True)
    health = (await desk.http("GET", "/v1/health")).json
    assert (health["status"], health["ready"], health["silent"], health["late"]) == ("ok", True, [], [])
    version = (await desk.http("GET", "/v1/version")).json
    assert version == health["version"]
    assert version["model"]


async def test_sessions_and_questions_change_as_on_the_query_socket(desk: Desk) -> None:
    states = desk.gateway.sessions.states
    session = {"name": "ccc", "symbol": "V:CCC", "retention_tokens": 512}
    added = await desk.http("POST", "/v1/sessions", session)
    assert (added.status, [s["name"] for s in added.json["sessions"]][-1]) == (201, "ccc")
    changed = await desk.http("PATCH", "/v1/sessions/ccc", {"silent_after": "1s"})
    assert (changed.status, states["ccc"].silent_after_ns) == (200, SECOND)
    question = {"session": "ccc", "name": "mine", "text": "Is it so?", "choices": ["YES", "NO"]}
    put = await desk.http("POST", "/v1/questions", question)
    assert (put.status, put.json["questions"][-1]["name"]) == (200, "mine")
    gone = await desk.http("DELETE", "/v1/questions/ccc/mine")
    assert "mine" not in [each["name"] for each in gone.json["questions"]]
    await until(lambda: states["ccc"].is_silent)
    health = (await desk.http("GET", "/v1/health")).json
    assert (health["status"], health["silent"]) == ("degraded", ["ccc"])
    removed = await desk.http("DELETE", "/v1/sessions/ccc")
    assert "ccc" not in [s["name"] for s in removed.json["sessions"]]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/sessions/zzz", None, 404, "unknown_session"),
        ("DELETE", "/v1/sessions/zzz", None, 404, "unknown_session"),
        ("GET", "/v1/answers?session=zzz", None, 404, "unknown_session"),
        ("GET", "/v1/answers?session=aaa&question=zzz", None, 400, "bad_request"),
        ("GET", "/v1/answers?min_version=3", None, 400, "bad_request"),
        ("GET", "/v1/answers?session=aaa&min_version=99&timeout_s=0", None, 504, "timeout"),
        ("GET", "/v1/answers?min_version=x", None, 400, "bad_request"),
        ("GET", "/v1/answers?session=aaa&session=bbb", None, 400, "bad_request"),
        ("GET", "/v1/sessions?verbose=1", None, 400, "bad_request"),
        ("GET", "/v1/answers?question=%ff", None, 400, "bad_request"),
        ("POST", "/v1/sessions", {"name": "aaa", "symbol": "V:AAA"}, 400, "bad_request"),
        ("POST", "/v1/sessions", {"name": "d", "symbol": "V:D", "colour": "red"}, 400, "bad_request"),
        ("POST", "/v1/sessions", [], 400, "bad_request"),
        ("PATCH", "/v1/sessions/aaa", {"name": "bbb"}, 400, "bad_request"),
        ("POST", "/v1/questions", {"session": "aaa", "name": "x y", "text": "?"}, 400, "bad_request"),
        ("POST", "/v1/labels", {"session": "aaa", "question": "q"}, 400, "bad_request"),
        ("GET", "/v1/events?event=trade", None, 400, "bad_request"),
        ("GET", "/v1/events?who=me", None, 400, "bad_request"),
        ("GET", "/v1/ws", None, 426, "bad_request"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("PUT", "/v1/sessions", {}, 405, "method_not_allowed"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_said(
    desk: Desk, method: str, path: str, body: object, status: int, code: str
) -> None:
    reply = await desk.http(method, path, body)
    assert (reply.status, reply.json["code"]) == (status, code), reply.json
    assert reply.json["message"]


async def test_a_stream_goes_on_where_it_ended(desk: Desk) -> None:
    port = desk.port
    async with listening(port, "?session=aaa") as mine:
        assert mine.reply.headers["content-type"].startswith("text/event-stream")
        await desk.advance()
        seen = [await mine.next() for _ in range(8)]
        assert {event.data["session"] for event in seen} == {"aaa"}
        assert seen[0].kind == "data_updated"
        assert sorted(event.kind for event in seen) == ["answer"] * 6 + ["data_updated", "flash_ready"]
        version = seen[0].data["data_version"]
    await desk.advance(2)  # while nobody listens
    async with listening(port, "?session=aaa&event=data_updated", last_event_id=seen[0].id) as again:
        later = [(await again.next()).data["data_version"] for _ in range(2)]
        assert later == [version + 1, version + 2]
    async with listening(port, last_event_id="1.99") as stranger:
        lost = await stranger.next()
        assert lost.kind == "lost"
        after = lost.data.pop("after")
        assert lost.data == {"events": "unknown", "exact": False, "reason": "restarted"}
        assert (lost.id, after.endswith(".0")) == (after, True)


async def test_a_socket_asks_and_listens(desk: Desk) -> None:
    async with conversing(desk.port) as socket:
        assert (await socket.ask(type="sessions", id=7))["id"] == 7
        begun = await socket.ask(type="subscribe", id=1, sessions=["bbb"], events=["answer"])
        assert begun["type"] == "subscribed"
        await desk.advance()
        event = await socket.next("event")
        assert (event["subscription"], event["data"]["type"]) == (1, "answer")
        assert event["data"]["session"] == "bbb"
        await socket.send({"type": "ask", "id": 8, "session": "zzz", "question": "?"})
        error = await socket.next("error")
        assert (error["id"], error["code"]) == (8, "unknown_session")
        again = {"type": "subscribe", "id": 3, "after": begun["newest"], "events": ["data_updated"]}
        await socket.send(again)
        await socket.next("subscribed")
        while (event := await socket.next("event"))["subscription"] != 3:
            pass
        assert event["data"]["type"] == "data_updated"


# Pushed records.


def trades(*seconds: int) -> list[bytes]:
    return [trade("V:PPP", START + n * SECOND) for n in seconds]


async def test_pushed_records_are_answered_in_each_of_their_forms(desk: Desk) -> None:
    one, two, *rest = trades(*range(6))
    packed = [msgspec.msgpack.encode(msgspec.json.decode(each)) for each in rest[:2]]
    bodies = [
        (one, OURS),
        (b"[" + two + b"]", OURS),
        (packed[0], MSGPACK),
        (msgspec.msgpack.encode([msgspec.Raw(packed[1])]), MSGPACK),
        (b"\n".join(rest[2:]) + b"\n\n", LINES),
    ]
    for body, kind in bodies:
        reply = await desk.http("POST", "/v1/data?replay=true", body, kind)
        assert (reply.status, reply.json["refused"]) == (202, 0), reply.json

    def found() -> list[msgspec.Struct]:
        mine = [a for a in desk.sink.messages(ANSWERS) if a.session == "ppp" and a.data_version]
        return [a for a in mine if a.inputs and a.inputs[-1].last_offset >= 4]

    await until(found, 60)
    assert {(each.topic, each.source) for each in found()[0].inputs} == {("http", "http")}  # type: ignore[attr-defined]  # an Answer
    assert desk.count("records", source="http") == 6
    assert desk.count("pushes", outcome="accepted") == 5
    assert reply.json["late"] == 0
    reply = await desk.http("POST", "/v1/data?replay=true", b"\n".join(trades(0, 99)), LINES)
    assert (reply.json["accepted"], reply.json["late"]) == (2, 1)


async def test_a_declared_format_is_read_line_by_line(desk: Desk) -> None:
    text = (
        b"timestamp,open,high,low,close,volume\n"
        b"2024-08-08T23:54:00,100,101,99,100.5,3\n"
        b"2024-08-08T23:55:00,100,101,99,nonsense,3\n"
        b"2024-08-08T23:56:00,100,101,99,100.5,3\n"
    )
    before = desk.count("records", source="http")
    reply = await desk.http("POST", "/v1/data?format=btc_perp_bars", text, CSV)
    told = reply.json
    assert (reply.status, told["accepted"], told["refused"]) == (202, 2, 1)
    assert [(e["line"], e["reason"]) for e in told["errors"]] == [(3, "price")]
    assert "nonsense" in told["errors"][0]["message"]
    await until(lambda: desk.count("records", source="http") == before + 3)
    assert desk.count("records_malformed", reason="price") == 1
    assert desk.count("pushes", outcome="partly") == 1


async def test_unusable_records_are_listed_and_go_to_the_dead_letters(desk: Desk) -> None:
    good, bad = trades(9)[0], trade("V:PPP", START, price="-1")
    body = b"\n".join([good, bad, b"{"])
    reply = await desk.http("POST", "/v1/data?replay=1", body, LINES)
    told = reply.json
    assert (reply.status, told["accepted"], told["refused"]) == (202, 1, 2)
    assert [(e["line"], e["reason"]) for e in told["errors"]] == [(2, "price"), (3, "json")]
    dead_letters = await until(lambda: len(found := desk.sink.messages(DEAD)) == 2 and found)
    assert {(dead_letter.topic, dead_letter.reason) for dead_letter in dead_letters} == {
        ("http", "price"),
        ("http", "json"),
    }
    reply = await desk.http("POST", "/v1/data", b"[1,", OURS)
    assert (reply.status, reply.json["accepted"], reply.json["errors"][0]["line"]) == (422, 0, 0)
    assert desk.count("pushes", outcome="refused") == 1


async def test_what_a_venue_sends_is_pushed_as_it_is(desk: Desk) -> None:
    """Messages in a declared format: one, or an array of them."""
    at = START // 10**6
    frames = [
        {"e": "trade", "T": at, "s": "PPP", "p": "0.5", "q": "2", "t": 7, "m": True},
        {"e": "trade", "T": at + 1, "s": "PPP", "p": "nonsense", "q": "2", "t": 8, "m": True},
        {"result": None, "id": 1},
        {"e": "trade", "T": at + 2, "s": "PPP", "p": "-1", "q": "2", "t": 9, "m": True},
        {"e": "aggTrade", "T": at + 3, "s": "PPP", "p": "0.75", "q": "1", "a": 10, "m": False},
    ]
    reply = await desk.http("POST", "/v1/data?format=binance", msgspec.json.encode(frames), OURS)
    told = reply.json
    assert (reply.status, told["accepted"], told["refused"], told["passed_over"]) == (202, 2, 2, 1)
    assert [(each["line"], each["reason"]) for each in told["errors"]] == [(2, "price"), (0, "price")]
    reply = await desk.http("POST", "/v1/data?format=binance", msgspec.json.encode(frames[0]), OURS)
    assert (reply.status, reply.json["accepted"]) == (202, 1)
    reply = await desk.http("POST", "/v1/data?format=binance", b"{", OURS)
    assert (reply.status, reply.json["errors"][0]["reason"]) == (422, "json")


@pytest.mark.parametrize(
    ("query", "body", "kind", "status", "part"),
    [
        ("", b"x", CSV, 415, "must be application/json or"),
        ("", b"x", {}, 415, "content type"),
        ("?format=btc_perp_bars", b"{}", OURS, 415, "must be text/csv"),
        ("?format=okx", b"x", CSV, 415, "must be application/json"),
        ("?format=databento", b"x", OURS, 400, "is of dbn files"),
        ("?format=../../etc/passwd", b"{}", CSV, 400, "must be one of"),
        ("?source=kafka", b"{}", OURS, 400, "must be one of http"),
        ("?sauce=http", b"{}", OURS, 400, "unknown field"),
        ("?date=tomorrow", b"{}", OURS, 400, "RFC3339"),
        ("", b"[" + b" " * 4096 + b"]", OURS, 413, "at most 4096 bytes"),
        ("", b"[" + b"1," * 50 + b"1]", OURS, 413, "at most 50 records"),
    ],
    ids=str,
)
async def test_a_body_that_cannot_be_taken_is_refused(
    desk: Desk, query: str, body: bytes, kind: dict[str, str], status: int, part: str
) -> None:
    reply = await desk.http("POST", f"/v1/data{query}", body, kind)
    assert (reply.status, part in reply.json["message"]) == (status, True), reply.json


async def test_a_full_queue_refuses_the_whole_body_and_takes_it_later(desk: Desk) -> None:
    desk.pushed.pause()  # as a full ring does
    before = desk.count("records", source="http")
    body = b"\n".join(trades(*range(20, 44)))
    push = "/v1/data?replay=1"
    statuses = [(await desk.http("POST", push, body, LINES)).status for _ in range(4)]
    refused = await desk.http("POST", push, body, LINES)
    assert (refused.status, refused.json["code"], refused.headers["retry-after"]) == (429, "busy", "1")
    desk.pushed.resume()
    await until(lambda: desk.pushed.waiting == 0)
    statuses.append((await desk.http("POST", push, body, LINES)).status)
    assert statuses[-1] == 202
    await until(lambda: desk.count("records", source="http") == before + 24 * statuses.count(202))


async def test_streams_and_sockets_end_with_the_daemon(desk: Desk) -> None:
    """The last test: it stops the daemon."""
    async with listening(desk.port) as stream, conversing(desk.port) as socket:
        await socket.ask(type="subscribe", id=1)
        stopping = asyncio.ensure_future(desk.gateway.stop())
        assert await stream.ended()
        with pytest.raises(EOFError, match="1012"):
            await socket.next("never")
        assert await asyncio.wait_for(stopping, 60)
