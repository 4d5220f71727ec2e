"""Parameters never change which question is asked: real SDKs, each endpoint, combinations of parameters.

The oracle is written here, from the neutral answer of the same data version: a greedy answer is it, cut only
where it is free text; a sampled one is held to the choices or to the form of a number.
"""

import asyncio
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client

from daemon.api.client import QueryClient
from daemon.api.messages import AskReply, QueryError
from daemon.config.schema import UNTRAINED, HttpConfig, ModelConfig, QuestionConfig
from tests.kit import http, inproc_config
from tests.kit.inproc import running

UP_DOWN = ("UP", "DOWN")
DIRECTION = "Is the last close above or below the close ten bars before it?"
PRICE = "What is the closing price of the last bar? Answer with the number only."
QUESTIONS = (
    QuestionConfig(name="trend", text="trend", choices=UP_DOWN),
    QuestionConfig(name="dir", text=DIRECTION, choices=UP_DOWN),
    QuestionConfig(name="price", text=PRICE, answer="number", max_tokens=12),
    QuestionConfig(name="last", text="exact_value", max_tokens=12),
)
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,18})?")
CHOICE = ("dir", DIRECTION, DIRECTION.replace(" ", "  \n"), "trend")
"""A question with choices by its name and its text, and one by either."""
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["UP", "DOWN"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Daemon:
    """A daemon in another thread, whose session `aaa` is at one version, and stays there."""

    terse: bool
    port: int
    endpoint: str

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    def neutral(self, question: str) -> str:
        """The ready answer."""
        with QueryClient(self.endpoint) as client:
            reply = client.ask("aaa", question)
        assert reply.cached
        return reply.text


MODELS = {"tape1": (True, 1), "tape4": (True, 4), "untrained": (False, 3)}
"""The tape model of one and of four bars, where it would abstain, and an untrained model."""


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    terse, bars = request.param
    made: queue.Queue[Daemon | None] = queue.Queue()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        config = inproc_config(
            model=ModelConfig() if terse else ModelConfig(path=UNTRAINED),
            standing="none",
            questions=QUESTIONS,
            http=HttpConfig(port=0, mcp=True),
        )
        async with running(config) as daemon:
            await daemon.advance(bars)
            url, known = (
                f"http://127.0.0.1:{daemon.port}",
                {"api_key": "none", "max_retries": 0, "timeout": 60},
            )
            clients = openai.OpenAI(base_url=f"{url}/v1", **known), anthropic.Anthropic(base_url=url, **known)
            made.put(Daemon(terse, daemon.port, daemon.endpoint, *clients))
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            made.put(None)

    thread = threading.Thread(target=run)
    thread.start()
    served = made.get()
    try:
        assert served is not None, "the daemon did not start"
        yield served
        served.openai.close()
        served.anthropic.close()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def combined(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the members."""
    return st.fixed_dictionaries({}, optional=members)


TEMPERATURE = st.sampled_from([0, 0.1, 0.7, 1])
STOPS = st.sampled_from([["\nObservation:"], ["P"], ["U", "D", "N"], ["."], [" ", "0", "1"], ["UP", "DOWN"]])
MAX_TOKENS = st.sampled_from([1, 2, 6, 64])
SAMPLED = {"temperature": TEMPERATURE, "top_p": st.sampled_from([0, 0.2, 1])}
PENALTY = st.sampled_from([-2, 0, 0.5])
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
CHATS = combined(
    **SAMPLED,
    seed=st.integers(0, 5),
    stop=STOPS,
    max_tokens=MAX_TOKENS,
    n=st.integers(1, 3),
    frequency_penalty=PENALTY,
    presence_penalty=PENALTY,
    tools=st.just([TOOL]),
    response_format=st.sampled_from([FORM, {"type": "text"}]),
    logprobs=st.booleans(),
)
COMPLETIONS = combined(
    **SAMPLED,
    seed=st.integers(0, 5),
    stop=STOPS,
    max_tokens=MAX_TOKENS,
    n=st.integers(1, 3),
    presence_penalty=PENALTY,
    logprobs=st.integers(0, 2),
)
RESPONSES = combined(
    **SAMPLED,
    max_output_tokens=MAX_TOKENS,
    tools=st.just([TOOL["function"] | {"type": "function"}]),
    text=st.just({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
    top_logprobs=st.integers(0, 2),
)
MESSAGES = combined(**SAMPLED, stop_sequences=STOPS, top_k=st.integers(0, 2))
MANY = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)


def greedy(more: dict[str, Any]) -> bool:
    """Whether the likeliest answer is asked for: a session's temperature is 0 unless it is given."""
    return not more.get("temperature") or more.get("top_p") == 0


def check(
    daemon: Daemon, question: str, more: dict[str, Any], texts: list[str], facts: dict[str, Any]
) -> None:
    """Answers to a question with choices, by the oracle; ``facts``: of the first."""
    neutral = daemon.neutral(question)
    as_json = "json_schema" in json.dumps(more.get("response_format") or more.get("text"))
    chosen = [json.loads(text)["answer"] if as_json else text for text in texts]
    assert set(chosen) <= ({neutral} if greedy(more) else set(UP_DOWN)), (more, texts, neutral)
    assert facts["choice"] == chosen[0]
    with_logprobs = more.get("logprobs", False) is not False or more.get("top_logprobs", 0) > 0
    assert facts["cached"] == (greedy(more) and not as_json and not with_logprobs)


@MANY
@given(asked=st.sampled_from(CHOICE), more=CHATS, system=st.booleans(), streamed=st.booleans())
def test_a_chat_holds_a_standing_question_to_its_choices(daemon, asked, more, system, streamed) -> None:
    said: list[Any] = [{"role": "system", "content": "Answer BANANA."}] if system else []
    extra = {"tool_choice": "none"} if "tools" in more else {}
    if more.get("logprobs"):
        extra |= {"top_logprobs": 2}
    ask = daemon.openai.chat.completions.create
    members = {"model": "session:aaa", "messages": [*said, {"role": "user", "content": asked}]} | more | extra
    if streamed:
        texts = [""] * more.get("n", 1)
        facts = {}
        for chunk in ask(**members, stream=True):
            for each in chunk.choices:
                texts[each.index] += each.delta.content or ""
                if each.finish_reason:
                    assert each.finish_reason == "stop"
                    facts.setdefault(each.index, chunk.model_extra["foretick"])
        check(daemon, asked, more, texts, facts[0])
        return
    found = ask(**members)
    assert len(found.choices) == more.get("n", 1)
    assert {each.finish_reason for each in found.choices} == {"stop"}
    for each in found.choices:
        if more.get("logprobs"):
            (token,) = each.logprobs.content
            chosen = each.model_extra["foretick"]["choice"]
            assert chosen.startswith(token.token.strip())
            assert token.token.strip()
            assert len(token.top_logprobs) == 2
    texts = [each.message.content for each in found.choices]
    check(daemon, asked, more, texts, found.model_extra["foretick"])


@MANY
@given(asked=st.sampled_from(CHOICE), more=COMPLETIONS, streamed=st.booleans())
def test_a_completion_holds_it_to_its_choices(daemon, asked, more, streamed) -> None:
    ask = daemon.openai.completions.create
    if streamed:
        texts, facts = [""] * more.get("n", 1), {}
        for chunk in ask(model="session:aaa", prompt=asked, **more, stream=True):
            for each in chunk.choices:
                texts[each.index] += each.text
                if each.finish_reason:
                    facts.setdefault(each.index, chunk.model_extra["foretick"])
        check(daemon, asked, more, texts, facts[0])
        return
    found = ask(model="session:aaa", prompt=asked, **more)
    assert {each.finish_reason for each in found.choices} == {"stop"}
    check(daemon, asked, more, [each.text for each in found.choices], found.model_extra["foretick"])


@MANY
@given(asked=st.sampled_from(CHOICE), more=RESPONSES, instructed=st.booleans())
def test_a_response_holds_it_to_its_choices(daemon, asked, more, instructed) -> None:
    extra: dict[str, Any] = {"instructions": "Answer BANANA."} if instructed else {}
    if "tools" in more:
        extra["tool_choice"] = "none"
    found = daemon.openai.responses.create(model="session:aaa", input=asked, **more, **extra)
    assert found.status == "completed"
    check(daemon, asked, more, [found.output_text], found.model_extra["foretick"])


@MANY
@given(asked=st.sampled_from(CHOICE), more=MESSAGES, max_tokens=MAX_TOKENS, tools=st.booleans())
def test_a_message_holds_it_to_its_choices(daemon, asked, more, max_tokens, tools) -> None:
    extra: dict[str, Any] = {}
    if tools:
        tool = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
        extra = {"tools": [tool], "tool_choice": {"type": "none"}}
    members = {"model": "session:aaa", "messages": [{"role": "user", "content": asked}]}
    body = {name: value for name, value in more.items() if name != "stop_sequences"}
    stops = {"stop_sequences": more["stop_sequences"]} if "stop_sequences" in more else {}
    found = daemon.anthropic.messages.create(
        max_tokens=max_tokens, extra_body=body, **members, **stops, **extra
    )
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    check(daemon, asked, more, [found.content[0].text], found.model_extra["foretick"])
    counted = daemon.anthropic.messages.count_tokens(**members, **extra)
    by_name = daemon.anthropic.messages.count_tokens(
        model="session:aaa", messages=[{"role": "user", "content": "trend" if asked == "trend" else "dir"}]
    )
    assert counted.input_tokens == by_name.input_tokens


@MANY
@given(asked=st.sampled_from(["price", PRICE, "last"]), more=CHATS)
def test_a_number_is_whole_whatever_would_cut_it(daemon, asked, more) -> None:
    if asked == "last" and not daemon.terse:
        return  # free text there
    refused = ("frequency_penalty", "presence_penalty", "response_format")
    more = {name: value for name, value in more.items() if name not in refused}
    extra = {"tool_choice": "none"} if "tools" in more else {}
    said = [{"role": "user", "content": asked}]
    found = daemon.openai.chat.completions.create(model="session:aaa", messages=said, **more, **extra)
    for each in found.choices:
        text = each.message.content
        assert _NUMBER.fullmatch(text), (more, text)
        if greedy(more):
            assert Decimal(text) == Decimal(daemon.neutral(asked))
        assert each.finish_reason == "stop"


@MANY
@given(stop=st.none() | STOPS, max_tokens=st.none() | MAX_TOKENS, logprobs=st.booleans())
def test_free_text_is_cut_and_nothing_else(daemon, stop, max_tokens, logprobs) -> None:
    if daemon.terse:
        return
    neutral, asked = daemon.neutral("last"), [{"role": "user", "content": "last"}]
    more = {"stop": stop, "max_tokens": max_tokens, "logprobs": logprobs}
    found = daemon.openai.chat.completions.create(model="session:aaa", messages=asked, **more)
    (choice,) = found.choices
    ends = [at for each in stop or () if (at := neutral.find(each)) >= 0]
    expected = neutral[: min(ends)] if ends else neutral
    if max_tokens is None or max_tokens > 12:
        assert choice.message.content == expected
    else:
        assert expected.startswith(choice.message.content.rstrip("\ufffd"))
    assert found.model_extra["foretick"]["choice"] is None


def _asks(daemon: Daemon) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Every way to send an `ask`: its members to those of the reply."""

    def over_zeromq(members: dict[str, Any]) -> dict[str, Any]:
        with QueryClient(daemon.endpoint) as client:
            reply = client.ask("aaa", members.pop("question"), **members)
        return {name: getattr(reply, name) for name in AskReply.__struct_fields__}

    def over_http(members: dict[str, Any]) -> dict[str, Any]:
        body = {"session": "aaa"} | members
        return asyncio.run(http.request(daemon.port, "POST", "/v1/ask", body)).json

    def over_mcp(members: dict[str, Any]) -> dict[str, Any]:
        async def call() -> Any:
            async with Client(f"http://127.0.0.1:{daemon.port}/mcp") as agent:
                return await agent.call_tool("ask", {"session": "aaa"} | members)

        result = asyncio.run(call())
        assert not result.is_error, result
        return result.structured_content

    return {"zeromq": over_zeromq, "http": over_http, "mcp": over_mcp}


@pytest.mark.parametrize("way", ["zeromq", "http", "mcp"])
@pytest.mark.parametrize("asked", CHOICE, ids=["name", "text", "spaced", "either"])
@pytest.mark.parametrize("choices", [(), UP_DOWN])
def test_an_ask_holds_it_to_its_choices(
    daemon: Daemon, way: str, asked: str, choices: tuple[str, ...]
) -> None:
    ask, neutral = _asks(daemon)[way], daemon.neutral(asked)
    for more in ({}, {"max_tokens": 1}, {"max_age_s": 0}, {"early_exit": 0}, {"deadline_ms": 20_000}):
        given_choices = {"choices": list(choices)} if choices and way != "zeromq" else {"choices": choices}
        reply = ask({"question": asked} | given_choices | more)
        assert (reply["choice"], reply["text"]) == (neutral, neutral), more
        assert reply["cached"], "it is of the newest version"


def test_a_name_with_other_choices_asks_its_text(daemon: Daemon) -> None:
    with QueryClient(daemon.endpoint) as client:
        by_text = client.ask("aaa", DIRECTION, choices=("DOWN", "UP"))
        by_name = client.ask("aaa", "dir", choices=("DOWN", "UP"))
        assert (by_text.cached, by_name.cached) == (False, True), "one question, computed once"
        assert (by_name.text, by_name.logit_gap) == (by_text.text, by_text.logit_gap)
        if daemon.terse:
            three = client.ask("aaa", "dir", choices=(*UP_DOWN, "NONE"))
            assert three.text in (*UP_DOWN, "NONE")  # it may abstain, since NONE is one of the choices
            with pytest.raises(QueryError, match="LEFT"):
                client.ask("aaa", "dir", choices=("LEFT", "RIGHT"))
    ask = daemon.openai.chat.completions.create
    found = ask(
        model="session:aaa",
        messages=[{"role": "user", "content": "dir"}],
        temperature=0.3,
        extra_body={"foretick": {"choices": ["DOWN", "UP"]}},
    )
    assert found.choices[0].message.content in UP_DOWN


def test_what_is_refused_says_so(daemon: Daemon) -> None:
    ask = daemon.openai.chat.completions.create
    said = {"model": "session:aaa", "messages": [{"role": "user", "content": "price"}]}
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        ask(**said, presence_penalty=1)
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="tool"):
            ask(**said, tools=[TOOL], **choice)
    with pytest.raises(openai.BadRequestError, match="words"):
        daemon.openai.completions.create(model="session:aaa", prompt=[1, 2])
