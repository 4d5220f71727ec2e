"""What is refused before the engine sees it, over every transport: too many choices, messages, characters."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from mcp import Client as Agent

from daemon.api import messages
from daemon.api.generation import MAX_MESSAGES
from daemon.api.messages import MAX_CHOICE_CHARS, MAX_CHOICES, MAX_QUESTION_CHARS
from daemon.api.serving import generation_routes
from engine.model import constrained
from feeds.decoding import MAX_MESSAGE_CHARS, Undecodable
from tests.daemon.api.generator import FakeGenerator
from tests.daemon.api.test_api_http_listeners import Bench, serving
from tests.daemon.api.test_api_mcp import Desk
from tests.kit.http import conversing, http_server, request

LONG = "x" * MAX_QUESTION_CHARS
MANY = [f"c{n}" for n in range(MAX_CHOICES)]
CHOICE = "x" * MAX_CHOICE_CHARS
SAID = {"role": "user", "content": "hello"}
PARTS = [{"type": "text", "text": "x"}] * MAX_MESSAGES
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def test_a_prompt_has_no_more_choices_than_the_engine_takes() -> None:
    assert MAX_CHOICES == constrained.MAX_CHOICES


@pytest.mark.parametrize(
    ("kind", "fits", "more"),
    [
        ("ask", {"session": "a", "question": LONG}, {"question": LONG + "x"}),
        ("ask", {"session": "a", "question": "?", "choices": MANY}, {"choices": [*MANY, "x"]}),
        (
            "ask",
            {"session": "a", "question": "?", "choices": [CHOICE, "NO"]},
            {"choices": [CHOICE + "x", "NO"]},
        ),
        ("set_question", {"session": "a", "name": "q", "text": LONG}, {"text": LONG + "x"}),
        (
            "set_question",
            {"session": "a", "name": "q", "text": "?", "choices": MANY},
            {"choices": [*MANY, "x"]},
        ),
        ("answers", {"session": "a", "question": LONG}, {"question": LONG + "x"}),
        (
            "label",
            {"session": "a", "question": LONG, "data_version": 1, "choice": CHOICE},
            {"choice": CHOICE + "x"},
        ),
        ("open", {"choices": MANY}, {"choices": [*MANY, "x"]}),
        ("complete", {"text": "x", "choices": MANY}, {"choices": [*MANY, "x"]}),
    ],
)
def test_a_request_with_too_much_of_it_is_not_decoded(
    kind: str, fits: dict[str, Any], more: dict[str, Any]
) -> None:
    asked = {"type": kind, "id": 1, **fits}
    assert messages.decode_request(msgspec.msgpack.encode(asked))
    with pytest.raises(Undecodable, match="length <=") as refused:
        messages.decode_request(msgspec.msgpack.encode(asked | more))
    assert refused.value.readable  # a `bad_request` with the request's id


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = await serving()
    yield made
    await made.server.stop()


async def test_too_many_choices_are_refused_over_every_transport(bench: Bench) -> None:
    asked = {"session": "a", "question": "?", "choices": [*MANY, "x"]}
    over_http = await request(bench.port, "POST", "/v1/ask", asked)
    assert (over_http.status, over_http.json["code"]) == (400, "bad_request")
    async with conversing(bench.port) as socket:
        over_socket = await socket.ask(type="ask", id=1, **asked)
    assert (over_socket["id"], over_socket["code"]) == (1, "bad_request")
    desk = Desk()
    async with Agent(desk.server.sdk) as agent:
        over_mcp = await agent.call_tool("ask", asked)
    assert (over_mcp.is_error, over_mcp.structured_content["code"]) == (True, "bad_request")
    assert bench.asked == desk.asked == []


@pytest.fixture
async def generating() -> AsyncIterator[tuple[int, FakeGenerator]]:
    generator = FakeGenerator()
    async with http_server(*generation_routes(generator, lambda outcome: None)) as server:
        yield server.port, generator


@pytest.mark.parametrize(
    ("path", "fits", "more"),
    [
        (CHAT, {"messages": [SAID] * MAX_MESSAGES}, {"messages": [SAID] * (MAX_MESSAGES + 1)}),
        (
            CHAT,
            {"messages": [SAID | {"content": PARTS}]},
            {"messages": [SAID | {"content": [*PARTS, PARTS[0]]}]},
        ),
        (CHAT, {"messages": [SAID], "foretick": {"choices": MANY}}, {"foretick": {"choices": [*MANY, "x"]}}),
        (RESPONSES, {"input": [SAID] * MAX_MESSAGES}, {"input": [SAID] * (MAX_MESSAGES + 1)}),
        (MESSAGES, {"messages": [SAID] * MAX_MESSAGES}, {"messages": [SAID] * (MAX_MESSAGES + 1)}),
        (MESSAGES, {"messages": [SAID], "system": PARTS}, {"system": [*PARTS, PARTS[0]]}),
        ("/v1/messages/count_tokens", {"messages": [SAID] * MAX_MESSAGES}, {"messages": [SAID] * 20_000}),
        ("/v1/completions", {"prompt": [1] * 2048}, {"prompt": [1] * 2049}),
        ("/v1/completions", {"prompt": [[1] * 2048]}, {"prompt": [[1] * 2049]}),
    ],
)
async def test_too_much_of_a_chat_is_a_bad_request_that_names_the_member(
    generating: tuple[int, FakeGenerator], path: str, fits: dict[str, Any], more: dict[str, Any]
) -> None:
    port, generator = generating
    asked = {"model": "tape", "max_tokens": 4, **fits}
    assert (await request(port, "POST", path, asked)).status == 200
    generator.asked.clear()
    refused = await request(port, "POST", path, asked | more)
    assert (refused.status, generator.asked) == (400, [])
    error = refused.json["error"]
    assert next(iter(more)) in error.get("param", error["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [SAID]}),
        (CHAT, {"model": "tape", "messages": [SAID | {"role": "x" * 900_000}]}),
        (CHAT, {"model": "tape", "messages": [SAID], "foretick": {"x" * 900_000: 1}}),
        (RESPONSES, {"input": "hello"}),
        (MESSAGES, {"messages": [SAID], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hello"}),
    ],
)
async def test_an_error_does_not_repeat_all_that_was_sent(
    generating: tuple[int, FakeGenerator], path: str, body: dict[str, Any]
) -> None:
    asked = {"model": "x" * 900_000} | body
    refused = await request(generating[0], "POST", path, asked)
    assert refused.status in (400, 404)
    assert len(refused.body) < 2 * MAX_MESSAGE_CHARS
    assert b"characters)" in refused.body
