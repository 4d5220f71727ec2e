"""Traces of one real daemon: from headers of a client and of records to a collector and `foretick trace`."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from click.testing import CliRunner

from daemon.api.messages import QueryError
from daemon.cli.trace import command
from daemon.config.schema import TracesConfig
from daemon.gateway.record_links import MOST
from feeds.market_data import Answer
from feeds.source import Incoming
from tests.kit import QueueSource, inproc_config, until
from tests.kit.inproc import RunningDaemon, running
from tests.kit.otlp import OtlpReceiver, receiving

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
ASK = {"session": "aaa", "question": "up?", "choices": ["YES", "NO"]}
CHAT = {"model": "session:aaa", "messages": [{"role": "user", "content": "Up?"}], "max_tokens": 3}
KEPT = 40


@dataclass
class Traced(RunningDaemon):
    collector: OtlpReceiver

    async def exported(self, trace_id: str) -> list[Any]:
        """The spans of a trace, when they have come."""
        found: list[Any] = []

        def come() -> bool:
            found[:] = [span for span in self.collector.spans if span.trace_id.hex() == trace_id]
            return bool(found)

        await until(come)
        return found

    def trace(self, name: str, *options: str) -> Any:
        endpoint = self.endpoint
        return CliRunner().invoke(command, [name, "--endpoint", endpoint, *options], catch_exceptions=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced() -> AsyncIterator[Traced]:
    async with receiving() as collector:
        settings = TracesConfig(kept=KEPT, endpoint=collector.endpoint, resource=("desk=west",))
        async with running(inproc_config(("V:AAA", "V:BBB"), traces=settings), QueueSource()) as daemon:
            yield Traced(daemon.gateway, daemon.source, daemon.sink, daemon.tape, collector)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def check_tree(spans: list[Any]) -> None:
    """One root, children one after the other within it, ids of their own."""
    root, *children = spans
    assert {child.parent_span_id for child in children} == {root.span_id}
    assert len({span.span_id for span in spans}) == len(spans)
    at = root.start_time_unix_nano
    for child in children:
        assert at <= child.start_time_unix_nano <= child.end_time_unix_nano <= root.end_time_unix_nano
        at = child.end_time_unix_nano


async def test_an_ask_goes_on_its_callers_trace_and_says_so(traced: Traced) -> None:
    await traced.advance(2)
    reply = await traced.http("POST", "/v1/ask", ASK, CALLER)
    version, trace_id, span_id, flags = reply.headers["traceparent"].split("-")
    assert (version, trace_id, flags, reply.json["trace_id"]) == ("00", TRACE, "01", TRACE)
    assert span_id != SPAN
    spans = await traced.exported(TRACE)
    check_tree(spans)
    root = spans[0]
    assert (root.span_id.hex(), root.parent_span_id.hex()) == (span_id, SPAN)
    assert [span.name for span in spans] == ["request", "send", "queue", "prefill", "decode", "reply"]
    known = attributes(root)
    assert known["foretick.session"] == "aaa"
    assert known["foretick.data_version"] == reply.json["data_version"]
    assert known["foretick.computed_tokens"] > 0
    assert known["foretick.reused_tokens"] > 0
    assert known["foretick.cached"] is False
    (resource,) = traced.collector.requests[0].resource_spans
    assert {"service.name": "foretick", "desk": "west"}.items() <= attributes(resource.resource).items()


async def test_the_compatible_apis_are_traced_and_a_stream_is_too(traced: Traced) -> None:
    for stream in (False, True):
        reply = await traced.http(
            "POST", "/v1/chat/completions", CHAT | {"max_tokens": 3 + stream, "stream": stream}
        )
        assert reply.status == 200
        trace_id = reply.headers["traceparent"].split("-")[1]
        spans = await traced.exported(trace_id)
        check_tree(spans)
        assert [span.name for span in spans][1:5] == ["send", "queue", "prefill", "decode"]
        assert spans[0].parent_span_id == b""


async def test_an_ask_of_the_query_socket_names_its_trace(traced: Traced) -> None:
    mine = "1" * 32
    asked = {"choices": ("YES", "NO"), "traceparent": f"00-{mine}-{SPAN}-01"}
    reply = await traced.call("ask", "aaa", "down?", **asked)
    assert reply.trace_id == mine
    other = await traced.call("ask", "aaa", "higher?", choices=("YES", "NO"))
    assert len(other.trace_id) == 32
    assert other.trace_id != mine
    (found,) = (await traced.call("trace", other.trace_id)).traces
    assert (found.kind, found.session, found.error, found.cached) == ("request", "aaa", "", False)
    spans = [span.name for span in found.spans]
    assert spans == ["send", "queue", "prefill", "decode", "reply"]
    with pytest.raises(QueryError) as failed:
        await traced.call("ask", "aaa", "x " * 8000, traceparent=f"00-{'2' * 32}-{SPAN}-00")
    (lost,) = (await traced.call("trace", "2" * 32)).traces
    assert (lost.error, lost.parent_id) == (failed.value.code, SPAN)


async def test_a_ready_answer_is_linked_with_the_trace_that_made_it(traced: Traced) -> None:
    answer = traced.answers("aaa")[-1]
    reply = await traced.call("ask", "aaa", answer.question)
    assert reply.cached
    (found,) = (await traced.call("trace", reply.trace_id)).traces
    assert (found.cached, found.answer_id) == (True, answer.answer_id)
    assert found.links[0].split("-")[1] == trace_of(answer)


def trace_of(answer: Answer) -> str:
    return hashlib.sha256(answer.answer_id.encode()).hexdigest()[:32]


async def test_an_answer_carries_its_trace_and_links_its_records(traced: Traced) -> None:
    for _ in range(2):  # the second one closes the bar of the first
        version = traced.state().version + 1
        traced.source.put([with_header(n, each) for n, each in enumerate(traced.tape.next(20), 1)])
        await until(lambda version=version: traced.answered("aaa", version))
    answer = traced.answers("aaa")[-1]
    sent = [
        headers for *_, headers in traced.sink.sent if headers.get("answer_id") == answer.answer_id.encode()
    ]
    header = sent[0]["traceparent"].decode()
    assert header.split("-")[1] == trace_of(answer)
    spans = await traced.exported(trace_of(answer))
    check_tree(spans)
    root = spans[0]
    assert header == f"00-{trace_of(answer)}-{root.span_id.hex()}-01"
    assert (root.parent_span_id, attributes(root)["foretick.answer_id"]) == (b"", answer.answer_id)
    assert len(root.links) == MOST
    assert {link.trace_id.hex() for link in root.links} <= {f"{n:032x}" for n in range(1, 41)}
    names = [span.name for span in spans[1:]]
    assert names[-5:] == ["queue", "prefill", "decode", "hand_over", "publish"]
    assert "ring_wait" in names


def with_header(number: int, message: Incoming) -> Incoming:
    header = f"00-{number:032x}-{SPAN}-01".encode()
    return msgspec.structs.replace(message, headers={**message.headers, "traceparent": header})


async def test_the_command_draws_a_waterfall(traced: Traced) -> None:
    answer = traced.answers("bbb")[-1]
    drawn = await in_thread(traced, answer.answer_id)
    assert drawn.exit_code == 0, drawn.output
    assert f"answer {trace_of(answer)}" in drawn.stdout
    assert f"bbb, version {answer.data_version}" in drawn.stdout
    assert [word in drawn.stdout for word in ("prefill", "publish", "█", "%")] == [True] * 4
    written = json.loads((await in_thread(traced, answer.answer_id, "--json")).stdout)
    assert (written["answer_id"], written["kind"]) == (answer.answer_id, "answer")
    http = await traced.http("GET", f"/v1/traces/{trace_of(answer)}")
    assert (http.status, http.json["traces"]) == (200, [written])


async def in_thread(traced: Traced, *arguments: str) -> Any:
    return await asyncio.to_thread(traced.trace, *arguments)


async def test_what_is_forgotten_is_said_with_how_many_are_kept(traced: Traced) -> None:
    first = traced.answers("aaa")[0]
    await traced.advance(KEPT // 12 + 1)
    gone = await in_thread(traced, first.answer_id)
    assert (gone.exit_code, gone.stdout) == (1, "")
    assert gone.stderr.count("\n") == 1
    assert f"traces.kept is {KEPT}" in gone.stderr
    missing = await traced.http("GET", f"/v1/traces/{'f' * 32}")
    assert (missing.status, missing.json["code"]) == (404, "unknown_trace")
