"""Standing questions changed while a daemon runs, in both placements, over the query socket and by SIGHUP."""

import asyncio
from typing import Any

import msgspec
import pytest

from daemon.api.messages import QueryError
from daemon.config.schema import FlashConfig, QuestionConfig, SchedulerConfig
from tests.kit import SECOND, inproc_config, until
from tests.kit.daemon import invoke
from tests.kit.inproc import running

TREND = QuestionConfig(name="trend", text="Is it going up or down?", choices=("UP", "DOWN"))
FREE = QuestionConfig(name="free", text="What is happening on this market right now?", max_tokens=2)


@pytest.mark.parametrize("placement", ["ephemeral", "frozen"])
async def test_questions_come_and_go_while_the_daemon_runs(placement: Any) -> None:
    """Each version is answered for the questions of its time, and offsets follow."""
    config = inproc_config(
        standing="none",
        questions=(TREND, FREE),
        flash=FlashConfig(placement=placement),
        scheduler=SchedulerConfig(max_new_tokens=64, chunk_min=64),
    )
    async with running(config) as daemon:

        async def bars(n: int) -> list[tuple[int, str]]:
            """Close so many bars one by one; returns the answers (version, question) to them."""
            known = len(daemon.answers())
            await daemon.advance(n)
            return [(a.data_version, a.question) for a in daemon.answers()[known:]]

        assert sorted(await bars(2)) == [(1, "free"), (1, "trend"), (2, "free"), (2, "trend")]
        full = daemon.answers()[-1].computed_tokens
        reply = await daemon.call("set_question", "aaa", "quiet", "Is it quiet?", ("YES", "NO"))
        assert [question.name for question in reply.questions] == ["trend", "free", "quiet"]
        if placement == "frozen":
            await until(lambda: daemon.count("refreshes", session="aaa") == 1)
        else:
            assert daemon.count("refreshes", session="aaa") == 0
        assert {name for _, name in await bars(2)} == {"trend", "free", "quiet"}
        by_name = {a.question: a.computed_tokens for a in daemon.answers()}
        assert (by_name["quiet"] == by_name["trend"]) == (placement == "frozen")
        assert full > 0
        reply = await daemon.call("remove_question", "aaa", "free")
        assert [question.name for question in reply.questions] == ["trend", "quiet"]
        assert {name for _, name in await bars(2)} == {"trend", "quiet"}
        reply = await daemon.call("set_question", "aaa", "quiet", "Calm?", ("NO", "YES"))
        assert {name for _, name in await bars(1)} == {"trend", "quiet"}
        newest = next(a for a in reversed(daemon.answers()) if a.question == "quiet")
        assert newest.choice in ("YES", "NO")
        with pytest.raises(QueryError, match="same token"):
            await daemon.call("set_question", "aaa", "same", "Same?", ("YES A", "YES B"))
        with pytest.raises(QueryError, match="the limit is"):
            await daemon.call("set_question", "aaa", "long", "Why? " * 3000)
        assert await daemon.call("questions", "aaa") == msgspec.structs.replace(reply, id=1)
        for name in ("trend", "quiet"):
            await daemon.call("remove_question", "aaa", name)
        assert await bars(1) == []
        options = ["--publish-when", "changed", "--ask-every", "1m", "--choice", "UP", "--choice", "DOWN"]
        typed = ["questions", "set", "aaa", "typed", "Which way?", *options]
        done = await asyncio.to_thread(invoke, *typed, "--endpoint", daemon.endpoint)
        assert (
            done.stdout == f"typed: Which way? [UP | DOWN] publish_when=changed ask_every_ns={60 * SECOND}\n"
        )
        (question,) = daemon.state().questions
        assert (question.publish_when, question.ask_every_ns) == ("changed", 60 * SECOND)
        (tracker,) = daemon.gateway.publisher._trackers.values()
        await until(lambda: tracker.outstanding() <= 4)  # those of the open bar
        assert await daemon.gateway.stop()


async def test_a_configuration_read_again_changes_the_questions_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = inproc_config(standing="none", questions=(TREND,))
    async with running(config) as daemon:
        changed = msgspec.structs.replace(
            config, questions=(FREE,), scheduler=msgspec.structs.replace(config.scheduler, k=3)
        )
        await daemon.gateway.reload(lambda: changed)
        assert "scheduler.k stays as it is" in caplog.text
        daemon.feed(3)
        await until(lambda: {a.question for a in daemon.answers()} == {"free"})
        again = msgspec.structs.replace(config, standing="paper_six", questions=(FREE,))
        await daemon.gateway.reload(lambda: again)
        assert len(daemon.state().questions) == 7
        assert await daemon.gateway.stop()


async def test_a_question_over_its_share_of_the_engine_is_held_back_and_another_is_not() -> None:
    """And is counted, shown, and asked again once it has a larger share."""
    greedy = QuestionConfig("greedy", "Is it falling fast?", ("YES", "NO"), engine_share=1e-6)
    modest = QuestionConfig("modest", FREE.text, max_tokens=2, engine_share=1.0)
    config = inproc_config(standing="none", questions=(greedy, modest, TREND))
    async with running(config) as daemon:

        def asked() -> set[tuple[int, str]]:
            return {(each.data_version, each.question) for each in daemon.answers()}

        async def bars(n: int, *names: str) -> None:
            """Close this number of bars one by one, each answered for the questions of these names."""
            for _ in range(n):
                version = daemon.state().version + 1
                daemon.feed(1 if daemon.tape.seconds else 2)
                await until(lambda v=version: {(v, name) for name in names} <= asked())

        await bars(1, "greedy", "modest", "trend")
        await bars(4, "modest", "trend")
        assert {version for version, name in asked() if name == "greedy"} == {1}
        held = {name: daemon.count("over_budget", question=name) for name in ("greedy", "modest", "other")}
        assert held == {"greedy": 4, "modest": 0, "other": 0}
        used = {each.name: each.engine_used for each in (await daemon.call("questions", "aaa")).questions}
        assert used["greedy"] > 1 > used["modest"] > used["trend"] == 0

        await daemon.call("set_question", "aaa", "late", "Late?", ("YES", "NO"), engine_share=1e-6)
        await bars(1, "modest", "trend", "late")
        await bars(1, "modest", "trend")
        assert daemon.count("over_budget", question="other") == 1  # it had none at the start
        await daemon.call("set_question", "aaa", "greedy", greedy.text, greedy.choices, engine_share=1.0)
        await bars(1, "greedy", "modest", "trend")
        assert daemon.count("over_budget", question="greedy") == 6
        (tracker,) = daemon.gateway.publisher._trackers.values()
        await until(lambda: tracker.outstanding() <= 4)  # those of the open bar
