"""Prompts without a session, from the socket and from HTTP to the engine and back."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from daemon.api.client import QueryClient
from daemon.api.messages import FinishReply, PromptReply, QueryError
from daemon.config.schema import PoolConfig, QueryConfig, SchedulerConfig
from daemon.engine.assembly import scheduler_of
from daemon.engine.build import build
from feeds.durations import Duration
from metrics.catalogue import BY_NAME
from regions.offload.host_tier import HostTier
from scheduler.costs import load
from scheduler.observer import Observer
from scheduler.prefix_queue import PrefixQueue
from tests.e2e.texts import LINES, TEXT, same
from tests.kit import SECOND, MemorySink, QueueSource, inproc_config, sessions, until
from tests.kit.inproc import running


@pytest.mark.parametrize("eviction", ["recompute", "swap", "cost"])
async def test_many_prompts_in_a_small_pool_are_answered_like_one_alone(eviction) -> None:
    config = inproc_config(
        sessions=(),
        standing="none",
        pool=PoolConfig(blocks=32, host_blocks=32),
        scheduler=SchedulerConfig(
            policy="lcas", eviction=eviction, cell_budget=1.0, max_prompt_tokens=400, max_new_tokens=16
        ),
    )
    texts = [f"Report {n}.\n" + "".join(LINES[n : n + 7]) for n in range(5)]
    async with running(config, QueueSource(), MemorySink()) as gateway:
        assert gateway.query is not None
        endpoint = gateway.query.endpoint

        def computed() -> int:
            return int(gateway.store.value("foretick_batch_tokens_total", **{"class": "pool"}))

        def preempted() -> int:
            series = gateway.store.series(BY_NAME["foretick_preemptions_total"])
            return int(sum(gateway.store.value("foretick_preemptions_total", **each) for each in series))

        def opened(text: str) -> PromptReply:
            with QueryClient(endpoint) as client:
                return client.open_prompt(text, max_tokens=16)

        def streamed(text: str) -> str:
            with QueryClient(endpoint) as client:
                prompt = client.open_prompt(text[:200], max_tokens=16).prompt
                client.update(prompt, text[:150] + " or so, they say")
                client.update(prompt, text)
                return prompt

        def finished(prompt: str) -> FinishReply:
            with QueryClient(endpoint) as client:
                return client.finish(prompt)

        def fast_path(text: str) -> FinishReply:
            with QueryClient(endpoint) as client:
                return client.complete(text, max_tokens=16)

        # The pool holds one and a half: under lcas a later one takes the blocks of one that is computed.
        first = await asyncio.to_thread(opened, texts[0])
        await until(lambda: computed() >= first.prompt_tokens - 1, what="the first prompt's KV")
        others = await asyncio.gather(*(asyncio.to_thread(streamed, text) for text in texts[1:]))
        await until(lambda: preempted() > 0, what="a preemption")
        prompts = (first.prompt, *others)
        got = await asyncio.gather(*(asyncio.to_thread(finished, prompt) for prompt in prompts))
        alone = [await asyncio.to_thread(fast_path, text) for text in texts]
        assert [same(*pair) for pair in zip(got, alone, strict=True)] == [True] * len(texts)
        swapped, again = (sum(getattr(g, f"{how}_tokens") for g in got) for how in ("swapped", "recomputed"))
        assert swapped + again > 0
        if eviction == "swap":  # without room on the host it is recomputed
            assert swapped > 0
        if eviction == "recompute":
            assert not swapped
        assert all(g.waits for g in got)


def test_the_scheduler_is_given_what_the_configuration_asks_for() -> None:
    config = inproc_config(
        sessions=sessions("V:AAA", retention_tokens=1024, max_staleness=Duration(SECOND)),
        pool=PoolConfig(host_blocks=8),
        scheduler=SchedulerConfig(policy="klpm-adaptive", profile="h200-paper", max_new_tokens=64),
    )
    built = build(config, {})
    assert built.tapes["aaa"].staleness_ns == SECOND
    assert built.costs.base == load("h200-paper")
    scheduler = scheduler_of(config, built, Observer())
    assert isinstance(scheduler._tier, HostTier)
    assert scheduler._costs is built.costs
    assert isinstance(scheduler.queues.order, PrefixQueue)
    plain = inproc_config(sessions=())
    scheduler = scheduler_of(plain, build(plain, {}), Observer())
    assert (scheduler._tier, scheduler.queues.order) == (None, None)


async def test_refusals_and_a_client_that_vanishes() -> None:
    config = inproc_config(
        sessions=(),
        standing="none",
        scheduler=SchedulerConfig(
            stream_timeout=Duration(SECOND // 4), max_new_tokens=64, max_prompt_tokens=100
        ),
        query=QueryConfig(endpoint="tcp://127.0.0.1:*", max_prompts=3, max_prompts_each=2),
    )
    async with running(config, QueueSource(), MemorySink()) as gateway:
        assert gateway.query is not None
        endpoint = gateway.query.endpoint

        def refusals() -> list[str]:
            codes = []

            def refused(call: Any, *arguments: Any, **more: Any) -> None:
                with pytest.raises(QueryError) as error:
                    call(*arguments, **more)
                codes.append(error.value.code)

            with QueryClient(endpoint) as client:
                refused(client.finish, "nowhere")
                refused(client.complete, "one two", choices=("YES", "YES"))
                refused(client.complete, "one two", choices=("YES", ""))
                refused(client.complete, TEXT)
                refused(client.complete, "one two", max_tokens=65)
                empty = client.open_prompt()
                refused(client.finish, empty.prompt)
                long = client.open_prompt(LINES[0])
                client.append(long.prompt, TEXT)
                refused(client.finish, long.prompt)
                one, two = client.open_prompt(LINES[0]), client.open_prompt(LINES[1])
                refused(client.open_prompt)
                client.close_prompt(one.prompt)
                refused(client.append, one.prompt, "more")
                client.finish(two.prompt)
                refused(client.append, two.prompt, "more")
            return codes

        assert await asyncio.to_thread(refusals) == [
            "unknown_prompt",
            *["bad_request"] * 2,
            *["too_long"] * 2,
            "bad_request",
            "too_long",
            "busy",
            "unknown_prompt",
            "finished",
        ]
        assert len(gateway.prompts) == 0

        def vanish() -> str:
            with QueryClient(endpoint) as client:
                return client.open_prompt(LINES[0]).prompt

        def late(prompt: str) -> str:
            with QueryClient(endpoint) as client, pytest.raises(QueryError, match=r"0\.25 s") as error:
                client.append(prompt, "too late")
            return error.value.code

        prompt = await asyncio.to_thread(vanish)
        assert len(gateway.prompts) == 1
        await until(lambda: not len(gateway.prompts), what="the prompt to be closed")
        assert await asyncio.to_thread(late, prompt) == "abandoned"


async def test_prompts_over_http_are_those_of_the_socket() -> None:
    config = inproc_config(sessions=(), standing="none")
    async with running(config, QueueSource(), MemorySink()) as gateway:
        assert gateway.query is not None
        url, endpoint = f"http://127.0.0.1:{gateway.http.port}/v1", gateway.query.endpoint

        def call(path: str, body: dict[str, Any] | None = None, method: str = "POST") -> dict[str, Any]:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(
                url + path, data, {"content-type": "application/json"}, method=method
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)

        def use() -> None:
            prompt = call("/prompts", {"text": LINES[0], "max_tokens": 12})["prompt"]
            for line in LINES[1:-1]:
                call(f"/prompts/{prompt}/append", {"text": line})
            call(f"/prompts/{prompt}/update", {"text": TEXT})
            with QueryClient(endpoint) as client:
                whole = client.complete(TEXT, 12)
            answer = call(f"/prompts/{prompt}/finish")
            assert (answer["text"], answer["prompt_tokens"]) == (whole.text, whole.prompt_tokens)
            assert call("/complete", {"text": TEXT, "max_tokens": 12})["text"] == whole.text
            closed = call("/prompts", {})["prompt"]
            assert call(f"/prompts/{closed}", method="DELETE") == {"prompt": closed}
            with pytest.raises(urllib.error.HTTPError) as gone:
                call(f"/prompts/{closed}/finish")
            with gone.value:
                assert gone.value.code == 404

        await asyncio.to_thread(use)
