"""The official OpenAI and Anthropic SDKs against a whole daemon with the untrained model."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from daemon.cli.demo import demo_config
from daemon.config.schema import ModelConfig, QueryConfig, SchedulerConfig
from engine.model.embedded import embedded_directory
from engine.step import Executor
from feeds.durations import Duration
from flash.question import PAPER_SIX
from tests.kit import inproc_config, tolerance, until
from tests.kit.inproc import Recorder, RunningDaemon, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAID = [
    {"role": "system", "content": "Answer with a word."},
    {"role": "user", "content": "Is it up or down?"},
]


class Clients:
    """The SDKs' clients of one daemon."""

    def __init__(self, daemon: RunningDaemon) -> None:
        url = f"http://127.0.0.1:{daemon.port}"
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
        self.daemon = daemon
        self.gateway = daemon.gateway
        self.model = daemon.gateway.status.model

    async def text(self, **more: Any) -> str:
        """Of one chat, by default the likeliest."""
        asked = {"model": self.model, "messages": SAID, "max_tokens": 12, "temperature": 0} | more
        found = await self.openai.chat.completions.create(**asked)
        return found.choices[0].message.content


@asynccontextmanager
async def served(
    executor: Callable[[Executor], Executor] | None = None, bars: int = 0, **settings: Any
) -> AsyncIterator[Clients]:
    async with running(inproc_config(**settings), executor=executor) as daemon:
        await daemon.advance(bars)
        clients = Clients(daemon)
        try:
            yield clients
        finally:
            await clients.openai.close()
            await clients.anthropic.close()
        await until(lambda: not len(daemon.gateway.generations), what="the end of all generations")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on() -> AsyncIterator[Clients]:
    """A daemon with the untrained model, and eight bars in its session."""
    async with served(bars=8) as clients:
        yield clients


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tape_model() -> AsyncIterator[Clients]:
    async with served(bars=6, model=ModelConfig()) as clients:
        yield clients


@torch.inference_mode()
def dense(tokens: list[int], most: int, end: int) -> tuple[list[int], list[torch.Tensor]]:
    """The unmodified model, greedily: what it goes on with, and the log probabilities at each token."""
    model = AutoModelForCausalLM.from_pretrained(embedded_directory(), dtype=torch.float32)
    out: list[int] = []
    rows: list[torch.Tensor] = []
    while len(out) < most and (not out or out[-1] != end):
        rows.append(model(torch.tensor([tokens + out])).logits[0, -1].log_softmax(-1))
        out.append(int(rows[-1].argmax()))
    return out, rows


def generated(directory: Path, prompt: list[int], **settings: Any) -> list[int]:
    """What transformers' own generate goes on with, greedily, at most 24 tokens; the last may be an end."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = torch.tensor([prompt])
    out = model.generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=24, **settings
    )
    return [int(token) for token in out[0, len(prompt) :]]


async def test_every_end_token_of_the_generation_config_ends_an_answer(tmp_path: Path) -> None:
    """Beside the tokenizer's, one that the model would soon say: where transformers stops, so do all APIs."""
    directory = shutil.copytree(embedded_directory(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(SAID, add_generation_prompt=True)["input_ids"]
    longer = generated(directory, prompt, eos_token_id=None)
    second = next(token for n, token in enumerate(longer) if n >= 3 and token not in longer[:n])
    ends = {"eos_token_id": [tokenizer.eos_token_id, second], "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    out = generated(directory, prompt)
    assert out == longer[: longer.index(second) + 1]
    text = tokenizer.decode(out[:-1])
    async with served(model=ModelConfig(path=str(directory))) as on:
        asked: dict[str, Any] = {"model": on.model, "max_tokens": 24, "temperature": 0}
        chat = await on.openai.chat.completions.create(messages=SAID, **asked)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (text, "stop")
        assert chat.usage.completion_tokens == len(out)
        plain = await on.openai.completions.create(prompt=prompt, **asked)
        assert (plain.choices[0].text, plain.choices[0].finish_reason) == (text, "stop")
        stream = await on.openai.chat.completions.create(messages=SAID, stream=True, **asked)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
        del asked["temperature"]
        message = await on.anthropic.messages.create(
            system=SAID[0]["content"], messages=[SAID[1]], extra_body={"temperature": 0}, **asked
        )
        assert (message.content[0].text, message.stop_reason) == (text, "end_turn")
        short = await on.openai.chat.completions.create(
            messages=SAID, **asked | {"temperature": 0, "max_tokens": len(out) - 1}
        )
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == (text, "length")


async def test_text_and_log_probabilities_are_those_of_the_unmodified_model(on: Clients) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_directory())
    rendered = tokenizer.apply_chat_template(SAID, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    out, rows = dense(prompt, 24, tokenizer.eos_token_id)
    most: dict[str, Any] = {"model": on.model, "max_tokens": 24}
    greedy = most | {"temperature": 0}
    found = await on.openai.chat.completions.create(messages=SAID, logprobs=True, top_logprobs=3, **greedy)
    (choice,) = found.choices
    text, shown = choice.message.content, [token for token in out if token != tokenizer.eos_token_id]
    assert text == tokenizer.decode(shown)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), len(out))
    bound = tolerance.of_embedded_gap()
    for token, row, got in zip(out, rows, choice.logprobs.content, strict=False):
        assert abs(got.logprob - row[token].item()) <= bound
        best = row.topk(3).values.tolist()
        assert [each.logprob for each in got.top_logprobs] == pytest.approx(best, abs=bound)
    written = bytes(b for each in choice.logprobs.content for b in each.bytes)
    assert written.decode(errors="replace") == tokenizer.decode(shown)
    # every other way to ask the same
    system, said = SAID[0]["content"], [SAID[1]]
    message = await on.anthropic.messages.create(
        system=system, messages=said, extra_body={"temperature": 0}, **most
    )
    assert message.content[0].text == text
    answer = await on.openai.responses.create(
        model=on.model, instructions=system, input=said, max_output_tokens=24, temperature=0
    )
    assert answer.output_text == text
    for asked in (rendered.removeprefix(tokenizer.bos_token), prompt):
        assert (await on.openai.completions.create(prompt=asked, **greedy)).choices[0].text == text
    stream = await on.openai.chat.completions.create(messages=SAID, stream=True, seed=1, **greedy)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 3
    assert await on.text(stop=[text[4:7]], max_tokens=24) == text[:4]
    counted = await on.anthropic.messages.count_tokens(model=on.model, system=system, messages=said)
    assert counted.input_tokens == len(prompt)


async def test_seeds_answers_to_one_prompt_and_kept_responses(on: Clients) -> None:
    def hits(cache: str) -> int:
        return on.daemon.count("api_cache", cache=cache, outcome="hit")

    hot = {"temperature": 1.5, "top_p": 0.9}
    one, kept = await on.text(**hot, seed=1), hits("response")
    assert one == await on.text(**hot, seed=1)
    assert hits("response") == kept + 1
    shorter = await on.text(**hot, seed=1, max_tokens=5)  # not from the cache
    assert one.startswith(shorter.rstrip("\ufffd"))
    assert len({await on.text(**hot, seed=seed) for seed in range(4)}) > 1
    assert len({await on.text(**hot) for _ in range(4)}) > 1  # without a seed each is drawn by itself

    before = on.daemon.count("batch_tokens", **{"class": "pool"})
    words = [{"role": "user", "content": " ".join(f"price {n}" for n in range(200))}]
    found = await on.openai.chat.completions.create(
        model=on.model, messages=words, n=4, max_tokens=4, seed=5, temperature=1.5
    )
    assert len({each.message.content for each in found.choices}) > 1
    # one prefill, and of each answer the last token of the prompt and its own
    computed = on.daemon.count("batch_tokens", **{"class": "pool"}) - before
    assert computed <= found.usage.prompt_tokens + 4 * 5
    assert hits("render") > 0
    assert hits("tokenise") > 0


async def test_constrained_text(on: Clients) -> None:
    schema = {
        "type": "object",
        "properties": {"trend": {"enum": ["UP", "DOWN"]}, "level": {"type": "integer"}},
        "required": ["trend", "level"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "view", "schema": schema, "strict": True}}
    found = json.loads(await on.text(response_format=form, max_tokens=60))
    assert found["trend"] in ("UP", "DOWN")
    assert isinstance(found["level"], int)
    message = await on.anthropic.messages.create(
        model=on.model,
        messages=[SAID[1]],
        max_tokens=60,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    assert set(json.loads(message.content[0].text)) == {"trend", "level"}
    assert message.stop_reason == "end_turn"
    choices = ["sideways", "up a lot"]
    assert await on.text(extra_body={"foretick": {"choices": choices}}) in choices
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=r"schema\.properties\.a"):
        await on.text(response_format=form)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_a_session_answers_from_its_newest_version_and_a_standing_question_at_once(on: Clients) -> None:
    ask, state = partial(on.openai.chat.completions.create, model="session:aaa"), on.daemon.state()
    ready = await ask(messages=user("trend"))
    facts = ready.model_extra["foretick"]
    assert facts["cached"]
    assert ready.choices[0].message.content == facts["choice"]
    assert facts["choice"] in ("UP", "DOWN")
    turns = [*user("What did the last bar do?"), {"role": "assistant", "content": "It fell."}]
    chosen = await ask(
        messages=turns + user("Will the next one?"), extra_body={"foretick": {"choices": ["YES", "NO"]}}
    )
    facts = chosen.model_extra["foretick"]
    assert facts["choice"] in ("YES", "NO")
    assert not facts["cached"]
    assert facts["data_version"] == state.version > 0
    assert facts["as_of"] > 0
    assert facts["staleness_ns"] > 0
    assert "untrained" in facts["flags"]
    free = {"messages": SAID, "max_tokens": 10, "temperature": 0}
    whole = await ask(**free)
    assert whole.usage.prompt_tokens_details.cached_tokens > 0  # the tape
    chunks = [chunk async for chunk in await ask(**free, stream=True)]
    text = "".join(each.choices[0].delta.content or "" for each in chunks)
    assert text == whole.choices[0].message.content
    counted = await on.anthropic.messages.count_tokens(model="session:aaa", messages=[SAID[1]])
    assert counted.input_tokens > state.live_tokens
    with pytest.raises(openai.NotFoundError):
        await on.openai.chat.completions.create(model="session:zzz", messages=SAID)
    with pytest.raises(openai.BadRequestError, match="user's"):
        await ask(messages=turns[1:])


async def test_a_client_that_leaves_frees_the_engine_and_limits_are_said() -> None:
    settings = {
        "query": QueryConfig(endpoint="tcp://127.0.0.1:*", max_prompts=3, max_prompts_each=2),
        "scheduler": SchedulerConfig(max_new_tokens=200, max_prompt_tokens=100),
        "sessions": (),
        "standing": "none",
    }
    async with served(Recorder(0.05), **settings) as on:
        ask = on.openai.chat.completions.create
        long = {"model": on.model, "messages": SAID, "max_tokens": 200, "seed": 1}
        streams = [await ask(**(long | {"seed": seed}), stream=True) for seed in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError) as busy:
            await ask(**long)
        assert busy.value.response.headers["retry-after"] == "1"
        for stream in streams:
            await stream.close()
        await until(lambda: not len(on.gateway.generations), what="the streams to be given up")
        computed = on.daemon.count("batch_tokens", **{"class": "pool"})
        await asyncio.sleep(0.5)  # of ten passes
        later = on.daemon.count("batch_tokens", **{"class": "pool"})
        assert later - computed <= 2
        with pytest.raises(openai.APITimeoutError):
            await on.openai.with_options(timeout=2.0).chat.completions.create(**long)
        with pytest.raises(openai.BadRequestError) as too_long:
            await on.text(messages=[{"role": "user", "content": "price " * 200}])
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="token that is not"):
            await on.openai.completions.create(model=on.model, prompt=[2**30])
        texts = await asyncio.gather(*(on.text(max_tokens=3, seed=n) for n in range(2)))
        assert len(set(texts)) == 1  # the likeliest
        await until(lambda: on.daemon.count("api_requests", outcome="client_closed") == 3)
        assert on.daemon.count("api_requests", outcome="busy") == 1


async def test_an_answer_at_once_has_time_while_tokens_come_and_is_paid_for_by_who_leaves() -> None:
    settings = {
        "query": QueryConfig(endpoint="tcp://127.0.0.1:*", max_wait=Duration(2_000_000_000)),
        "sessions": (),
        "standing": "none",
    }
    async with served(Recorder(0.2), **settings) as on:
        ask = on.openai.chat.completions.create
        usage = (await ask(model=on.model, messages=SAID, max_tokens=12, temperature=0)).usage

        def charged() -> int:
            return on.daemon.count("tenant_tokens", tenant="local")

        assert charged() == usage.total_tokens
        with pytest.raises(openai.APITimeoutError):
            await on.openai.with_options(timeout=3.0).chat.completions.create(
                model=on.model, messages=SAID, max_tokens=50, seed=1
            )
        await until(lambda: not len(on.gateway.generations))
        assert charged() > usage.total_tokens + 1


async def test_the_tape_model_answers_its_questions_and_refuses_to_chat(tape_model: Clients) -> None:
    on, ask = tape_model, tape_model.openai.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="session:NAME"):
        await ask(model=on.model, messages=SAID)
    with pytest.raises(openai.BadRequestError, match="does not answer"):
        await ask(model="session:aaa", messages=user("How are you?"))
    ready = await ask(model="session:aaa", messages=user("trend"))
    assert ready.choices[0].message.content in ("UP", "DOWN", "NONE")
    jump = await ask(model="session:aaa", messages=user("jump"), stream=True)
    chunks = [chunk async for chunk in jump]
    assert "".join(each.choices[0].delta.content or "" for each in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


class Trend(pydantic.BaseModel):
    """The answer to `trend`, as a program would have it."""

    trend: Literal["DOWN", "UP"]
    source: Literal["tape"]


class Level(pydantic.BaseModel):
    level: float


class Side(pydantic.BaseModel):
    side: Literal["LONG", "SHORT"]


async def test_its_choice_comes_as_the_json_that_a_schema_asks_for(tape_model: Clients) -> None:
    said, session, on = user("trend"), {"model": "session:aaa"}, tape_model
    chat, answer, claude = on.openai.chat.completions, on.openai.responses, on.anthropic.messages
    found = await chat.parse(**session, messages=said, response_format=Trend)
    parsed = found.choices[0].message.parsed
    assert (parsed.source, found.choices[0].finish_reason) == ("tape", "stop")
    assert parsed.trend == found.model_extra["foretick"]["choice"]
    response = await answer.parse(**session, input="trend", text_format=Trend)
    assert (response.status, response.output_parsed.source) == ("completed", "tape")
    message = await claude.parse(**session, max_tokens=1, messages=said, output_format=Trend)
    assert (message.stop_reason, message.parsed_output.source) == ("end_turn", "tape")
    async with chat.stream(**session, messages=said, response_format=Trend) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed.trend in ("UP", "DOWN")
    # in the words of a standing question, and as a text alone
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["UP", "NONE"]}}}
    alone = await chat.create(
        **session, messages=user(PAPER_SIX[0].text), response_format=form, temperature=0.7
    )
    assert json.loads(alone.choices[0].message.content) in ("UP", "NONE")
    for asked, kind, why in (
        ("trend", Side, "LONG"),
        ("trend", Level, "exactly one enum.*answered by UP, DOWN, NONE"),
        ("exact_value", Level, "answered by a number"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            await chat.parse(**session, messages=user(asked), response_format=kind)


_FROM_TREE = "from daemon.api.client import QueryClient\nfrom daemon.api.messages import LostMessage"


async def test_the_snippets_of_the_page_run_word_for_word(capsys) -> None:
    """On the demo's sessions and model, at another port."""
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 7
    demo = demo_config("127.0.0.1:1")
    config = inproc_config(sessions=demo.sessions, model=ModelConfig())
    async with running(config) as daemon:
        daemon.feed(12)
        await until(lambda: all(len(each.answers) == 6 for each in daemon.gateway.sessions.states.values()))
        code = "".join(blocks).replace("7800", str(daemon.port))
        code = code.replace("tcp://127.0.0.1:7801", daemon.endpoint)
        # the distribution's modules are the tree's, under another name
        code = code.replace("from foretick_client import LostMessage, QueryClient", _FROM_TREE)
        done: dict[str, Any] = {}
        running_all = asyncio.ensure_future(asyncio.to_thread(exec, code, done))
        while not running_all.done():  # its subscription waits for new answers
            daemon.feed()
            await asyncio.wait([running_all], timeout=0.2)
        await running_all
        for name in ("client", "claude"):
            done[name].close()
    assert "session:alpha" in capsys.readouterr().out
