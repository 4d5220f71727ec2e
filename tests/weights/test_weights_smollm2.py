"""SmolLM2-135M-Instruct: logits and texts of the unmodified model, and questions it must understand."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch

from daemon.config.by_model import by_model
from daemon.config.schema import ModelConfig, NamedModel, QuestionConfig, RecoveryConfig, SessionConfig
from engine.engine import Engine
from engine.model.canary import check, dense_logits
from engine.model.chat_format import PromptFormat
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.step import Chunk
from feeds.durations import Duration
from ingest.lines import bar_line
from regions.tape import Retention
from tapes.rules import RULES
from tapes.worked_examples import worked_examples
from tests.kit import inproc_config, tolerance, until
from tests.kit.engine import TapeWithHistory, ask_together, tokens
from tests.kit.inproc import RunningDaemon, running
from tests.kit.records import event, tick
from tests.kit.weights import smollm2_directory

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]
README = Path(__file__).parents[2] / "README.md"
COMPANIES = ("Apple", "Tesla", "Boeing")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(smollm2_directory(), layers="compiled")


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    """By transformers' layers, for the oracle."""
    return load_model(smollm2_directory(), layers="torch")


def test_its_logits_over_regions_are_the_dense_model_s(model: LoadedModel, plain: LoadedModel) -> None:
    """The canary, by either layers; then a tape of many evictions and two questions at once."""
    assert model.layers_run.startswith("compiled layers")
    assert check(model) < 1e-4
    assert check(plain) < 1e-4
    world = TapeWithHistory(model, blocks=120, frame_limit=400, retention=Retention(96), frozen=20)
    while world.tape.evicted_tokens < 70:
        world.append()
    forks = [(world.tape.fork(), world.coord, world.tape.evicted_tokens) for _ in range(2)]
    asked = [(fork, tokens(world.rng, n)) for (fork, *_), n in zip(forks, (7, 3), strict=True)]
    answers = ask_together(world.engine, asked)
    for (_, coord, evicted), (_, question), logits in zip(forks, asked, answers, strict=True):
        world.history.add(question, coord, evicted, world.owner(), logits)
    world.history.verify(plain)


def test_a_tape_and_its_questions_are_the_dense_model_s(model: LoadedModel, plain: LoadedModel) -> None:
    """Bars as the daemon writes them, asked in full and by number, before evictions and after.

    Then as an exact session reads the same window: apart from what carries on, and the dense model of it.
    """
    prompt = PromptFormat.of(model.tokenizer, end_ids=model.end_ids)
    text = RULES[0].text
    frozen = prompt.frozen(None, [text])
    lines = [prompt.encode(bar_line(bar, each.spec)) for each in worked_examples(1) for bar in each.bars[:16]]
    world = TapeWithHistory(model, blocks=400, frame_limit=800, retention=Retention(400), frozen=frozen)
    asked = (prompt.question(text), prompt.numbered(1))
    carried = []
    for first, last in ((0, 4), (4, 10), (10, 16)):
        world.append_together(*lines[first:last])
        coord, evicted = world.coord, world.tape.evicted_tokens
        forks = [world.tape.fork() for _ in asked]
        carried = ask_together(world.engine, list(zip(forks, asked, strict=True)))
        for question, logits in zip(asked, carried, strict=True):
            world.history.add(question, coord, evicted, world.owner(), logits)
        for fork in forks:
            fork.release()
    assert world.tape.evicted_tokens > 100
    world.history.verify(plain)
    window = list(world.tape.window)
    exact = world.engine.open_tape("exact", frozen, Retention(400))
    world.engine.append(exact, [window])
    for question, other in zip(asked, carried, strict=True):
        fork = exact.fork()
        (logits,) = ask_together(world.engine, [(fork, question)])
        fork.release()
        whole = dense_logits(plain, [*frozen, *window, *question])[-len(question) :]
        tolerance.assert_logits(plain, logits, whole)
        assert tolerance.apart(other, whole) > tolerance.of_model(plain, tolerance.largest(whole))


def test_its_greedy_texts_are_those_of_transformers(model: LoadedModel, plain: LoadedModel) -> None:
    """64 tokens after real text, token by token on a fork of a tape filled in pieces; and with drafts."""
    text = plain.tokenizer.encode(README.read_text(encoding="utf-8"))[:200]
    engine = Engine(model, blocks=64, block_size=16)
    tape = engine.open_tape("t", text[:50], Retention(400))
    for start in range(50, 180, 26):
        engine.append(tape, [text[start : start + 26]])
    found = engine.answer(tape, text[180:], max_tokens=64)
    plain.model.set_attn_implementation("eager")
    ids = torch.tensor([text])
    expected = plain.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
    )[0, len(text) :].tolist()
    assert len(found) == 64 or [*found, expected[len(found)]] == expected
    assert found == expected[: len(found)]
    fork, drafts = tape.fork(), [*expected[:3], (expected[3] + 1) % 1000, expected[4]]
    work = [Chunk(fork, [*text[180:], *drafts], drafts=len(drafts))]
    assert fork.acquire(len(work[0].tokens))
    (choice,) = engine.execute(work)
    assert choice is not None
    assert [*(each.token for each in choice.accepted), choice.token] == expected[:4]
    fork.release()


@pytest.fixture
async def daemon() -> AsyncIterator[RunningDaemon]:
    """Of this model, without standing questions."""
    model = ModelConfig(path=str(smollm2_directory()), layers="compiled", dtype="float32")
    off = RecoveryConfig(Duration(0))
    async with running(inproc_config(model=model, standing="none", recovery=off)) as made:
        yield made
        await made.gateway.stop()


async def test_chats_over_both_sdks_end_where_the_model_ends_and_say_paris(daemon: RunningDaemon) -> None:
    url, model = f"http://127.0.0.1:{daemon.port}", daemon.gateway.status.model
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 40,
        "extra_body": {"temperature": 0},
    }
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (choice,) = (await client.chat.completions.create(**asked)).choices
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
        message = await claude.messages.create(**asked)
    assert (choice.finish_reason, message.stop_reason) == ("stop", "end_turn")
    (part,) = message.content
    assert part.text == choice.message.content
    assert "Paris" in part.text
    assert "<|im_end|>" not in part.text


@pytest.mark.parametrize("company", COMPANIES)
async def test_a_question_that_needs_a_headline_is_answered_from_it(
    company: str, daemon: RunningDaemon
) -> None:
    """The same tape with another name gives another answer, in words and among choices."""
    daemon.put(tick(0.1), tick(1.1), event("text", 1.5, text=f"{company} cuts its outlook after weak sales"))
    await until(lambda: daemon.state().live_records == 2, 60)
    question = "Which company cut its outlook?"
    said = await daemon.call("ask", "aaa", question, 24)
    assert company in said.text
    assert not any(other in said.text for other in COMPANIES if other != company)
    chosen = await daemon.call("ask", "aaa", question, choices=COMPANIES)
    assert chosen.choice == company


async def test_beside_the_tape_model_it_answers_as_it_does_alone() -> None:
    """Both read one tape; a chat goes to it by its name, and what the tape model does not know, too."""
    both = inproc_config(
        model=ModelConfig(threads=1),
        models=(NamedModel(name="smol", path=str(smollm2_directory()), layers="compiled"),),
        sessions=(
            SessionConfig(name="tape", symbol="V:AAA"),
            SessionConfig(name="words", symbol="V:AAA", model="smol", retention_tokens=128),
        ),
        questions=(QuestionConfig(name="calm", text="Is it calm?", choices=("Yes", "No")),),
        standing="none",
    )
    chat = {
        "messages": [{"role": "user", "content": "What is a bar chart?"}],
        "max_tokens": 8,
        "temperature": 0,
    }

    async def said(daemon: RunningDaemon, model: str) -> tuple[object, ...]:
        await daemon.advance(3)
        answers = [(a.text, a.choice, a.logit_gap, a.model) for a in daemon.answers("words")]
        reply = await daemon.http("POST", "/v1/chat/completions", {**chat, "model": model})
        return answers, reply.json["choices"][0]["message"]["content"]

    async with running(both) as daemon:
        together = await said(daemon, "smol")
        reply = await daemon.call("ask", "tape", "Is it wild?", 8, ("Yes", "No"))
        assert (reply.session, reply.model) == ("words", smollm2_directory().name)
        assert (await daemon.call("ask", "tape", "trend", 8, ("UP", "DOWN"))).model == "foretick-tape"
    _, words = by_model(both)
    async with running(words) as daemon:
        assert await said(daemon, smollm2_directory().name) == together
