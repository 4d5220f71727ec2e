"""The OpenAI and Anthropic endpoints over HTTP by the official SDKs, and by bodies that no SDK sends."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api import anthropic as claude
from daemon.api.anthropic import MessageRequest, Messages
from daemon.api.compatible import STATUS, ApiError, ReplyIdentity
from daemon.api.generation import Finished, Generate, ModelEntry, SamplingDefaults, Turn
from daemon.api.http_server import HttpServer
from daemon.api.messages import ReplyMetadata
from daemon.api.openai import chat, common, completions, responses
from daemon.api.openai.chat import Chat, ChatRequest
from daemon.api.openai.completions import CompletionRequest, Completions
from daemon.api.openai.responses import ResponseRequest, Responses
from daemon.api.serving import MAX_BYTES, generation_routes
from metrics.catalogue import API_OUTCOMES
from tests.daemon.api.generator import SERVED, FakeGenerator
from tests.kit import until
from tests.kit.http import JSON as JSON_TYPE
from tests.kit.http import Reply, connected, head, http_server, request

USER = [{"role": "user", "content": "hello"}]


class Rig:
    """A server over a `FakeGenerator`, and the SDKs' clients."""

    def __init__(self, server: HttpServer, generator: FakeGenerator, outcomes: list[str]) -> None:
        self.server, self.generator, self.outcomes = server, generator, outcomes
        self.clients: list[openai.AsyncOpenAI | anthropic.AsyncAnthropic] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20} | options
        client = openai.AsyncOpenAI(**options)
        self.clients.append(client)
        return client

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        options = {"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 20} | options
        client = anthropic.AsyncAnthropic(**options)
        self.clients.append(client)
        return client

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        return await request(self.server.port, "POST", path, body, JSON_TYPE | (headers or {}))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    generator, outcomes = FakeGenerator(), list[str]()
    async with http_server(*generation_routes(generator, outcomes.append, ping_s=0.05)) as server:
        rig = Rig(server, generator, outcomes)
        yield rig
        for client in rig.clients:
            await client.close()
    assert generator.running == 0
    assert set(rig.outcomes) <= {*API_OUTCOMES, *STATUS}


async def test_models_are_the_daemons_own_and_its_sessions(rig: Rig) -> None:
    listed = await rig.openai().models.list()
    assert [each.id for each in listed.data] == ["tape", "session:btc"]
    assert (await rig.openai().models.retrieve("session:btc")).owned_by == "foretick"
    with pytest.raises(openai.NotFoundError) as missing:
        await rig.openai().models.retrieve("gpt")
    assert missing.value.code == "model_not_found"
    theirs = await rig.anthropic().models.list()
    assert [each.id for each in theirs.data] == ["tape", "session:btc"]
    assert (await rig.anthropic().models.retrieve("tape")).created_at.year == 2023
    with pytest.raises(anthropic.NotFoundError):
        await rig.anthropic().models.retrieve("claude")


async def test_chat(rig: Rig) -> None:
    client = rig.openai()
    found = await client.chat.completions.create(
        model="tape", messages=USER, logprobs=True, top_logprobs=2, n=2, seed=7, max_completion_tokens=9
    )
    assert [each.message.content for each in found.choices] == ["Up we go"] * 2
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].logprobs.content[0].top_logprobs[1].token == "No"
    usage = found.usage
    # the prompt counts once
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 4, 14)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert found.model_extra["foretick"]["untrained"] is True
    assert [each.index for each in rig.generator.asked] == [0, 1]
    assert rig.generator.asked[0].seed == 7
    assert rig.generator.asked[0].max_tokens == 9
    assert rig.generator.asked[0].temperature == 1.0  # the API's default


async def test_what_a_request_does_not_say_is_the_model_s_default(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = msgspec.structs.replace(
        SERVED, models=(ModelEntry("tape", "1", (), SamplingDefaults(0.6, 0.9, 20)),)
    )
    monkeypatch.setattr(rig.generator, "served", lambda client: served)
    client, claude = rig.openai(), rig.anthropic()
    await client.chat.completions.create(model="tape", messages=USER)
    await client.completions.create(model="tape", prompt="hello")
    said = await client.responses.create(model="tape", input="hello")
    await claude.messages.create(model="tape", max_tokens=9, messages=USER)
    assert [(e.temperature, e.top_p, e.top_k) for e in rig.generator.asked] == [(0.6, 0.9, 20)] * 4
    assert (said.temperature, said.top_p) == (0.6, 0.9)
    await client.chat.completions.create(
        model="tape", messages=USER, temperature=0.2, top_p=1, extra_body={"top_k": -1}
    )
    await client.chat.completions.create(model="tape", messages=USER, temperature=0)
    await client.chat.completions.create(model="session:btc", messages=USER)
    found = [(e.temperature, e.top_p, e.top_k) for e in rig.generator.asked[4:]]
    assert found == [(0.2, 1.0, 0), (0.0, 1.0, 0), (0.0, 1.0, 0)]


async def test_a_session_is_a_model_and_its_facts_come_with_answer_and_stream(rig: Rig) -> None:
    client = rig.openai()
    found = await client.chat.completions.create(
        model="session:btc", messages=USER, extra_body={"foretick": {"choices": ["UP", "DOWN"]}}
    )
    facts = found.model_extra["foretick"]
    assert (facts["data_version"], facts["probability"], facts["choice_set"]) == (7, 0.75, ["UP"])
    assert facts["flags"] == ["stale"]
    asked = rig.generator.asked[0]
    assert (asked.session, asked.choices, asked.temperature) == ("btc", ("UP", "DOWN"), 0.0)
    stream = await client.chat.completions.create(model="session:btc", messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].model_extra["foretick"]["data_version"] == 7
    message = await rig.anthropic().messages.create(model="session:btc", max_tokens=5, messages=USER)
    assert message.model_extra["foretick"]["staleness_ns"] == 4


async def test_chat_streams(rig: Rig) -> None:
    stream = await rig.openai().chat.completions.create(
        model="tape", messages=USER, stream=True, stream_options={"include_usage": True}, max_tokens=2
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == "Up we go"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 12
    assert all(each.usage is None for each in chunks[:-1])
    await until(lambda: rig.outcomes == ["done"])


async def test_the_sdks_helpers_for_streams_agree_with_the_whole_reply(rig: Rig) -> None:
    async with rig.openai().chat.completions.stream(model="tape", messages=USER) as stream:
        done = await stream.get_final_completion()
    assert done.choices[0].message.content == "Up we go"
    async with rig.openai().responses.stream(model="tape", input="hello") as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_response()
    assert answer.output_text == "Up we go"
    assert kinds[-1] == "response.completed"
    async with rig.anthropic().messages.stream(model="tape", max_tokens=9, messages=USER) as stream:
        assert "".join([text async for text in stream.text_stream]) == "Up we go"
        message = await stream.get_final_message()
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == (
        "end_turn",
        6,
        2,
    )


async def test_completions(rig: Rig) -> None:
    client = rig.openai()
    found = await client.completions.create(model="tape", prompt=["one", "two"], n=2, logprobs=1)
    assert [each.text for each in found.choices] == ["Up we go"] * 4
    assert found.choices[0].logprobs.top_logprobs == [{"Up": -0.25, "No": -1.5}]
    assert found.usage.prompt_tokens == 20  # of two prompts
    await client.completions.create(model="tape", prompt=[1, 2, 3], max_tokens=3)
    await client.completions.create(model="tape", prompt=[[1], [2]])
    assert [each.tokens for each in rig.generator.asked[4:]] == [(1, 2, 3), (1,), (2,)]
    assert [each.max_tokens for each in rig.generator.asked[4:]] == [3, 16, 16]
    stream = await client.completions.create(model="tape", prompt="one", stream=True, logprobs=0)
    chunks = [chunk async for chunk in stream]
    assert "".join(each.choices[0].text for each in chunks) == "Up we go"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_responses(rig: Rig) -> None:
    client = rig.openai()
    found = await client.responses.create(
        model="tape",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "one"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
        ],
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        metadata={"a": "b"},
        max_output_tokens=2,
    )
    assert rig.generator.asked[0].turns == (
        Turn("system", "Be brief."),
        Turn("user", "one"),
        Turn("assistant", "two"),
        Turn("user", "three"),
    )
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].content[0].logprobs[0].token == "Up"
    assert (found.usage.input_tokens, found.usage.input_tokens_details.cached_tokens) == (10, 4)
    assert found.metadata == {"a": "b"}


async def test_messages(rig: Rig) -> None:
    client = rig.anthropic()
    found = await client.messages.create(
        model="tape",
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[*USER, {"role": "assistant", "content": "I"}],
        stop_sequences=["!"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    asked = rig.generator.asked[0]
    assert asked.turns == (Turn("system", "Be brief."), Turn("user", "hello"), Turn("assistant", "I"))
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop) == (0.5, 0.9, 3, ("!",))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "!")
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens) == (6, 4)
    counted = await client.messages.count_tokens(model="tape", messages=USER, system="Be brief.")
    assert counted.input_tokens == len("Be brief.hello")


@pytest.mark.parametrize(
    ("code", "openais", "anthropics"),
    [
        ("bad_request", openai.BadRequestError, anthropic.BadRequestError),
        ("unknown_session", openai.NotFoundError, anthropic.NotFoundError),
        ("too_long", openai.BadRequestError, anthropic.BadRequestError),
        ("busy", openai.RateLimitError, anthropic.RateLimitError),
        ("overloaded", openai.RateLimitError, anthropic.RateLimitError),
        ("engine", openai.InternalServerError, anthropic.InternalServerError),
        ("broken", openai.InternalServerError, anthropic.InternalServerError),
        ("rebuilding", openai.InternalServerError, anthropic.InternalServerError),
        ("shutting_down", openai.InternalServerError, anthropic.InternalServerError),
        ("timeout", openai.InternalServerError, anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_has_its_status_in_each_apis_shape(rig, code, openais, anthropics, stream) -> None:
    said = [{"role": "user", "content": code}]
    with pytest.raises(openais) as one:
        await rig.openai().chat.completions.create(model="tape", messages=said, stream=stream)
    assert set(one.value.body) == {"message", "type", "param", "code"}
    assert one.value.request_id.startswith("req_")
    with pytest.raises(anthropics) as other:
        await rig.anthropic().messages.create(model="tape", max_tokens=5, messages=said, stream=stream)
    assert other.value.body["type"] == "error"
    assert set(other.value.body["error"]) == {"type", "message"}
    assert "secret" not in f"{one.value}{other.value}"
    if code == "rebuilding":
        assert (one.value.status_code, other.value.status_code) == (503, 503)
        assert isinstance(other.value, anthropic.ServiceUnavailableError)
        assert (one.value.code, other.value.body["error"]["type"]) == ("rebuilding", "api_error")
    if code in ("busy", "overloaded"):
        assert one.value.response.headers["retry-after"] == "1"
        assert other.value.body["error"]["type"] == "rate_limit_error"


async def test_a_failure_after_the_first_token_is_an_event_of_the_stream(rig: Rig) -> None:
    late = "late engine"
    said = [{"role": "user", "content": late}]
    stream = await rig.openai().chat.completions.create(model="tape", messages=said, stream=True)
    with pytest.raises(openai.APIError, match="because"):
        [chunk async for chunk in stream]
    events = [e async for e in await rig.openai().responses.create(model="tape", input=late, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    with pytest.raises(anthropic.APIStatusError, match="because"):
        async with rig.anthropic().messages.stream(model="tape", max_tokens=5, messages=said) as texts:
            [text async for text in texts.text_stream]
    await until(lambda: rig.outcomes == ["engine"] * 3)


async def test_sdks_retry_what_is_refused_for_now(rig: Rig) -> None:
    rig.generator.refusals = 1
    found = await rig.openai(max_retries=1).chat.completions.create(model="tape", messages=USER)
    assert found.choices[0].message.content == "Up we go"
    rig.generator.refusals = 1
    message = await rig.anthropic(max_retries=1).messages.create(model="tape", max_tokens=5, messages=USER)
    assert message.content[0].text == "Up we go"
    assert rig.outcomes == ["busy", "done"] * 2


@pytest.mark.parametrize("text", ["slow", "hangs"])
async def test_a_client_that_gives_up_ends_its_generation(rig: Rig, text: str) -> None:
    said = [{"role": "user", "content": text}]
    with pytest.raises(openai.APITimeoutError):
        await rig.openai(timeout=1.0).chat.completions.create(model="tape", messages=said)
    with pytest.raises(anthropic.APITimeoutError):
        await rig.anthropic(timeout=1.0).messages.create(model="tape", max_tokens=5, messages=said)
    await until(lambda: (rig.generator.running, rig.generator.cancelled) == (0, 2))
    assert rig.outcomes == ["client_closed"] * 2


async def test_a_client_that_gives_up_ends_its_counting(rig: Rig) -> None:
    said = [{"role": "user", "content": "slow"}]
    with pytest.raises(anthropic.APITimeoutError):
        await rig.anthropic(timeout=1.0).messages.count_tokens(model="tape", messages=said)
    await until(lambda: (rig.generator.running, rig.generator.cancelled) == (0, 1))
    assert rig.outcomes == ["client_closed"]


async def test_a_client_that_closes_a_stream_ends_its_generation(rig: Rig) -> None:
    said = [{"role": "user", "content": "hangs"}]
    stream = await rig.openai().chat.completions.create(model="tape", messages=said, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await until(lambda: (rig.generator.running, rig.generator.cancelled) == (0, 1))
    assert rig.outcomes == ["client_closed"]


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
async def test_a_body_that_is_cut_short_is_no_failure_of_the_engine(rig: Rig, path: str) -> None:
    async with connected(rig.server.port) as (_, writer):
        fields = {"host": "localhost", "content-type": "application/json", "content-length": "1000"}
        writer.write(head("POST", f"/v1/{path}", fields) + b'{"model"')
        await writer.drain()
    await until(lambda: rig.outcomes == ["client_closed"])
    assert rig.generator.asked == []


async def test_a_stream_that_waits_is_pinged(rig: Rig) -> None:
    async def until_pinged(path: str, body: dict[str, Any], ping: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        data = json.dumps({"model": "tape", "stream": True, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        found = b""
        while found.count(ping) < 2:
            found += await reader.read(1000)
        writer.close()

    async with asyncio.timeout(20):
        for text in ("hangs", "slow"):  # also where there is no token yet
            said = [{"role": "user", "content": text}]
            await until_pinged("/v1/chat/completions", {"messages": said}, b": ping\n\n")
            ping = b'event: ping\ndata: {"type":"ping"}\n\n'
            await until_pinged("/v1/messages", {"messages": said, "max_tokens": 3}, ping)
    await until(lambda: rig.generator.cancelled == 4)


async def test_the_sdks_read_streams_that_were_pinged_before_they_begin(rig: Rig) -> None:
    begun: list[str] = []

    async def chat(text: str) -> str:
        said = [{"role": "user", "content": text}]
        async with rig.openai().chat.completions.stream(model="tape", messages=said) as stream:
            begun.append(text)
            return (await stream.get_final_completion()).choices[0].message.content

    async def responses(text: str) -> str:
        async with rig.openai().responses.stream(model="tape", input=text) as stream:
            begun.append(text)
            events = [event async for event in stream]
        if events[-1].type == "response.failed":
            assert events[0].type == "response.created"
            raise openai.OpenAIError(events[-1].response.error.message)
        return events[-1].response.output_text

    async def messages(text: str) -> str:
        said = [{"role": "user", "content": text}]
        async with rig.anthropic().messages.stream(model="tape", max_tokens=9, messages=said) as stream:
            begun.append(text)
            return (await stream.get_final_message()).content[0].text

    async def after_a_ping(*asking: Awaitable[str]) -> list[str | BaseException]:
        begun.clear()
        rig.generator.release.clear()
        coming = asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: len(begun) == len(asking), what="the streams to begin with a ping")
        rig.generator.release.set()
        return await coming

    ways = (chat, responses, messages)
    assert await after_a_ping(*(ask("held hello") for ask in ways)) == ["Up we go"] * 3
    failed = await after_a_ping(*(ask("held engine") for ask in ways))
    assert all(isinstance(each, openai.OpenAIError | anthropic.AnthropicError) for each in failed)
    assert ["because" in str(each) for each in failed] == [True] * 3
    await until(lambda: rig.outcomes == ["done"] * 3 + ["engine"] * 3)


async def test_many_at_a_time(rig: Rig) -> None:
    client = rig.openai()
    calls = [client.chat.completions.create(model="tape", messages=USER, n=2) for _ in range(30)]
    found = await asyncio.gather(*calls)
    assert len({each.id for each in found}) == 30


CHAT, MESSAGES = {"model": "tape", "messages": USER}, {"model": "tape", "messages": USER, "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", CHAT | {"audio": {}}, "audio"),
        ("chat/completions", CHAT | {"modalities": ["text", "audio"]}, "modalities"),
        ("chat/completions", CHAT | {"logit_bias": {"5": 1}}, "logit_bias"),
        ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", CHAT | {"temperature": 3}, "temperature"),
        ("chat/completions", CHAT | {"n": 99}, "n"),
        ("chat/completions", CHAT | {"max_tokens": 2**63}, "max_tokens"),
        ("chat/completions", CHAT | {"presence_penalty": 0.5}, "presence_penalty"),
        ("chat/completions", CHAT | {"frequency_penalty": 5}, "frequency_penalty"),
        ("chat/completions", CHAT | {"tools": [{}], "tool_choice": "auto"}, "tools"),
        ("chat/completions", CHAT | {"tools": [{}], "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", CHAT | {"tools": {}, "tool_choice": "none"}, "tools"),
        ("chat/completions", CHAT | {"functions": [{}], "tool_choice": "none"}, "functions"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", CHAT | {"stop": [""]}, "stop"),
        ("chat/completions", CHAT | {"stop": ["a" * 1025]}, "stop"),
        ("chat/completions", CHAT | {"messages": []}, "messages"),
        ("chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0]",
        ),
        ("chat/completions", CHAT | {"foretick": {"choice": ["a"]}}, "foretick"),
        ("completions", {"model": "tape", "prompt": ""}, "prompt"),
        ("completions", {"model": "tape", "prompt": [2**40]}, "prompt"),
        ("completions", {"model": "tape", "prompt": [2**70]}, "prompt"),
        ("completions", {"model": "tape", "prompt": "a", "max_tokens": 2**63}, "max_tokens"),
        ("completions", {"model": "tape", "prompt": "a", "seed": 2**64}, "seed"),
        ("completions", {"model": "tape", "prompt": ["a"] * 17}, "prompt"),
        ("completions", {"model": "tape", "prompt": "a", "stop": "a" * 1025}, "stop"),
        ("completions", {"model": "tape", "prompt": "a", "echo": True}, "echo"),
        ("completions", {"model": "tape", "prompt": "a", "best_of": 3}, "best_of"),
        ("completions", {"model": "tape", "prompt": "a", "logprobs": 50}, "logprobs"),
        ("completions", {"model": "tape"}, "prompt"),
        ("chat/completions", {"model": "tape"}, "messages"),
        ("chat/completions", CHAT | {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("chat/completions", CHAT | {"foretick": {"salt": 5}}, "foretick.salt"),
        ("completions", {"model": "session:btc", "prompt": [1, 2]}, "prompt"),
        ("completions", {"model": "tape", "prompt": "a", "presence_penalty": 1}, "presence_penalty"),
        ("responses", {"model": "tape", "input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ("responses", {"model": "tape", "input": []}, "input"),
        ("responses", {"model": "tape", "input": "a", "max_output_tokens": 2**70}, "max_output_tokens"),
        ("responses", {"model": "tape", "input": [{"type": "reasoning"}]}, "input[0]"),
        ("responses", {"model": "tape", "input": "a", "background": True}, "background"),
        ("responses", {"model": "tape", "input": "a", "background": 0}, "background"),
        ("responses", {"model": "tape", "input": "a", "tools": [{}]}, "tools"),
        ("responses", {"model": "tape", "input": "a", "tools": [{}], "tool_choice": "auto"}, "tools"),
        ("messages", MESSAGES | {"tools": [{}]}, None),
        ("messages", MESSAGES | {"tools": [{}], "tool_choice": {"type": "any"}}, None),
        ("messages", MESSAGES | {"thinking": {"type": "enabled"}}, None),
        ("messages", MESSAGES | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None),
        ("messages", MESSAGES | {"messages": []}, None),
        ("messages", MESSAGES | {"stop_sequences": [""]}, None),
        ("messages", MESSAGES | {"stop_sequences": ["a" * 1025]}, None),
        ("messages", CHAT, None),
        ("messages", MESSAGES | {"max_tokens": 2**63}, None),
        ("messages", MESSAGES | {"top_k": 2**64}, None),
        ("messages/count_tokens", MESSAGES | {"mcp_servers": [{}]}, None),
    ],
)
async def test_what_would_change_the_meaning_is_a_clear_400(rig, path, body, param) -> None:
    found = await rig.post(f"/v1/{path}", body)
    error = found.json["error"]
    assert found.status == 400
    assert error["type"] == "invalid_request_error"
    assert error.get("param") == param
    assert (param or "").split(".")[0].split("[")[0] in error["message"]
    assert rig.generator.asked == []


async def test_harmless_members_are_tolerated(rig: Rig) -> None:
    more = {
        "tools": [],
        "tool_choice": "auto",
        "frequency_penalty": 0,
        "logit_bias": {},
        "user": "me",
        "store": True,
        "parallel_tool_calls": False,
        "unheard_of": {"a": [1]},
        "stop": None,
        "modalities": ["text"],
    }
    for path, body in (
        ("chat/completions", CHAT),
        ("responses", {"model": "tape", "input": "a"}),
        ("completions", {"model": "tape", "prompt": "a"}),
    ):
        assert (await rig.post(f"/v1/{path}", body | more)).status == 200
    polite = {"metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "disabled"}}
    assert (await rig.post("/v1/messages", MESSAGES | polite)).status == 200


async def test_tools_are_served_where_none_may_be_called(rig: Rig) -> None:
    tool = {"type": "function", "name": "f", "parameters": {}}
    none = {"tools": [tool], "tool_choice": "none"}
    of_anthropic = MESSAGES | none | {"tool_choice": {"type": "none"}}
    for path, body in (
        ("chat/completions", CHAT | none),
        ("chat/completions", CHAT | {"functions": [tool], "function_call": "none"}),
        ("responses", {"model": "tape", "input": "a"} | none),
        ("messages", of_anthropic),
        ("messages/count_tokens", of_anthropic),
    ):
        found = await rig.post(f"/v1/{path}", body)
        assert found.status == 200, found.body
        if path == "responses":
            assert [found.json[name] for name in ("tools", "tool_choice")] == [[tool], "none"]


async def test_a_completion_with_a_session_asks_each_prompt_as_a_question(rig: Rig) -> None:
    body = {"model": "session:btc", "prompt": ["Up?", "trend"], "n": 2, "presence_penalty": 1}
    found = await rig.post("/v1/completions", body)
    assert (found.status, len(found.json["choices"])) == (200, 4)
    asked = [(each.session, each.turns, each.index, each.penalty) for each in rig.generator.asked]
    assert asked == [
        ("btc", (Turn("user", text),), index, "presence_penalty")
        for text in ("Up?", "trend")
        for index in range(2)
    ]
    assert {(each.max_tokens, each.temperature, each.text) for each in rig.generator.asked} == {(None, 0, "")}


async def test_bodies_that_are_no_request(rig: Rig) -> None:
    for path in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens"):
        for body in (b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"model": 5}'):
            found = await rig.post(f"/v1/{path}", body)
            assert found.status == 400
            assert found.json["error"]["type"] == "invalid_request_error"
        found = await rig.post(f"/v1/{path}", b" " * (MAX_BYTES + 1))
        assert found.status == 413
        found = await rig.post(f"/v1/{path}", CHAT, {"content-type": "text/plain"})
        assert found.status == 415
        found = await rig.post(f"/v1/{path}", CHAT, {"host": "evil.example"})
        assert (found.status, found.json["error"]["type"]) == (403, "permission_error")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BODIES: list[tuple[Any, type[msgspec.Struct], dict[str, Any]]] = [
    (Chat(), ChatRequest, CHAT),
    (Completions(), CompletionRequest, {"model": "tape", "prompt": "a"}),
    (Responses(), ResponseRequest, {"model": "tape", "input": "a"}),
    (Messages(), MessageRequest, MESSAGES),
]


@given(st.sampled_from(BODIES), st.data())
def test_any_body_is_translated_or_refused_as_documented(which, data) -> None:
    """Bodies of an API's own members, with values of any kind."""
    api, kind, body = which
    members = data.draw(st.dictionaries(st.sampled_from(kind.__struct_fields__), JSON, max_size=5))
    try:
        asked = msgspec.json.decode(msgspec.json.encode(body | members), type=kind)
    except msgspec.ValidationError:
        return
    try:
        wanted = api.parse(asked, SERVED)
    except ApiError as problem:
        status = problem.status
    else:
        status = 200
        assert all(isinstance(each, Generate) for each in wanted)
    assert status in (200, 400, 404)


async def test_what_is_not_served_of_an_api_is_refused_in_its_own_shape(rig: Rig) -> None:
    client = rig.openai()
    for call in (
        client.embeddings.create(model="tape", input="a"),
        client.files.list(),
        client.chat.completions.retrieve("chatcmpl-1"),
        client.responses.cancel("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError, match="is not served") as refused:
            await call
        assert (refused.value.code, refused.value.type) == ("unknown_url", "invalid_request_error")
    for call in (client.models.delete("tape"), client.chat.completions.list()):
        with pytest.raises(openai.APIStatusError, match="is not served") as refused:
            await call
        assert (refused.value.status_code, refused.value.code) == (405, "method_not_supported")
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await rig.anthropic().messages.batches.list()
    assert unknown.value.body["error"] == {
        "type": "not_found_error",
        "message": "GET /v1/messages/batches is not served",
    }


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PUT", "QUERY"])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "models", "embeddings", "messages"])
async def test_any_other_method_is_refused_in_the_apis_shape(rig: Rig, path: str, method: str) -> None:
    found = await request(rig.server.port, method, f"/v1/{path}")
    assert found.status == (404 if path == "embeddings" else 405)
    assert ("allow" in found.headers) == (found.status == 405)
    assert found.json["error"].keys() >= {"type", "message"}
    assert method in found.json["error"]["message"]
    theirs = await request(
        rig.server.port, method, f"/v1/{path}", headers={"anthropic-version": "2023-06-01"}
    )
    assert theirs.json["type"] == "error"


@pytest.mark.parametrize("text", [b"\\ud800", b"a \\udbff!"])
async def test_half_a_surrogate_pair_is_named(rig: Rig, text: bytes) -> None:
    body = json.dumps(CHAT).encode().replace(b"hello", text)
    found = await rig.post("/v1/chat/completions", body)
    assert (found.status, "surrogate" in found.json["error"]["message"]) == (400, True)


def test_a_response_says_when_it_was_completed_and_how_tools_were_chosen() -> None:
    done = Finished(
        id=0, text="UP", finish="stop", stop=None, prompt_tokens=1, reused_tokens=0, answer_tokens=1,
        metadata=ReplyMetadata(),
    )  # fmt: skip
    asked = ResponseRequest(model="tape", input="a", tool_choice="none")
    found = Responses().build_response(asked, ReplyIdentity("k", 1000, "tape", "fp"), [done])
    assert (found.created_at, found.tool_choice) == (1000, "none")
    assert found.completed_at > 1_600_000_000


def test_a_key_that_is_not_known_is_an_error_of_openais_kind() -> None:
    error = common.error_body(ApiError("unauthenticated", "no")).error
    assert (error.type, error.code) == ("invalid_request_error", "invalid_api_key")


def test_the_page_lists_every_member_that_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs/clients.md").read_text(encoding="utf-8")
    table = page.partition("### What is served, and what is refused")[2].partition("Errors have")[0]
    refused = {name for each in (chat, completions, responses, claude) for name in each.HARMLESS}
    assert {name for name in refused if f"`{name}`" not in table and name != "tools"} == set()


def test_a_model_has_further_names_and_sessions_theirs():
    served = msgspec.structs.replace(SERVED, models=(ModelEntry("tape", "1", ("gpt-4o",)),))
    assert served.names == ("tape", "gpt-4o", "session:btc")
    found = [served.session_of(name) for name in ("tape", "gpt-4o", "session:btc", "session:eth", "btc", "")]
    assert found == ["", "", "btc", None, None, None]
