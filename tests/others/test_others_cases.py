"""Cases of suites that no registry has in a form that runs here, rebuilt from the published behaviour.

Responses: what the Open Responses specification demands of a response and of its stream. Chats and messages:
what llama.cpp's server is tested for. Both on a real model.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from daemon.config.schema import UNTRAINED, ModelConfig, SchedulerConfig
from tests.kit import inproc_config
from tests.kit.http import Reply
from tests.kit.inproc import running

RESPONSE = frozenset(
    (
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "error", "model"),
        *("previous_response_id", "instructions", "output", "usage", "text", "truncation", "reasoning"),
        *("tools", "tool_choice", "parallel_tool_calls", "max_tool_calls", "max_output_tokens"),
        *("temperature", "top_p", "top_logprobs", "presence_penalty", "frequency_penalty"),
        *("user", "store", "background", "service_tier", "metadata", "safety_identifier"),
        "prompt_cache_key",
    )
)
"""Members that a response must have in every state."""
ITEMS = {
    "response.output_item.added": "output_index item",
    "response.content_part.added": "item_id output_index content_index part",
    "response.output_text.delta": "item_id output_index content_index delta logprobs",
    "response.output_text.done": "item_id output_index content_index text logprobs",
    "response.content_part.done": "item_id output_index content_index part",
    "response.output_item.done": "output_index item",
}
"""Members of the events between, in their order, beside type and number."""
pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL, TOKENS = "the-model", 12
Post = Callable[..., Awaitable[Reply]]
"""Posts the members of a request to a path."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def post() -> AsyncIterator[Post]:
    config = inproc_config(
        model=ModelConfig(path=UNTRAINED, aliases=(MODEL,)),
        sessions=(),
        standing="none",
        scheduler=SchedulerConfig(max_new_tokens=TOKENS, max_prompt_tokens=256),
    )
    async with running(config) as daemon:
        yield lambda path, **members: daemon.http("POST", f"/v1/{path}", {"model": MODEL, **members})


def events_of(reply: Reply) -> list[Any]:
    """The data of a stream's events, but the end's mark."""
    lines = reply.body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def user(text: str) -> dict[str, str]:
    return {"type": "message", "role": "user", "content": text}


TURNS = [
    user("My name is Alice."),
    {"type": "message", "role": "assistant", "content": "Hello."},
    user("Who am I?"),
]


@pytest.mark.parametrize(
    "asked",
    [
        [user("Say hello in three words.")],
        [{"type": "message", "role": "system", "content": "You are a pirate."}, user("Say hello.")],
        [{"type": "message", "role": "developer", "content": "You are a pirate."}, user("Say hello.")],
        TURNS,
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}],
        "Hello.",
    ],
    ids=["text", "system", "developer", "turns", "parts", "string"],
)
async def test_open_responses_response_has_every_member(post: Post, asked: object) -> None:
    reply = await post("responses", input=asked, temperature=0)
    found = reply.json
    assert reply.status == 200
    assert found.keys() >= RESPONSE
    assert found["status"] == ("completed" if found["incomplete_details"] is None else "incomplete")
    assert (found["completed_at"] is not None) == (found["status"] == "completed")
    (message,) = found["output"]
    assert message.keys() >= {"id", "type", "status", "role", "content"}
    assert message["content"][0].keys() >= {"type", "text", "annotations", "logprobs"}
    used = found["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"] > 0
    assert used["input_tokens_details"].keys() >= {"cached_tokens"}
    assert used["output_tokens_details"].keys() >= {"reasoning_tokens"}


async def test_open_responses_stream(post: Post) -> None:
    reply = await post("responses", input=TURNS, stream=True, temperature=0)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    first, second, *between, last = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert last["type"] in ("response.completed", "response.incomplete")
    for each in (first, second, last):
        assert each["response"].keys() >= RESPONSE
        assert each["response"]["id"] == first["response"]["id"]
    order = list(dict.fromkeys(each["type"] for each in between))
    assert order == list(ITEMS)
    for each in between:
        assert each.keys() == {"type", "sequence_number", *ITEMS[each["type"]].split()}
    (item,) = last["response"]["output"]
    assert {each.get("item_id", each.get("item", {}).get("id")) for each in between} == {item["id"]}
    text = "".join(each["delta"] for each in between if each["type"] == "response.output_text.delta")
    assert text == item["content"][0]["text"]
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [each["type"] for each in events]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0]",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ],
    ids=["tools", "stored", "image", "no schema"],
)
async def test_open_responses_what_is_not_supported_is_said(post: Post, members: Any, param: str) -> None:
    reply = await post("responses", **{"input": "Hello.", **members})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book?"}]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
        [],
    ],
    ids=str,
)
async def test_llama_chats_that_are_none_are_refused(post: Post, messages: object) -> None:
    reply = await post("chat/completions", messages=messages)
    assert reply.status == 400
    assert reply.json["error"].keys() == {"message", "type", "param", "code"}


async def test_llama_parts_are_the_text_that_they_make(post: Post) -> None:
    whole = [BOOK[0], {"role": "user", "content": "What isthe best"}]
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best"}]
    ways = [
        await post("chat/completions", messages=messages, temperature=0)
        for messages in (whole, [BOOK[0], {"role": "user", "content": parts}])
    ]
    texts = [each.json["choices"][0]["message"]["content"] for each in ways]
    assert texts[0] == texts[1]
    assert ways[0].json["usage"]["prompt_tokens"] == ways[1].json["usage"]["prompt_tokens"]


async def test_llama_stream_is_the_whole_answer_and_each_chunk_is_of_one_completion(post: Post) -> None:
    asked = {"messages": BOOK, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 4}
    whole = (await post("chat/completions", **asked)).json
    stream = await post("chat/completions", **asked, stream=True, stream_options={"include_usage": True})
    assert stream.body.endswith(b"data: [DONE]\n\n")
    chunks = events_of(stream)
    assert len({(each["id"], each["created"], each["model"]) for each in chunks}) == 1
    *pieces, usage = chunks
    assert usage["choices"] == []
    assert {**usage["usage"], "prompt_tokens_details": None} == {
        **whole["usage"],
        "prompt_tokens_details": None,
    }
    assert all(each["usage"] is None for each in pieces)
    deltas = [each["choices"][0] for each in pieces]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert all("role" not in each["delta"] for each in deltas[1:])
    assert deltas[-1]["delta"] == {}
    assert [each["finish_reason"] for each in deltas[:-1]] == [None] * (len(deltas) - 1)
    (choice,) = whole["choices"]
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    assert "".join(each["delta"].get("content", "") for each in deltas) == choice["message"]["content"]
    tokens = [token for each in deltas if each["logprobs"] for token in each["logprobs"]["content"]]
    for token in tokens:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 4
        assert token["bytes"] is not None
    assert [token["token"] for token in tokens] == [token["token"] for token in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"type": "text"}, 200),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "42"}}}, 200),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "foooooo"}}}, 200),
        ({"type": "json_object"}, 400),
        ({"type": "sound"}, 400),
        ({"type": "json_schema", "json_schema": {"schema": 123}}, 400),
        ({"type": "json_schema", "json_schema": {"schema": {"type": 123}}}, 400),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}, 400),
    ],
    ids=str,
)
async def test_llama_response_formats(post: Post, form: Any, status: int) -> None:
    reply = await post("chat/completions", messages=BOOK, response_format=form)
    assert reply.status == status
    if status != 200:
        assert "error" in reply.json
    elif form["type"] == "json_schema":
        schema = form["json_schema"]["schema"]
        assert json.loads(reply.json["choices"][0]["message"]["content"]) == schema["const"]


@pytest.mark.parametrize("stream", [False, True])
async def test_llama_prompts_that_are_too_long_fail_before_the_stream(post: Post, stream: bool) -> None:
    long = [{"role": "user", "content": "price 100 " * 300}]
    reply = await post("chat/completions", messages=long, stream=stream)
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")


async def test_llama_same_seeds_give_same_texts_also_at_the_same_time(post: Post) -> None:
    hot = {"prompt": "I believe", "temperature": 1.5, "max_tokens": 8}

    async def text(seed: int) -> str:
        found: str = (await post("completions", **hot, seed=seed)).json["choices"][0]["text"]
        return found

    texts = await asyncio.gather(*(text(seed) for seed in (42, 42, 42, 43, 44)))
    assert len(set(texts[:3])) == 1
    assert len(set(texts[2:])) > 1


async def test_llama_prompts_of_texts_and_tokens(post: Post) -> None:
    one = await post("completions", prompt="I believe", temperature=0, n=1)
    both = await post("completions", prompt=["I believe", [5, 6, 7]], temperature=0)
    assert [each["index"] for each in both.json["choices"]] == [0, 1]
    assert both.json["choices"][0]["text"] == one.json["choices"][0]["text"]
    for prompt in ([], "", ["a", 5], [["a"]], [-1], {"a": 1}, None):
        assert (await post("completions", prompt=prompt)).status == 400


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "You are a helpful assistant."},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is"}] * 2}]},
        {"messages": [user("Hello"), {"role": "assistant", "content": "Hi"}, user("How are you?")]},
        {"stop_sequences": ["\n", "END"]},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 40},
        {"metadata": {"user_id": "test_user_123"}},
        {"thinking": {"type": "disabled"}},
    ],
    ids=lambda more: next(iter(more), "plain"),
)
async def test_llama_messages(post: Post, more: dict[str, Any]) -> None:
    members = {"max_tokens": 8, "messages": [{"role": "user", "content": "Say hello"}], **more}
    reply = await post("messages", **members)
    found = reply.json
    assert (reply.status, found["type"], found["role"]) == (200, "message", "assistant")
    assert found["content"][0]["type"] == "text"
    assert found["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
    assert all(isinstance(found["usage"][name], int) for name in ("input_tokens", "output_tokens"))
    counted = {name: members[name] for name in ("messages", "system") if name in members}
    tokens = (await post("messages/count_tokens", **counted)).json
    read = found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]
    assert tokens == {"input_tokens": read}


async def test_llama_messages_stream_has_one_block(post: Post) -> None:
    asked = {"max_tokens": 8, "messages": [{"role": "user", "content": "Say hello"}], "stream": True}
    events = events_of(await post("messages", **asked))
    kinds = list(dict.fromkeys(each["type"] for each in events if each["type"] != "ping"))
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert {each["index"] for each in events if "index" in each} == {0}
    assert events[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("messages", [None, [], "Hello", [{"role": "tool", "content": "Hello"}]], ids=str)
async def test_llama_messages_that_are_none_are_refused(post: Post, messages: object) -> None:
    reply = await post("messages", max_tokens=8, messages=messages)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
