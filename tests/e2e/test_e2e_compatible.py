"""The official OpenAI and Anthropic SDKs against a whole daemon with the untrained model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from daemon.cli.demo import demo_config
from daemon.config.schema import ModelConfig, QueryConfig, SchedulerConfig
from daemon.gateway.gateway import Gateway
from engine.model.embedded import embedded_directory
from engine.step import Executor
from feeds.durations import Duration
from flash.question import PAPER_SIX
from tests.kit import MemorySink, QueueSource, inproc_config, tolerance, until
from tests.kit.inproc import Recorder, Tape, answers, count, running

SAID = [
    {"role": "system", "content": "Answer with a word."},
    {"role": "user", "content": "Is it up or down?"},
]


class Clients:
    """The SDKs' clients of one daemon."""

    def __init__(self, gateway: Gateway) -> None:
        url = f"http://127.0.0.1:{gateway.http.port}"
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
        self.gateway = gateway
        self.model = gateway.status.model

    async def text(self, **more: Any) -> str:
        """Of one chat, by default the likeliest."""
        asked = {"model": self.model, "messages": SAID, "max_tokens": 12, "temperature": 0} | more
        found = await self.openai.chat.completions.create(**asked)
        return found.choices[0].message.content


@asynccontextmanager
async def served(
    executor: Callable[[Executor], Executor] | None = None, bars: int = 0, **settings: Any
) -> AsyncIterator[Clients]:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(**settings), source, sink, executor) as gateway:
        source.put(*(tape.second(n) for n in range(bars)))
        if bars:
            await until(lambda: any(a.data_version for a in answers(sink)), what="answers")
        clients = Clients(gateway)
        try:
            yield clients
        finally:
            await clients.openai.close()
            await clients.anthropic.close()
        await until(lambda: not len(gateway.generations), what="the end of all generations")


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


async def test_text_and_log_probabilities_are_those_of_the_unmodified_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_directory())
    rendered = tokenizer.apply_chat_template(SAID, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    out, rows = dense(prompt, 24, tokenizer.eos_token_id)
    async with served() as on:
        found = await on.openai.chat.completions.create(
            model=on.model, messages=SAID, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3
        )
        (choice,) = found.choices
        shown = [token for token in out if token != tokenizer.eos_token_id]
        assert choice.message.content == tokenizer.decode(shown)
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), len(out))
        bound = tolerance.of_embedded_gap()
        for token, row, got in zip(out, rows, choice.logprobs.content, strict=False):
            assert abs(got.logprob - row[token].item()) <= bound
            best = row.topk(3).values.tolist()
            assert [each.logprob for each in got.top_logprobs] == pytest.approx(best, abs=bound)
        assert bytes(b for each in choice.logprobs.content for b in each.bytes).decode(
            errors="replace"
        ) == tokenizer.decode(shown)
        # every other way to ask the same
        said = [SAID[1]]
        message = await on.anthropic.messages.create(
            model=on.model,
            system=SAID[0]["content"],
            messages=said,
            max_tokens=24,
            extra_body={"temperature": 0},
        )
        assert message.content[0].text == choice.message.content
        answer = await on.openai.responses.create(
            model=on.model,
            instructions=SAID[0]["content"],
            input=said,
            max_output_tokens=24,
            temperature=0,
        )
        assert answer.output_text == choice.message.content
        for asked in (rendered.removeprefix(tokenizer.bos_token), prompt):
            text = await on.openai.completions.create(
                model=on.model, prompt=asked, max_tokens=24, temperature=0
            )
            assert text.choices[0].text == choice.message.content
        stream = await on.openai.chat.completions.create(
            model=on.model, messages=SAID, max_tokens=24, temperature=0, stream=True, seed=1
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == choice.message.content
        assert len([piece for piece in pieces if piece]) > 3
        assert (await on.text(stop=[choice.message.content[4:7]], max_tokens=24)) == choice.message.content[
            :4
        ]
        counted = await on.anthropic.messages.count_tokens(
            model=on.model, system=SAID[0]["content"], messages=said
        )
        assert counted.input_tokens == len(prompt)


async def test_seeds_answers_to_one_prompt_and_kept_responses() -> None:
    async with served() as on:
        hot = {"temperature": 1.5, "top_p": 0.9}
        one = await on.text(**hot, seed=1)
        assert one == await on.text(**hot, seed=1)
        assert count(on.gateway, "api_cache", cache="response", outcome="hit") == 1
        shorter = await on.text(**hot, seed=1, max_tokens=5)  # not from the cache
        assert one.startswith(shorter.rstrip("\ufffd"))
        assert len({await on.text(**hot, seed=seed) for seed in range(4)}) > 1
        assert len({await on.text(**hot) for _ in range(4)}) > 1  # without a seed each is drawn anew

        before = on.gateway.store.value("foretick_batch_tokens_total", **{"class": "pool"})
        words = " ".join(f"price {n}" for n in range(200))
        found = await on.openai.chat.completions.create(
            model=on.model,
            messages=[{"role": "user", "content": words}],
            n=4,
            max_tokens=4,
            seed=5,
            temperature=1.5,
        )
        computed = on.gateway.store.value("foretick_batch_tokens_total", **{"class": "pool"}) - before
        assert len({each.message.content for each in found.choices}) > 1
        # one prefill, and of each answer the last token of the prompt and its own
        assert computed <= found.usage.prompt_tokens + 4 * 5
        assert count(on.gateway, "api_cache", cache="render", outcome="hit") > 0
        assert count(on.gateway, "api_cache", cache="tokenise", outcome="hit") > 0


async def test_constrained_text() -> None:
    schema = {
        "type": "object",
        "properties": {"trend": {"enum": ["UP", "DOWN"]}, "level": {"type": "integer"}},
        "required": ["trend", "level"],
        "additionalProperties": False,
    }
    async with served() as on:
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
        choice = await on.text(extra_body={"foretick": {"choices": ["sideways", "up a lot"]}})
        assert choice in ("sideways", "up a lot")
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=r"schema\.properties\.a"):
            await on.text(response_format=form)


async def test_a_session_answers_from_its_newest_version_and_a_standing_question_at_once() -> None:
    async with served(bars=8) as on:
        ask = on.openai.chat.completions.create
        ready = await ask(model="session:aaa", messages=[{"role": "user", "content": "trend"}])
        facts = ready.model_extra["foretick"]
        assert facts["cached"]
        assert ready.choices[0].message.content == facts["choice"]
        assert facts["choice"] in ("UP", "DOWN")
        state = on.gateway.sessions.states["aaa"]
        chosen = await ask(
            model="session:aaa",
            messages=[
                {"role": "user", "content": "What did the last bar do?"},
                {"role": "assistant", "content": "It fell."},
                {"role": "user", "content": "Will the next one?"},
            ],
            extra_body={"foretick": {"choices": ["YES", "NO"]}},
        )
        facts = chosen.model_extra["foretick"]
        assert facts["choice"] in ("YES", "NO")
        assert not facts["cached"]
        assert 0 < facts["data_version"] <= state.version
        assert facts["as_of"] > 0
        assert facts["staleness_ns"] > 0
        assert "untrained" in facts["flags"]
        free = {"model": "session:aaa", "messages": SAID, "max_tokens": 10, "temperature": 0}
        whole = await ask(**free)
        assert whole.usage.prompt_tokens_details.cached_tokens > 0  # the tape
        stream = await ask(**free, stream=True)
        chunks = [chunk async for chunk in stream]
        text = "".join(each.choices[0].delta.content or "" for each in chunks)
        if (
            chunks[-1].model_extra["foretick"]["data_version"]
            == whole.model_extra["foretick"]["data_version"]
        ):
            assert text == whole.choices[0].message.content
        counted = await on.anthropic.messages.count_tokens(model="session:aaa", messages=[SAID[1]])
        assert counted.input_tokens > state.live_tokens
        with pytest.raises(openai.NotFoundError):
            await ask(model="session:zzz", messages=SAID)
        with pytest.raises(openai.BadRequestError, match="user's"):
            await ask(model="session:aaa", messages=[{"role": "assistant", "content": "I"}])


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
        computed = on.gateway.store.value("foretick_batch_tokens_total", **{"class": "pool"})
        await asyncio.sleep(0.5)  # of ten passes
        later = on.gateway.store.value("foretick_batch_tokens_total", **{"class": "pool"})
        assert later - computed <= 2
        with pytest.raises(openai.APITimeoutError):
            await on.openai.with_options(timeout=0.3).chat.completions.create(**long)
        with pytest.raises(openai.BadRequestError) as too_long:
            await on.text(messages=[{"role": "user", "content": "price " * 200}])
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="token that is not"):
            await on.openai.completions.create(model=on.model, prompt=[2**30])
        texts = await asyncio.gather(*(on.text(max_tokens=3, seed=n) for n in range(2)))
        assert len(set(texts)) == 1  # the likeliest
        await until(lambda: count(on.gateway, "api_requests", outcome="client_closed") == 3)
        assert count(on.gateway, "api_requests", outcome="busy") == 1


async def test_an_answer_at_once_has_time_while_tokens_come_and_is_paid_for_by_who_leaves() -> None:
    settings = {
        "query": QueryConfig(endpoint="tcp://127.0.0.1:*", max_wait=Duration(500_000_000)),
        "sessions": (),
        "standing": "none",
    }
    async with served(Recorder(0.1), **settings) as on:
        ask = on.openai.chat.completions.create
        usage = (await ask(model=on.model, messages=SAID, max_tokens=12, temperature=0)).usage

        def charged() -> int:
            return count(on.gateway, "tenant_tokens", tenant="local")

        assert charged() == usage.total_tokens
        with pytest.raises(openai.APITimeoutError):
            await on.openai.with_options(timeout=0.6).chat.completions.create(
                model=on.model, messages=SAID, max_tokens=50, seed=1
            )
        await until(lambda: not len(on.gateway.generations))
        assert charged() > usage.total_tokens + 1


async def test_the_tape_model_answers_its_questions_of_a_session_and_refuses_to_chat() -> None:
    async with served(bars=6, model=ModelConfig()) as on:
        ask = on.openai.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="session:NAME"):
            await ask(model=on.model, messages=SAID)
        with pytest.raises(openai.BadRequestError, match="does not answer"):
            await ask(model="session:aaa", messages=[{"role": "user", "content": "How are you?"}])
        ready = await ask(model="session:aaa", messages=[{"role": "user", "content": "trend"}])
        assert ready.choices[0].message.content in ("UP", "DOWN", "NONE")
        jump = await ask(model="session:aaa", messages=[{"role": "user", "content": "jump"}], stream=True)
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


async def test_the_tape_model_chooses_and_its_choice_comes_as_the_json_that_a_schema_asks_for() -> None:
    said = [{"role": "user", "content": "trend"}]
    async with served(bars=6, model=ModelConfig()) as on:
        chat, answer, claude = on.openai.chat.completions, on.openai.responses, on.anthropic.messages
        session = {"model": "session:aaa"}
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
        question = PAPER_SIX[0].text
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["UP", "NONE"]}}}
        asked = [{"role": "user", "content": question}]
        alone = await chat.create(**session, messages=asked, response_format=form, temperature=0.7)
        assert json.loads(alone.choices[0].message.content) in ("UP", "NONE")
        for asked, kind, why in (
            ("trend", Side, "LONG"),
            ("trend", Level, "exactly one enum.*answered by UP, DOWN, NONE"),
            ("exact_value", Level, "answered by a number"),
        ):
            said = [{"role": "user", "content": asked}]
            with pytest.raises(openai.BadRequestError, match=why):
                await chat.parse(**session, messages=said, response_format=kind)


_FROM_TREE = "from daemon.api.client import QueryClient\nfrom daemon.api.messages import LostMessage"


async def test_the_snippets_of_the_page_run_word_for_word(capsys) -> None:
    """On the demo's sessions and model, at another port."""
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 6
    demo = demo_config("127.0.0.1:1")
    source, sink = QueueSource(), MemorySink()
    tape = Tape(*(session.symbol for session in demo.sessions))
    config = inproc_config(sessions=demo.sessions, model=ModelConfig())
    async with running(config, source, sink) as gateway:
        source.put(*(tape.second(n) for n in range(12)))
        await until(lambda: all(len(each.answers) == 6 for each in gateway.sessions.states.values()))
        assert gateway.query is not None, "configured"
        code = "".join(blocks).replace("7800", str(gateway.http.port))
        code = code.replace("tcp://127.0.0.1:7801", gateway.query.endpoint)
        # the distribution's modules are the tree's, under another name
        code = code.replace("from foretick_client import LostMessage, QueryClient", _FROM_TREE)
        done: dict[str, Any] = {}
        running_all = asyncio.ensure_future(asyncio.to_thread(exec, code, done))
        for n in range(12, 10_000):  # its subscription waits for new answers
            if running_all.done():
                break
            source.put(tape.second(n))
            await asyncio.sleep(0.2)
        await running_all
        for name in ("client", "claude"):
            done[name].close()
    assert "session:alpha" in capsys.readouterr().out
