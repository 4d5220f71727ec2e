"""The gateway's generations: limits, what is charged and kept, and what ends without a place in the room."""

import asyncio
import functools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import protocol
from daemon.api.auth import Access
from daemon.api.generation import (
    Begun,
    CountTokens,
    Delta,
    Event,
    Failed,
    Finished,
    Generate,
    ModelEntry,
    TokensCounted,
    Turn,
)
from daemon.api.messages import QueryError, ReplyMetadata
from daemon.config.tenants_file import TenantTable
from daemon.tenants import LOCAL, Client, Tenants
from flash.question import Question
from tests.daemon.gateway.test_gateway_sessions import answer, times_of
from tests.kit import until
from tests.kit.gateway import GenerationsRig

ME = Client(LOCAL, "me")


class Rig(GenerationsRig):
    """Generations, and the commands that reach the engine over the wire."""

    def __init__(self, access: Access | None = None, max_wait_s: float = 5.0) -> None:
        model = protocol.EngineReady((ModelEntry("tape", "0123"),))
        super().__init__("aaa", access=access, max_wait_s=max_wait_s, model=lambda: model)

    def send(self, command: protocol.Command) -> None:
        self.sent.append(msgspec.msgpack.decode(protocol.encode(command)))

    async def all(self, *requests: Generate, client: Client = ME) -> list[tuple[int, Event]]:
        return [event async for event in self.generations.run(requests, client)]


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def nested(depth: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(depth), {})


@pytest.mark.parametrize(
    "members",
    [
        {"schema": {"enum": [2**64]}},
        {"schema": {"enum": [-(2**70)]}, "temperature": 1.0},
        {"schema": nested(2000)},
        {"tokens": (2**64,)},
    ],
)
async def test_schemas_that_no_message_holds_are_refused_and_take_no_place(
    rig: Rig, members: dict[str, Any]
) -> None:
    with pytest.raises(QueryError, match="64 bits") as refused:
        await rig.all(Generate(text="x"), Generate(text="x", **members))
    assert (refused.value.code, len(rig.room), len(rig.generations)) == ("bad_request", 0, 0)
    assert not len(rig.pending)


def finished(number: int, **members: Any) -> Finished:
    done = {"prompt_tokens": 5, "reused_tokens": 2, "answer_tokens": 3, "metadata": ReplyMetadata()} | members
    return Finished(id=number, text="Up we go", finish="length", stop=None, **done)


async def test_a_response_is_kept_by_a_short_key_unless_it_has_log_probabilities(rig: Rig) -> None:
    asked = Generate(text="x" * 10_000)
    for request in (asked, asked, msgspec.structs.replace(asked, top_logprobs=0)):
        for _ in range(2):
            running = asyncio.ensure_future(rig.all(request))
            await asyncio.sleep(0)
            for number in list(rig.pending._entries):
                rig.pending.on_event(finished(number))
            assert (await running)[-1][1].text == "Up we go"
    assert [each["type"] for each in rig.sent] == ["generate_all"] * 3
    (keys,) = rig.generations._responses._owned.values()
    assert [len(key) for key in keys] == [32]


class Counted(Access):
    """Adds up what is charged."""

    charged = 0

    def charge(self, client: Client, tokens: int, engine_ns: int = 0) -> None:
        self.charged += tokens


async def test_tokens_that_are_not_shown_are_signs_of_life_and_charged() -> None:
    access = Counted()
    rig = Rig(access, max_wait_s=1.0)
    running = asyncio.ensure_future(rig.all(Generate(text="x")))
    await until(lambda: rig.sent)
    rig.pending.on_event(Begun(1, 5, 2))
    for n in range(4):
        await asyncio.sleep(0.3)
        rig.pending.on_event(Delta(1, "", tokens=1))
        assert (access.charged, running.done()) == (4 + n, False)
    rig.pending.on_event(finished(1, answer_tokens=5))
    assert [type(event) for _, event in await running] == [Begun, Finished]
    assert access.charged == 3 + 5
    with pytest.raises(QueryError, match="no token within"):
        await rig.all(Generate(text="y"))


async def test_a_client_that_leaves_pays_for_what_was_computed() -> None:
    access = Counted()
    rig = Rig(access)
    running = asyncio.ensure_future(rig.all(Generate(text="x"), Generate(text="y")))
    await until(lambda: rig.sent)
    rig.pending.on_event(Begun(1, 5, 2))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [each["type"] for each in rig.sent[1:]] == ["cancel_generation"] * 2
    assert (access.charged, len(rig.room)) == (3, 0)
    rig.pending.on_event(Delta(1, "", tokens=1))
    rig.pending.on_event(Failed(1, "cancelled", "the request was cancelled", 3))
    rig.pending.on_event(Failed(2, "cancelled", "the request was cancelled", 4))
    assert (access.charged, len(rig.pending)) == (3 + 1 + 4, 0)


COUNT = Generate(turns=(Turn("user", "Up?"),))


async def test_counting_takes_a_place_until_the_reply_or_the_client_is_gone(rig: Rig) -> None:
    counting = [asyncio.ensure_future(rig.generations.count(COUNT, ME)) for _ in range(4)]
    await until(lambda: len(rig.sent) == 4)
    with pytest.raises(QueryError, match="4 prompts") as busy:
        await rig.generations.count(COUNT, ME)
    assert (busy.value.code, len(rig.room)) == ("busy", 4)
    rig.pending.on_event(TokensCounted(1, 7))
    assert await counting[0] == 7
    for each in counting[1:]:
        each.cancel()
    await asyncio.gather(*counting, return_exceptions=True)
    assert (len(rig.room), len(rig.generations)) == (0, 0)
    for number in (2, 3, 4):
        rig.pending.on_event(TokensCounted(number, 7))
    assert len(rig.pending) == 0


async def test_a_tenant_without_tokens_counts_none() -> None:
    tenants = Tenants((TenantTable("desk", api_keys=("0" * 64,), tokens_per_minute=10),))
    access = Access(tenants)
    rig, desk = Rig(access), Client(tenants.named("desk"), "me")
    access.charge(desk, 20)
    with pytest.raises(QueryError, match="10 tokens a minute"):
        await rig.generations.count(COUNT, desk)
    assert (rig.sent, len(rig.room)) == ([], 0)


NOTE = Question("note", "What happened?", max_tokens=6)
PRICE = Question("price", "Which price?", answer="number", max_tokens=12)
SIDE = Question("side", "Up or down?", ("UP", "DOWN"))
NOW = replace(SIDE, name="now", text="And now?", provisional=True)
SAID = {"note": "rose a lot.", "price": "49134.52", "side": "UP", "now": "DOWN"}
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.1, 2.0]),
        "top_p": st.sampled_from([0.1, 1.0]),
        "top_k": st.integers(0, 3),
        "seed": st.integers(-3, 3),
        "index": st.integers(0, 3),
        "stop": st.lists(st.sampled_from(["rose", ".", "P", "\nObservation:"]), max_size=2).map(tuple),
        "max_tokens": st.sampled_from([None, 1, 5, 6, 12, 99]),
        "top_logprobs": st.sampled_from([None, 0, 5]),
        "schema": st.sampled_from([None, {"enum": ["UP", "DOWN"]}]),
        "penalty": st.sampled_from(["", "presence_penalty"]),
        "stream": st.booleans(),
    },
)


def serves(question: Question, more: dict[str, Any]) -> bool:
    """Whether the ready answer is all that is asked for."""
    plain = not more.get("temperature") and more.get("schema") is None and more.get("top_logprobs") is None
    if question.choices or not plain:
        return plain
    if more.get("penalty"):
        return False
    if question.answer == "number":
        return True
    most = more.get("max_tokens")
    return (most is None or most >= 6) and not any(stop in SAID["note"] for stop in more.get("stop", ()))


async def asked_of_a_session(question: Question, text: str, more: dict[str, Any]) -> None:
    rig = Rig()
    rig.sessions.questions_set("aaa", [NOTE, PRICE, SIDE, NOW])
    ready = answer(1, "aaa", question.name, question.hash)
    choice = SAID[question.name] if question.choices else None
    rig.sessions.answered(
        msgspec.structs.replace(ready, text=SAID[question.name], choice=choice), times_of(1)
    )
    turns = (Turn("system", "Say BANANA."), Turn("user", text))
    running = asyncio.ensure_future(rig.all(Generate(session="aaa", turns=turns, **more)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if serves(question, more):
        done = (await running)[-1][1]
        assert (done.text, done.metadata.cached, rig.sent) == (SAID[question.name], True, [])
        return
    if question.provisional:
        with pytest.raises(QueryError, match="now reads open bars"):
            await running
        assert (rig.sent, len(rig.room), len(rig.generations)) == ([], 0, 0)
        return
    ((sent,),) = [each["requests"] for each in rig.sent]
    found = msgspec.convert(sent, Generate)
    assert found.question == question
    assert found.choices == (() if found.schema is not None else question.choices or ())
    for name, value in more.items():
        if name != "seed" or value is not None:
            assert getattr(found, name) == value
    rig.pending.on_event(finished(found.id))
    await running


@given(
    question=st.sampled_from([NOTE, PRICE, SIDE, NOW]),
    by_name=st.booleans(),
    spaced=st.booleans(),
    more=MEMBERS,
)
def test_members_decide_only_whether_the_ready_answer_serves(question, by_name, spaced, more) -> None:
    text = question.name if by_name else question.text
    asyncio.run(asked_of_a_session(question, f"  {text.replace(' ', chr(10))} " if spaced else text, more))


@pytest.mark.parametrize("meant", ["side", f" {SIDE.text} "])
async def test_a_scored_standing_question_has_its_ready_answer_s_logits(rig: Rig, meant: str) -> None:
    rig.sessions.questions_set("aaa", [SIDE])
    ready = answer(1, "aaa", SIDE.name, SIDE.hash)
    turns = (Turn("user", "composed words"),)
    asked = Generate(session="aaa", turns=turns, choices=SIDE.choices or (), scored=True, meant=meant)
    rig.sessions.answered(ready, times_of(1), (1.5, -0.5))
    done = (await rig.all(asked))[-1][1]
    assert (done.scores, done.metadata.cached, done.computed_tokens) == ((1.5, -0.5), True, 0)
    assert rig.sent == []


@pytest.mark.parametrize(
    ("meant", "choices", "means"), [("side", True, True), ("side", False, False), ("Up?", True, False)]
)
async def test_a_scored_question_without_ready_logits_is_computed(
    rig: Rig, meant: str, choices: bool, means: bool
) -> None:
    rig.sessions.questions_set("aaa", [SIDE])
    rig.sessions.answered(answer(1, "aaa", SIDE.name, SIDE.hash), times_of(1))
    given = (SIDE.choices or ()) if choices else ("ONE", "TWO")
    turns = (Turn("user", "side"),)
    running = asyncio.ensure_future(
        rig.all(Generate(session="aaa", turns=turns, choices=given, scored=True, meant=meant))
    )
    await until(lambda: rig.sent)
    ((sent,),) = [each["requests"] for each in rig.sent]
    found = msgspec.convert(sent, Generate)
    assert (found.question, found.choices, found.turns) == (SIDE if means else None, given, turns)
    rig.pending.on_event(msgspec.structs.replace(finished(found.id), scores=(0.0, -1.0)))
    assert (await running)[-1][1].scores == (0.0, -1.0)


async def test_the_tokens_of_a_standing_question_are_counted_by_its_text(rig: Rig) -> None:
    rig.sessions.questions_set("aaa", [SIDE])
    for text, expected in (("side", SIDE), (SIDE.text, SIDE), ("Up?", None)):
        asked = Generate(session="aaa", turns=(Turn("user", text),))
        counting = asyncio.ensure_future(rig.generations.count(asked, ME))
        await until(lambda: rig.sent)
        sent = msgspec.convert(rig.sent.pop(), CountTokens)
        assert sent.request.question == expected
        rig.pending.on_event(TokensCounted(sent.id, 7))
        assert await counting == 7
