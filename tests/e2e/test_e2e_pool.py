"""Prompts without a session over the HTTP APIs: what the prefix cache keeps of them, in a whole daemon."""

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

from daemon.config.schema import PoolConfig, SchedulerConfig, TenantsConfig
from daemon.tenants import hash_of, new_key
from engine.model.embedded import embedded_directory
from engine.model.vocabulary import token_bytes
from tests.e2e.test_e2e_compatible import SAID, Clients, dense, served
from tests.kit import tolerance, until

TOKENIZER = AutoTokenizer.from_pretrained(embedded_directory())
END = TOKENIZER.eos_token_id
IDS = {bytes(data): token for token, data in token_bytes(TOKENIZER).items()}


def rendered(said: list[dict[str, str]]) -> list[int]:
    """The tokens of a chat as its template writes it."""
    text = TOKENIZER.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def generated(found: Any) -> list[int]:
    """The tokens of an answer, which may be others than its text is written with."""
    out = [IDS[bytes(each.bytes)] for each in found.choices[0].logprobs.content]
    return out + [END] * (found.usage.completion_tokens - len(out))


async def chat(on: Clients, said: list[dict[str, str]], most: int = 12, **more: Any) -> Any:
    return await on.openai.chat.completions.create(
        model=on.model, messages=said, max_tokens=most, temperature=0, logprobs=True, top_logprobs=3, **more
    )


async def test_what_the_prefix_cache_keeps_and_who_comes_next(tmp_path: Path) -> None:
    """One daemon for all: its prefix cache holds 512 tokens, and a pass has two rows."""
    keys = {name: new_key() for name in ("flood", "late")}
    tenants = "".join(
        f"[[tenants]]\nname = {name!r}\nweight = {weight}\napi_keys = [{hash_of(keys[name])!r}]\n"
        for name, weight in (("flood", 1), ("late", 3))
    )
    (tmp_path / "tenants.toml").write_text(tenants)
    settings = {
        "tenants": TenantsConfig(file=str(tmp_path / "tenants.toml")),
        "sessions": (),
        "standing": "none",
        "pool": PoolConfig(blocks=64, block_size=16),
        "scheduler": SchedulerConfig(max_batch_requests=2, max_prompt_tokens=250, max_new_tokens=20),
    }
    async with served(**settings) as on:
        flood, late = (on.openai.with_options(api_key=keys[name]) for name in ("flood", "late"))
        on.openai, on.anthropic = flood, on.anthropic.with_options(api_key=keys["flood"])
        await the_next_turn_of_a_chat_finds_the_answer(on)
        await a_prompt_of_high_priority_outlives_others(on)
        await a_flood_of_one_tenant_delays_no_other(on, late)


async def the_next_turn_of_a_chat_finds_the_answer(on: Clients) -> None:
    """Each turn computes only what is new in it, and answers as the unmodified model does to all of it."""
    constrained = {"extra_body": {"foretick": {"choices": ["qzqz", "xkxk"]}}}
    bound = tolerance.of_embedded_gap()
    said = list(SAID)
    known: list[list[int]] = []  # every prompt with its answer
    reused = []
    for more in (constrained, {}, {}, constrained):
        prompt = rendered(said)
        found = await chat(on, said, **more)
        (choice,) = found.choices
        assert found.usage.prompt_tokens == len(prompt)
        # the last token of an answer is in KV only where it was a draft
        least, most = (
            max((common(prompt[:-1], each[: len(each) - n]) for each in known), default=0) for n in (1, 0)
        )
        assert least <= found.usage.prompt_tokens_details.cached_tokens <= most
        reused.append(found.usage.prompt_tokens_details.cached_tokens)
        out = generated(found)
        if not more:
            wanted, rows = dense(prompt, 12, END)
            assert out == wanted
            for token, row, got in zip(out, rows, choice.logprobs.content, strict=False):
                assert abs(got.logprob - row[token].item()) <= bound
                best = row.topk(3).values.tolist()
                assert [each.logprob for each in got.top_logprobs] == pytest.approx(best, abs=bound)
        known.append(prompt + out)
        said += [
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": f"And after {len(said)} more bars?"},
        ]
    # the first answer has one token a letter, however it is written: at most its last one is computed
    assert reused[1] - len(rendered(SAID)) in (3, 4)
    assert reused == sorted(set(reused))


def asked(n: int, words: int = 60) -> dict[str, Any]:
    return {"prompt": [number for at in range(words) for number in (IDS[b"q"], 300 + n, 300 + at)]}


async def a_prompt_of_high_priority_outlives_others(on: Clients) -> None:
    """Of prompts of 180 tokens the cache holds two, unless one is retained; a bad priority is a 400."""

    async def reused(n: int, **foretick: Any) -> int:
        found = await on.openai.completions.create(
            model=on.model, max_tokens=2, temperature=0, extra_body={"foretick": foretick}, **asked(n, 40)
        )
        return int(found.usage.prompt_tokens_details.cached_tokens)

    # a quarter of 512 tokens is one of 120
    assert await reused(0, retention_priority=80, retention_seconds=3600) < 8
    for n in range(1, 6):
        assert await reused(n) < 8
    assert await reused(1, choices=["q", "z"]) < 8, "it was evicted"
    assert await reused(0, choices=["q", "z"]) == 119
    assert await reused(7, retention_priority=90) < 8
    await until(
        lambda: on.daemon.count("prefix_tokens", event="unretained") >= 100, what="the next heartbeat"
    )
    with pytest.raises(openai.BadRequestError, match="retention_priority"):
        await reused(8, retention_priority=101)
    with pytest.raises(openai.BadRequestError, match="retention_seconds"):
        await reused(8, retention_seconds=1e9)
    extra = {"foretick": {"retention_priority": -1}}
    bad = on.anthropic.messages.create(model=on.model, messages=[SAID[1]], max_tokens=1, extra_body=extra)
    with pytest.raises(anthropic.BadRequestError, match="retention_priority"):
        await bad


async def a_flood_of_one_tenant_delays_no_other(on: Clients, late: openai.AsyncOpenAI) -> None:
    """Thirty prompts of one tenant wait; six of another, of three times the weight, come later."""
    ended: list[str] = []

    async def ask(name: str, client: openai.AsyncOpenAI, n: int) -> None:
        prompt = [IDS[b"z"], 300 + n, 400]
        found = await client.completions.create(model=on.model, prompt=prompt, max_tokens=12, temperature=0)
        assert found.usage.prompt_tokens_details.cached_tokens <= 1, "nothing is shared but what one has"
        ended.append(name)

    def waits(tenant: str) -> int:
        return on.gateway.store.count("foretick_tenant_wait_seconds", tenant=tenant)

    before = waits("flood")
    async with asyncio.TaskGroup() as group:
        for n in range(30):
            group.create_task(ask("flood", on.openai, n))
        await until(lambda: len(ended) > 1, what="the first of the flood")
        for n in range(6):
            group.create_task(ask("late", late, n))
    behind = ended[::-1].index("late")
    assert behind >= 6, "of the flood, in order of arrival none would be behind the late"
    assert (waits("flood") - before, waits("late"), waits("local")) == (30, 6, 0)
