"""OpenAI's decisions over HTTP by its SDK: inputs, choices of two types, and what is refused."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from daemon.api.http_server import HttpServer
from daemon.api.serving import generation_routes
from tests.daemon.api.generator import FakeGenerator
from tests.kit.http import http_server, request

PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is it up?", "name": "up"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which"}, {"type": "input_json", "data": {"of": 3}}],
    "choices": [{"value": True, "description": "it does"}, {"value": "no"}, {"value": False}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "How far?",
    "levels": [{"label": "near", "description": "a step"}, {"label": "far"}],
}
TURNS: list[Any] = [
    {"role": "developer", "content": "Be strict."},
    {"role": "user", "content": [{"type": "input_text", "text": "It rises."},
                                 {"type": "input_json", "data": [{"by": 2}]}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."},
                                      {"type": "refusal", "refusal": "No."}], "type": "message"},
]  # fmt: skip


@pytest.fixture
async def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
async def server(generator: FakeGenerator) -> AsyncIterator[HttpServer]:
    async with http_server(*generation_routes(generator, lambda outcome: None)) as server:
        yield server


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_answers_come_in_order_with_typed_values(client: Any, generator: FakeGenerator) -> None:
    found = await client.decisions.create(
        model="tape", input="It rises.", questions=[PREDICATE, CHOICE, SCORE]
    )
    up, which, far = found.answers
    assert (up.name, up.probability) == ("up", pytest.approx(2 / 3))
    assert (which.name, which.choice) == (None, True)
    assert [each.value for each in which.probabilities] == [True, "no", False]
    assert [each.probability for each in which.probabilities] == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert which.confidence == pytest.approx((4 / 7 - 1 / 3) / (1 - 1 / 3))
    assert far.score == pytest.approx(1 / 3)
    assert [(each.value, each.label) for each in far.probabilities] == [(0, "near"), (1, "far")]
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens == 36
    assert found.usage.input_tokens_details.cached_tokens == 12
    assert [each.choices for each in generator.asked] == [("YES", "NO"), ("true", "no", "false"), ("0", "1")]
    assert generator.asked[1].turns[0].text == (
        'It rises.\n\nWhich\n{"of": 3}\nOptions:\ntrue: it does\nno\nfalse\n'
        "Answer with one of the options, exactly as it is written."
    )
    assert "0: near: a step\n1: far\n" in generator.asked[2].turns[0].text


async def test_messages_are_one_text_and_a_session_a_model(client: Any, generator: FakeGenerator) -> None:
    await client.decisions.create(model="tape", input=TURNS, questions=[PREDICATE])
    await client.decisions.create(model="tape", input=TURNS[1:2], questions=[PREDICATE])
    found = await client.decisions.create(model="session:btc", input="", questions=[PREDICATE])
    said = [each.turns[0].text.partition("\n\n")[0] for each in generator.asked]
    assert said[0] == 'System: Be strict.\nUser: It rises.\n[{"by": 2}]\nAssistant: Yes.\nNo.'
    assert said[1] == 'It rises.\n[{"by": 2}]'
    assert (generator.asked[2].session, generator.asked[2].meant) == ("btc", "Is it up?")
    assert found.answers[0].model_extra["foretick"]["data_version"] == 7


IMAGE = {"type": "input_image", "image_url": "data:,"}


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"input": [{"type": "function_call", "role": "user", "content": ""}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"questions": [PREDICATE | {"instructions": [IMAGE]}]}, "questions.instructions[0]"),
        ({"questions": [CHOICE | {"choices": [{"value": "true"}, {"value": True}]}]}, "questions.choices"),
        ({"questions": [CHOICE | {"choices": [{"value": "one"}]}]}, "questions[0].choices"),
        ({"questions": [{"type": "noul", "instructions": "Up?"}]}, "questions[0].type"),
        ({"questions": []}, "questions"),
    ],
)
async def test_what_is_not_supported_is_said(client: Any, members: dict[str, Any], param: str) -> None:
    asked = {"model": "tape", "input": "x", "questions": [PREDICATE]} | members
    with pytest.raises(openai.BadRequestError) as refused:
        await client.decisions.create(**asked)
    assert refused.value.param == param


async def test_other_models_and_methods_are_refused_in_openais_shape(client: Any, server: HttpServer) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.decisions.create(model="nothing", input="x", questions=[PREDICATE])
    assert refused.value.code == "model_not_found"
    reply = await request(server.port, "GET", "/v1/decisions")
    assert (reply.status, reply.json["error"]["code"]) == (405, "method_not_supported")
