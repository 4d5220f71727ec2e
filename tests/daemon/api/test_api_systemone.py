"""System One over HTTP: what is asked, what comes back, and the shapes of refusals."""

import json
from collections.abc import AsyncIterator
from math import exp, inf, log
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api import systemone
from daemon.api.compatible import STATUS, ApiError
from daemon.api.generation import Generate
from daemon.api.messages import MAX_QUESTION_CHARS
from daemon.api.serving import MAX_BYTES, generation_routes
from daemon.api.systemone import DecisionRequest, confidence, normalised, parse
from metrics.catalogue import API_OUTCOMES
from tests.daemon.api.generator import SERVED, FakeGenerator
from tests.kit.http import JSON as JSON_TYPE
from tests.kit.http import Reply, http_server, request

NOUL = {"type": "noul", "instructions": "Is it up?"}
CHOICE = {"type": "choice", "instructions": "Which way?", "criteria": {"Up": "it rises", "Down": None}}
SCORE = {"type": "score", "instructions": "How far?", "criteria": ["near", {"label": "middle"}, ["far"]]}
ALL = {"a": NOUL, "b": CHOICE, "c": SCORE}


class Rig:
    """The routes over a `FakeGenerator`, which finds each option half as likely as the one before."""

    def __init__(self, port: int, generator: FakeGenerator) -> None:
        self._port, self.generator = port, generator

    async def ask(self, questions: object = None, state: object = "It rains.", **members: object) -> Reply:
        body = {"model": "jev-latest", "state": state, "questions": questions or ALL, **members}
        return await self.post(body)

    async def post(self, body: object, path: str = "/v1/systemone", **headers: str) -> Reply:
        return await request(self._port, "POST", path, body, JSON_TYPE | headers)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    generator, outcomes = FakeGenerator(), list[str]()
    async with http_server(*generation_routes(generator, outcomes.append)) as server:
        yield Rig(server.port, generator)
    assert generator.running == 0
    assert set(outcomes) <= {*API_OUTCOMES, *STATUS}


async def test_each_question_has_an_answer_over_its_options(rig: Rig) -> None:
    reply = await rig.ask()
    assert (reply.status, reply.json["model"]) == (200, "tape")
    answers = reply.json["answers"]
    assert list(answers) == ["a", "b", "c"]
    flags = {"x_flags": ["untrained"]}
    assert answers["a"] == {"type": "noul", "noul": pytest.approx(2 / 3), **flags}
    assert answers["b"] == {
        "type": "choice",
        "choice": "Up",
        "probabilities": {"Up": pytest.approx(2 / 3), "Down": pytest.approx(1 / 3)},
        "confidence": pytest.approx(1 / 3),
        **flags,
    }
    weights = {str(n): pytest.approx(each / 7) for n, each in enumerate((4, 2, 1))}
    assert answers["c"] == {
        "type": "score",
        "score": pytest.approx(4 / 7),
        "legend": {"0": "near", "1": {"label": "middle"}, "2": ["far"]},
        "probabilities": weights,
        "confidence": pytest.approx((4 / 7 - 1 / 3) / (1 - 1 / 3)),
        **flags,
    }
    assert reply.json["usage"] == {"input_tokens": 18, "output_tokens": 6}


async def test_a_question_is_asked_in_the_same_words_whatever_its_name_and_company(rig: Rig) -> None:
    await rig.ask({"b": CHOICE})
    await rig.ask({"x y": CHOICE, **ALL, "z": CHOICE})
    alone, first, *_, last = rig.generator.asked
    assert alone == first == last == rig.generator.asked[3]
    assert alone.turns[0].text == (
        "It rains.\n\nWhich way?\nOptions:\nUp: it rises\nDown\n"
        "Answer with one of the options, exactly as it is written."
    )
    assert (alone.choices, alone.scored, alone.session) == (("Up", "Down"), True, "")
    noul, score = rig.generator.asked[2], rig.generator.asked[4]
    assert noul.turns[0].text == "It rains.\n\nIs it up?\nAnswer YES or NO."
    assert score.turns[0].text == (
        'It rains.\n\nHow far?\nLevels:\n0: near\n1: {"label": "middle"}\n2: ["far"]\n'
        "Answer with the number of a level."
    )
    assert (noul.choices, score.choices) == (("YES", "NO"), ("0", "1", "2"))


@pytest.mark.parametrize(
    ("state", "model", "said"),
    [
        ({"session": "btc"}, "jev-latest", ""),
        ({"session": "btc"}, "tape", ""),
        ({"session": "btc"}, "session:btc", ""),
        ("", "session:btc", ""),
        ({"position": -2}, "session:btc", '{"position": -2}\n\n'),
        ("short", "session:btc", "short\n\n"),
    ],
)
async def test_a_session_is_a_state_and_a_model(rig: Rig, state: object, model: str, said: str) -> None:
    reply = await rig.ask({"a": NOUL}, state, model=model)
    assert reply.json["model"] == "session:btc"
    (asked,) = rig.generator.asked
    assert (asked.session, asked.turns[0].text) == ("btc", f"{said}Is it up?\nAnswer YES or NO.")
    # a standing question is meant by its words alone
    assert asked.meant == ("" if said else "Is it up?")
    read = {name: value for name, value in reply.json["answers"]["a"].items() if name.startswith("x_")}
    assert read == {
        "x_session": "btc",
        "x_data_version": 7,
        "x_as_of": 5,
        "x_staleness_ns": 4,
        "x_source_age_ns": 3,
        "x_daemon_age_ns": 2,
        "x_probability": 0.75,
        "x_choice_set": ["UP"],
        "x_act": True,
        "x_flags": ["stale"],
    }


async def test_described_options_do_not_mean_a_standing_question(rig: Rig) -> None:
    described = NOUL | {"criteria": {"true": "it rises"}}
    await rig.ask({"a": described, "b": CHOICE, "c": CHOICE | {"criteria": {"Up": None, "Down": None}}},
                  {"session": "btc"})  # fmt: skip
    assert [each.meant for each in rig.generator.asked] == ["", "", "Which way?"]
    assert rig.generator.asked[0].turns[0].text == "Is it up?\nYES: it rises\nAnswer YES or NO."


async def test_an_object_that_has_more_than_a_session_is_just_a_state(rig: Rig) -> None:
    for state in ({"session": "btc", "more": 1}, {"session": 5}, [{"session": "btc"}]):
        assert (await rig.ask({"a": NOUL}, state)).json["model"] == "tape"
        assert rig.generator.asked[-1].turns[0].text.startswith(json.dumps(state))


OPTIONS = {f"o{n}": None for n in range(256)}
BAD: list[tuple[str, dict[str, Any], list[str | int]]] = [
    ("no state", {"state": msgspec.UNSET}, ["state"]),
    ("null state", {"state": None}, ["state"]),
    ("no model", {"model": msgspec.UNSET}, ["model"]),
    ("no questions", {"questions": msgspec.UNSET}, ["questions"]),
    ("none", {"questions": {}}, ["questions"]),
    ("many", {"questions": dict.fromkeys(map(str, range(65)), NOUL)}, ["questions"]),
    ("no type", {"questions": {"a": {"instructions": "Up?"}}}, ["questions", "type"]),
    ("another type", {"questions": {"a": NOUL | {"type": "boolean"}}}, ["questions", "type"]),
    ("nothing asked", {"questions": {"a": {"type": "noul", "criteria": {"true": None}}}}, ["questions"]),
    ("no options", {"questions": {"a": CHOICE | {"criteria": {}}}}, ["questions", "criteria"]),
    ("an option", {"questions": {"a": CHOICE | {"criteria": {"Up": None}}}}, ["questions", "criteria"]),
    ("256 options", {"questions": {"a": CHOICE | {"criteria": OPTIONS}}}, ["questions", "criteria"]),
    ("a level", {"questions": {"a": SCORE | {"criteria": ["one"]}}}, ["questions", "criteria"]),
    ("11 levels", {"questions": {"a": SCORE | {"criteria": ["x"] * 11}}}, ["questions", "criteria"]),
    ("a null level", {"questions": {"a": SCORE | {"criteria": ["x", None]}}}, ["questions", "criteria", 1]),
    ("a map of levels", {"questions": {"a": SCORE | {"criteria": {"0": "x"}}}}, ["questions", "criteria"]),
    ("what the engine refuses", {"state": "bad_request"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("members", "where"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
async def test_what_is_invalid_is_422_and_says_where(rig: Rig, members: Any, where: list[str | int]) -> None:
    body = {"model": "tape", "state": "It rains.", "questions": {"a": NOUL}} | members
    reply = await rig.post({name: value for name, value in body.items() if value is not msgspec.UNSET})
    assert reply.status == 422
    (detail,) = reply.json["detail"]
    assert detail["loc"] == ["body", *where]
    assert detail["msg"]
    assert detail["type"] == ("missing" if "required" in detail["msg"] else "value_error")


async def test_what_is_not_json_is_422(rig: Rig) -> None:
    for body in (b"{", b"[1]", b'{"model": "tape", "state": "\\ud800", "questions": {}}'):
        reply = await rig.post(body)
        assert (reply.status, reply.json["detail"][0]["loc"][0]) == (422, "body")


@pytest.mark.parametrize(
    ("members", "status", "kind"),
    [
        ({"model": "nothing"}, 404, "not_found"),
        ({"model": "session:nothing"}, 404, "not_found"),
        ({"state": {"session": "nothing"}}, 404, "not_found"),
        ({"state": "too_long"}, 413, "request_too_large"),
        ({"state": "x" * MAX_BYTES}, 413, "request_too_large"),
        ({"state": {"session": "btc"}, "questions": {"a": NOUL | {"instructions": "x" * MAX_QUESTION_CHARS}}},
         413, "request_too_large"),
        ({"state": "halted"}, 409, "halted"),
        ({"state": "overloaded"}, 429, "rate_limit_error"),
        ({"state": "rebuilding"}, 503, "overloaded_error"),
        ({"state": "engine"}, 500, "internal_error"),
        ({"state": "broken"}, 500, "internal_error"),
        ({"state": "timeout"}, 504, "timeout_error"),
    ],
)  # fmt: skip
async def test_other_refusals_have_a_type_and_a_message(
    rig: Rig, members: Any, status: int, kind: str
) -> None:
    reply = await rig.post({"model": "tape", "state": "It rains.", "questions": {"a": NOUL}} | members)
    assert (reply.status, reply.json["detail"]["error_type"]) == (status, kind)
    assert reply.json["detail"]["message"]
    assert "secret" not in reply.body.decode()


async def test_other_methods_types_and_origins_are_refused_in_the_same_shape(rig: Rig) -> None:
    found = [
        await request(rig._port, "GET", "/v1/systemone"),
        await rig.post({}, **{"content-type": "text/plain"}),
        await rig.post({}, host="evil.example"),
    ]
    assert [(each.status, each.json["detail"]["error_type"]) for each in found] == [
        (405, "wrong_method"),
        (415, "unsupported_media_type"),
        (403, "permission_error"),
    ]


async def test_models_are_listed_for_these_clients_too(rig: Rig) -> None:
    listed = (await request(rig._port, "GET", "/v1/models")).json["models"]
    assert [each["name"] for each in listed] == ["tape", "jev-latest", "session:btc"]
    assert {each["release_date"] for each in listed} == {"2023-11-14"}


@given(
    st.lists(st.floats(-1000, 0) | st.just(-inf), min_size=2, max_size=255).filter(lambda s: max(s) > -inf)
)
def test_probabilities_are_the_scores_up_to_a_constant(scores: list[float]) -> None:
    found = normalised(scores)
    assert sum(found) == pytest.approx(1)
    assert found[scores.index(max(scores))] == max(found)
    shifted = normalised([score - 3 for score in scores])
    assert shifted == pytest.approx(found)
    best = max(scores)
    for score, p in zip(scores, found, strict=True):
        assert p == pytest.approx(max(found) * exp(score - best))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=255).filter(lambda ps: sum(ps) > 0.1))
def test_confidence_is_0_at_chance_and_1_where_one_is_certain(weights: list[float]) -> None:
    ps = [weight / sum(weights) for weight in weights]
    n = len(ps)
    assert 0 <= confidence(ps) <= 1
    assert confidence(ps) == pytest.approx((max(ps) * n - 1) / (n - 1), abs=1e-9)
    assert confidence([1 / n] * n) == pytest.approx(0, abs=1e-9)
    assert confidence([1.0] + [0.0] * (n - 1)) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
QUESTION = st.fixed_dictionaries(
    {"type": st.sampled_from(("noul", "choice", "score"))},
    optional={"instructions": JSON, "criteria": JSON | st.just({"Up": 1, "Down": None})},
)


@given(state=JSON, questions=st.dictionaries(st.text(max_size=3), QUESTION, max_size=3), data=st.data())
def test_any_body_is_translated_or_refused_as_documented(state, questions, data) -> None:
    model = data.draw(st.sampled_from(("jev-latest", "tape", "session:btc", "nothing")))
    body = {"model": model, "state": state, "questions": questions}
    try:
        asked = msgspec.json.decode(msgspec.json.encode(body), type=DecisionRequest)
    except msgspec.ValidationError:
        return
    status = 200
    try:
        wanted = parse(asked, SERVED)
    except ApiError as problem:
        status = systemone.refusal(problem).status
    else:
        assert len(wanted) == len(questions)
        assert all(isinstance(each, Generate) and len(each.choices) > 1 for each in wanted)
    assert status in (200, 404, 413, 422)


def test_numbers_and_depths_that_json_cannot_write_again_are_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    asked = DecisionRequest("tape", deep, {"a": systemone.Noul(instructions="Up?")})
    with pytest.raises(ApiError, match="nested"):
        parse(asked, SERVED)
    assert normalised([log(3), 0.0]) == pytest.approx([0.75, 0.25])
