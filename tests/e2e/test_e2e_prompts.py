"""Prompts without a session, from the socket and from HTTP to the engine and back."""

import asyncio
from typing import Any

import pytest

from daemon.api.client import QueryClient
from daemon.api.messages import FinishReply, QueryError
from daemon.config.schema import PoolConfig, QueryConfig, SchedulerConfig
from daemon.engine.assembly import scheduler_of
from daemon.engine.build import build
from feeds.durations import Duration
from metrics.catalogue import BY_NAME
from regions.offload.host_tier import HostTier
from scheduler.costs import load
from scheduler.observer import Observer
from scheduler.prefix_queue import PrefixQueue
from tests.kit import SECOND, inproc_config, sessions, tolerance, until
from tests.kit.inproc import running

LINES = [f"{n:02d}. Prices of item {n % 5} moved by {n * 37 % 101} in quarter {n % 4}.\n" for n in range(12)]
TEXT = "".join(LINES)


def same(streamed: FinishReply, whole: FinishReply) -> bool:
    """The same prompt and the same answer."""
    return (streamed.text, streamed.choice, streamed.prompt_tokens, streamed.answer_tokens) == (
        whole.text,
        whole.choice,
        whole.prompt_tokens,
        whole.answer_tokens,
    ) and abs(streamed.logit_gap - whole.logit_gap) <= tolerance.of_embedded_gap()


BARE: dict[str, Any] = {"sessions": (), "standing": "none"}


@pytest.mark.parametrize(
    ("eviction", "host_blocks"), [("recompute", 32), ("swap", 32), ("swap", "auto"), ("cost", "auto")]
)
async def test_many_prompts_in_a_small_pool_are_answered_like_one_alone(eviction, host_blocks) -> None:
    scheduler = SchedulerConfig(
        policy="lcas", eviction=eviction, cell_budget=1.0, max_prompt_tokens=400, max_new_tokens=16
    )
    pool = PoolConfig(blocks=32, host_blocks=host_blocks)
    texts = [f"Report {n}.\n" + "".join(LINES[n : n + 7]) for n in range(5)]
    async with running(inproc_config(**BARE, pool=pool, scheduler=scheduler)) as daemon:

        def preempted() -> int:
            series = daemon.gateway.store.series(BY_NAME["foretick_preemptions_total"])
            return sum(daemon.count("preemptions", **each) for each in series)

        async def streamed(text: str) -> str:
            prompt: str = (await daemon.call("open_prompt", text[:200], max_tokens=16)).prompt
            await daemon.call("update", prompt, text[:150] + " or so, they say")
            await daemon.call("update", prompt, text)
            return prompt

        # The pool holds one and a half: under lcas a later one takes the blocks of one that is computed.
        first = await daemon.call("open_prompt", texts[0], max_tokens=16)
        computed = first.prompt_tokens - 1
        await until(
            lambda: daemon.count("batch_tokens", cls="pool") >= computed, what="the first prompt's KV"
        )
        others = await asyncio.gather(*(streamed(text) for text in texts[1:]))
        await until(lambda: preempted() > 0, what="a preemption")
        prompts = (first.prompt, *others)
        got = await asyncio.gather(*(daemon.call("finish", prompt) for prompt in prompts))
        alone = [await daemon.call("complete", text, max_tokens=16) for text in texts]
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
    plain = inproc_config(sessions=(), pool=PoolConfig(host_blocks=0))
    scheduler = scheduler_of(plain, build(plain, {}), Observer())
    assert (scheduler._tier, scheduler.queues.order) == (None, None)
    default = build(inproc_config(sessions=()), {})
    assert isinstance(scheduler_of(inproc_config(), default, Observer())._tier, HostTier)
    assert default.costs.base.source.startswith("measured")


async def test_refusals_and_a_client_that_vanishes() -> None:
    scheduler = SchedulerConfig(stream_timeout=Duration(3 * SECOND), max_new_tokens=64, max_prompt_tokens=100)
    query = QueryConfig(endpoint="tcp://127.0.0.1:*", max_prompts=3, max_prompts_each=2)
    async with running(inproc_config(**BARE, scheduler=scheduler, query=query)) as daemon:

        def refusals() -> None:
            def refused(code: str, call: Any, *arguments: Any, **more: Any) -> None:
                with pytest.raises(QueryError) as error:
                    call(*arguments, **more)
                assert error.value.code == code

            with QueryClient(daemon.endpoint) as client:
                refused("unknown_prompt", client.finish, "nowhere")
                refused("bad_request", client.complete, "one two", choices=("YES", "YES"))
                refused("bad_request", client.complete, "one two", choices=("YES", ""))
                refused("too_long", client.complete, TEXT)
                refused("too_long", client.complete, "one two", max_tokens=65)
                refused("bad_request", client.finish, client.open_prompt().prompt)
                long = client.open_prompt(LINES[0])
                client.append(long.prompt, TEXT)
                refused("too_long", client.finish, long.prompt)
                one, two = client.open_prompt(LINES[0]), client.open_prompt(LINES[1])
                refused("busy", client.open_prompt)
                client.close_prompt(one.prompt)
                refused("unknown_prompt", client.append, one.prompt, "more")
                client.finish(two.prompt)
                refused("finished", client.append, two.prompt, "more")

        await asyncio.to_thread(refusals)
        assert len(daemon.gateway.prompts) == 0
        prompt = (await daemon.call("open_prompt", LINES[0])).prompt  # its client leaves
        assert len(daemon.gateway.prompts) == 1
        await until(lambda: not len(daemon.gateway.prompts), what="the prompt to be closed")
        with pytest.raises(QueryError, match=r"\b3 s") as late:
            await daemon.call("append", prompt, "too late")
        assert late.value.code == "abandoned"


async def test_prompts_over_http_are_those_of_the_socket() -> None:
    async with running(inproc_config(**BARE)) as daemon:

        async def call(path: str, body: object = None, method: str = "POST", status: int = 200) -> Any:
            reply = await daemon.http(method, f"/v1{path}", body)
            assert reply.status == status
            return reply.json

        opened = await call("/prompts", {"text": LINES[0], "max_tokens": 12}, status=201)
        prompt = opened["prompt"]
        for line in LINES[1:-1]:
            await call(f"/prompts/{prompt}/append", {"text": line})
        await call(f"/prompts/{prompt}/update", {"text": TEXT})
        whole = await daemon.call("complete", TEXT, 12)
        answer = await call(f"/prompts/{prompt}/finish")
        assert (answer["text"], answer["prompt_tokens"]) == (whole.text, whole.prompt_tokens)
        assert (await call("/complete", {"text": TEXT, "max_tokens": 12}))["text"] == whole.text
        closed = (await call("/prompts", {}, status=201))["prompt"]
        assert await call(f"/prompts/{closed}", method="DELETE") == {"prompt": closed}
        await call(f"/prompts/{closed}/finish", status=404)
