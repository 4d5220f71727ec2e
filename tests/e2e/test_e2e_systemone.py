"""System One on a real daemon: probabilities of the unmodified model, sessions, and independent questions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from daemon.api.systemone import Choice, Noul, Score, normalised, worded
from daemon.config.schema import ModelConfig, QuestionConfig, SchedulerConfig
from engine.model.embedded import embedded_directory
from tests.kit import inproc_config, tolerance
from tests.kit.inproc import RunningDaemon, Tape, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
STATE = {"note": "charged twice", "<|end|>": "a special token is a blank"}
READ = '{"note": "charged twice", " ": "a special token is a blank"}'
NOUL = Noul(instructions="Is money asked for?")
CHOICE = Choice(
    instructions="Which desk?",
    criteria={"Refund": None, "Re": "something else", "Billing": None, "Bill": None},
)
SCORE = Score(instructions="How angry?", criteria=["calm", "cross", "angry"])
QUESTIONS: dict[str, Any] = {
    "noul": {"type": "noul", "instructions": "Is money asked for?"},
    "choice": {"type": "choice", "instructions": CHOICE.instructions, "criteria": CHOICE.criteria},
    "score": {"type": "score", "instructions": SCORE.instructions, "criteria": SCORE.criteria},
}
STANDING = (
    QuestionConfig("side", text="Which side?", choices=("BUY", "SELL", "NONE")),
    QuestionConfig("quiet", text="Is it quiet?", choices=("YES", "NO")),
)
AAA = {"session": "aaa"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon() -> AsyncIterator[RunningDaemon]:
    """Of the untrained model: one session with four bars, and one without data."""
    config = inproc_config(
        ("V:AAA", "V:BBB"), standing="none", questions=STANDING, scheduler=SchedulerConfig(max_new_tokens=16)
    )
    async with running(config, tape=Tape("V:AAA")) as made:
        await made.advance(4)
        yield made


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_directory(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_directory())


async def asked(daemon: RunningDaemon, questions: object, state: object = STATE, **more: Any) -> Any:
    body = {"model": "jev-latest", "state": state, "questions": questions, **more}
    reply = await daemon.http("POST", "/v1/systemone", body)
    assert reply.status == 200, reply
    return reply.json["answers"]


def numbers(answer: Any) -> list[float]:
    return [answer["noul"], 1 - answer["noul"]] if "noul" in answer else [*answer["probabilities"].values()]


@torch.inference_mode()
def dense(model: Any, prompt: Sequence[int], labels: Sequence[Sequence[int]]) -> list[float]:
    """The probability of each label as a whole behind the prompt: a forward pass each, of all its tokens."""
    scores = []
    for label in labels:
        rows = model(torch.tensor([[*prompt, *label]])).logits[0, len(prompt) - 1 : -1].double()
        logprobs = rows.log_softmax(-1)
        scores.append(sum(row[token] for row, token in zip(logprobs, label, strict=True)).item())
    for n, label in enumerate(labels):  # what begins with a longer one is not this one's
        for m, longer in enumerate(labels):
            if len(longer) > len(label) and list(longer[: len(label)]) == list(label):
                scores[n] = torch.tensor([scores[n]]).exp().sub(torch.tensor([scores[m]]).exp()).log().item()
    return normalised(scores)


@pytest.mark.parametrize(("name", "question"), [("noul", NOUL), ("choice", CHOICE), ("score", SCORE)])
async def test_probabilities_are_those_of_the_unmodified_model(
    daemon: RunningDaemon, model: Any, tokenizer: Any, name: str, question: Noul | Choice | Score
) -> None:
    said = [{"role": "user", "content": f"{READ}\n\n{worded(question)}"}]
    prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    labels = [tokenizer.encode(each, add_special_tokens=False) for each in question.options]
    found = numbers((await asked(daemon, {"a": QUESTIONS[name]}))["a"])
    assert found == pytest.approx(dense(model, prompt, labels), abs=tolerance.of_embedded_gap())


async def test_so_are_those_of_a_question_about_a_session(
    daemon: RunningDaemon, model: Any, tokenizer: Any
) -> None:
    built = daemon.host.first.parts.requests._built
    tape = built.tapes["aaa"]
    assert not tape.evicted_tokens
    labels = [tokenizer.encode(each, add_special_tokens=False) for each in CHOICE.options]
    assert max(map(len, labels)) > 1
    prompt = [*tape.prefix, *tape.window, *built.prompt.question(worded(CHOICE))]
    found = (await asked(daemon, {"a": QUESTIONS["choice"]}, AAA))["a"]
    assert numbers(found) == pytest.approx(dense(model, prompt, labels), abs=tolerance.of_embedded_gap())
    assert (found["x_session"], found["x_data_version"], found["x_flags"]) == ("aaa", 4, ["untrained"])
    assert found["x_as_of"] == daemon.state().times.as_of
    assert found["x_staleness_ns"] > 0
    assert ("x_probability" in found, found["x_uncalibrated"]) == (False, "not_calibrated")


@pytest.mark.parametrize("state", [STATE, AAA], ids=["text", "session"])
async def test_no_other_question_and_no_order_changes_an_answer(daemon: RunningDaemon, state: object) -> None:
    alone = {name: (await asked(daemon, {name: each}, state))[name] for name, each in QUESTIONS.items()}
    others = {f"more {n}": {"type": "noul", "instructions": f"Is it number {n}?"} for n in range(5)}
    orders = (QUESTIONS, dict(reversed(QUESTIONS.items())), others | QUESTIONS)
    for replies in await asyncio.gather(*(asked(daemon, each, state) for each in orders)):
        for name, answer in alone.items():
            assert numbers(replies[name]) == pytest.approx(numbers(answer), abs=1e-5)


async def test_openais_decisions_are_the_same_numbers(daemon: RunningDaemon) -> None:
    choices = [
        {"value": name, **({"description": text} if text else {})} for name, text in CHOICE.criteria.items()
    ]
    questions: list[Any] = [
        {"type": "predicate", "instructions": NOUL.instructions},
        {"type": "choice", "instructions": CHOICE.instructions, "choices": choices, "name": "desk"},
        {
            "type": "score",
            "instructions": SCORE.instructions,
            "levels": [{"label": each} for each in SCORE.criteria],
        },
    ]
    url = f"http://127.0.0.1:{daemon.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for model, said, state in ((daemon.gateway.status.model, "cross", "cross"), ("session:aaa", "", AAA)):
            found = await client.decisions.create(model=model, input=said, questions=questions)
            expected = await asked(daemon, QUESTIONS, state)
            predicate, choice, score = found.answers
            assert predicate.probability == pytest.approx(expected["noul"]["noul"], abs=1e-5)
            assert (choice.name, choice.choice) == ("desk", expected["choice"]["choice"])
            for answer, name in ((choice, "choice"), (score, "score")):
                ps = [each.probability for each in answer.probabilities]
                assert ps == pytest.approx(numbers(expected[name]), abs=1e-5)
                assert answer.confidence == pytest.approx(expected[name]["confidence"], abs=1e-4)
            assert score.score == pytest.approx(expected["score"]["score"], abs=1e-4)
            assert [each.label for each in score.probabilities] == SCORE.criteria
            version = predicate.model_extra["foretick"]["data_version"]
            assert version == expected["noul"].get("x_data_version")
            assert found.model == model


async def test_equal_questions_about_equal_states_are_kept(daemon: RunningDaemon) -> None:
    first, again = [(await asked(daemon, QUESTIONS, "kept"))["choice"] for _ in range(2)]
    assert not {"x_cached", "x_uncalibrated"} & first.keys()
    assert again == first | {"x_cached": True, "x_flags": [*first["x_flags"], "kept_reply"]}


async def test_a_standing_question_is_answered_from_its_ready_answer(daemon: RunningDaemon) -> None:
    """By its name or its text, with the probabilities that the engine finds when it is asked again."""
    side = {"type": "choice", "criteria": {"BUY": None, "SELL": None, "NONE": None}}
    questions = {
        "name": side | {"instructions": "side"},
        "text": side | {"instructions": "Which  side?"},
        "noul": {"type": "noul", "instructions": "quiet"},
    }
    ready = await asked(daemon, questions, AAA)
    assert all(each["x_cached"] and each["x_data_version"] == 4 for each in ready.values())
    assert ready["name"]["probabilities"] == ready["text"]["probabilities"]
    (answer,) = [each for each in daemon.answers() if (each.question, each.data_version) == ("side", 4)]
    assert ready["name"]["choice"] == answer.choice
    state = daemon.state()
    answers, state.answers = state.answers, {}
    try:
        computed = await asked(daemon, questions, AAA)
    finally:
        state.answers = answers
    for name, each in computed.items():
        assert "x_cached" not in each
        assert numbers(each) == pytest.approx(numbers(ready[name]), abs=1e-5)


async def test_choices_that_are_one_are_invalid_and_a_session_without_data_is_not_asked(
    daemon: RunningDaemon,
) -> None:
    same = {"type": "choice", "instructions": "Which?", "criteria": {"<|end|>a": None, " a": None}}
    body = {"model": "jev-latest", "state": AAA, "questions": {"a": same}}
    reply = await daemon.http("POST", "/v1/systemone", body)
    assert (reply.status, "same tokens" in reply.json["detail"][0]["msg"]) == (422, True), reply
    unread = {"state": {"session": "bbb"}, "questions": {"a": QUESTIONS["noul"]}}
    reply = await daemon.http("POST", "/v1/systemone", body | unread)
    assert (reply.status, reply.json["detail"]["error_type"]) == (409, "no_data"), reply


async def test_the_tape_model_answers_its_own_questions_and_says_that_it_reads_no_words() -> None:
    async with running(inproc_config(model=ModelConfig(), standing="none")) as daemon:
        await daemon.advance(4)
        own = {
            "noul": {"type": "noul", "instructions": "jump"},
            "choice": {"type": "choice", "instructions": "range_location",
                       "criteria": {"UPPER": None, "LOWER": None, "MIDDLE": None, "NONE": None}},
        }  # fmt: skip
        answers = await asked(daemon, own, AAA)
        assert sum(answers["choice"]["probabilities"].values()) == pytest.approx(1)
        assert answers["choice"]["x_data_version"] == answers["noul"]["x_data_version"] == 4
        reply = await daemon.call("ask", "aaa", "jump", choices=("YES", "NO"))
        assert (answers["noul"]["noul"] > 0.5) == (reply.choice == "YES")
        assert answers["noul"]["x_probability"] == pytest.approx(reply.probability)  # calibrated
        assert tuple(answers["noul"]["x_choice_set"]) == reply.choice_set
        assert answers["noul"]["x_act"] == (len(reply.choice_set) == 1)
        foreign = {"type": "noul", "instructions": "Does it rain?"}
        body = {"model": "session:aaa", "state": "", "questions": {"a": foreign}}
        refused = await daemon.http("POST", "/v1/systemone", body)
        assert (refused.status, "does not answer" in refused.json["detail"][0]["msg"]) == (422, True)
        words = (await asked(daemon, {"a": foreign}, "It is wet."))["a"]
        assert words["x_flags"] == ["unread"]
