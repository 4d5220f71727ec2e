"""Standing questions changed while a daemon runs, in both placements, over the query socket and by SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.api.client import QueryClient
from daemon.api.messages import QueryError
from daemon.config.schema import FlashConfig, QuestionConfig, SchedulerConfig
from tests.kit import SECOND, MemorySink, QueueSource, inproc_config, until, until_slowly
from tests.kit.daemon import START_S, Daemon, invoke
from tests.kit.inproc import Tape, answers, ask_gateway, count, running
from tests.kit.kafka import free_ports

TREND = QuestionConfig(name="trend", text="Is it going up or down?", choices=("UP", "DOWN"))
FREE = QuestionConfig(name="free", text="What is happening on this market right now?", max_tokens=2)


@pytest.mark.parametrize("placement", ["ephemeral", "frozen"])
async def test_questions_come_and_go_while_the_daemon_runs(placement: Any) -> None:
    """Each version is answered for the questions of its time, and offsets follow."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(
        standing="none",
        questions=(TREND, FREE),
        flash=FlashConfig(placement=placement),
        scheduler=SchedulerConfig(max_new_tokens=64, chunk_min=64),
    )
    async with running(config, source, sink) as gateway:
        second = 0

        async def bars(n: int) -> list[tuple[int, str]]:
            """Close so many bars one by one; returns the answers (version, question) to them."""
            nonlocal second
            known = len(answers(sink))
            for _ in range(n):
                version = gateway.sessions.states["aaa"].version
                asked = len(gateway.sessions.states["aaa"].questions)
                before = len(answers(sink))
                source.put(tape.second(second))
                second += 1
                if second > 1:
                    await until(lambda v=version: gateway.sessions.states["aaa"].version == v + 1)
                    await until(lambda n=before + asked: len(answers(sink)) == n)
            return [(a.data_version, a.question) for a in answers(sink)[known:]]

        await bars(1)
        assert sorted(await bars(2)) == [(1, "free"), (1, "trend"), (2, "free"), (2, "trend")]
        full = answers(sink)[-1].computed_tokens
        reply = await ask_gateway(gateway, "set_question", "aaa", "quiet", "Is it quiet?", ("YES", "NO"))
        assert [question.name for question in reply.questions] == ["trend", "free", "quiet"]
        if placement == "frozen":
            await until(lambda: count(gateway, "refreshes", session="aaa") == 1)
        else:
            assert count(gateway, "refreshes", session="aaa") == 0
        assert {name for _, name in await bars(2)} == {"trend", "free", "quiet"}
        by_name = {a.question: a.computed_tokens for a in answers(sink)}
        assert (by_name["quiet"] == by_name["trend"]) == (placement == "frozen")
        assert full > 0
        reply = await ask_gateway(gateway, "remove_question", "aaa", "free")
        assert [question.name for question in reply.questions] == ["trend", "quiet"]
        assert {name for _, name in await bars(2)} == {"trend", "quiet"}
        reply = await ask_gateway(gateway, "set_question", "aaa", "quiet", "Calm?", ("NO", "YES"))
        assert {name for _, name in await bars(1)} == {"trend", "quiet"}
        newest = next(a for a in reversed(answers(sink)) if a.question == "quiet")
        assert newest.choice in ("YES", "NO")
        with pytest.raises(QueryError, match="same token"):
            await ask_gateway(gateway, "set_question", "aaa", "same", "Same?", ("YES A", "YES B"))
        with pytest.raises(QueryError, match="the limit is"):
            await ask_gateway(gateway, "set_question", "aaa", "long", "Why? " * 3000)
        assert await ask_gateway(gateway, "questions", "aaa") == msgspec.structs.replace(reply, id=1)
        for name in ("trend", "quiet"):
            await ask_gateway(gateway, "remove_question", "aaa", name)
        assert await bars(1) == []
        assert gateway.query is not None
        options = ["--publish-when", "changed", "--ask-every", "1m", "--choice", "UP", "--choice", "DOWN"]
        typed = ["questions", "set", "aaa", "typed", "Which way?", *options]
        done = await asyncio.to_thread(invoke, *typed, "--endpoint", gateway.query.endpoint)
        assert (
            done.stdout == f"typed: Which way? [UP | DOWN] publish_when=changed ask_every_ns={60 * SECOND}\n"
        )
        (question,) = gateway.sessions.states["aaa"].questions
        assert (question.publish_when, question.ask_every_ns) == ("changed", 60 * SECOND)
        await until(lambda: gateway.publisher._tracker.outstanding() <= 4)  # those of the open bar
        assert await gateway.stop()


async def test_a_configuration_read_again_changes_the_questions_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(standing="none", questions=(TREND,))
    async with running(config, source, sink) as gateway:
        changed = msgspec.structs.replace(
            config, questions=(FREE,), scheduler=msgspec.structs.replace(config.scheduler, k=3)
        )
        await gateway.reload(lambda: changed)
        assert "scheduler.k stays as it is" in caplog.text
        for n in range(3):
            source.put(tape.second(n))
        await until(lambda: {a.question for a in answers(sink)} == {"free"})
        again = msgspec.structs.replace(config, standing="paper_six", questions=(FREE,))
        await gateway.reload(lambda: again)
        assert len(gateway.sessions.states["aaa"].questions) == 7
        assert await gateway.stop()


async def test_a_hangup_makes_the_process_read_its_questions_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    config = "\n".join(
        [
            'standing = "none"\n[model]\npath = "untrained"',
            '[[sessions]]\nname = "aaa"\nsymbol = "V:AAA"\nretention_tokens = 512',
            f'[query]\nendpoint = "{endpoint}"',
            '[[questions]]\nname = "first"\ntext = "Up?"\n',
        ]
    )

    def names() -> list[str]:
        with QueryClient(endpoint) as client:
            return [question.name for question in client.questions("aaa").questions]

    with Daemon(tmp_path, config) as daemon:
        await until_slowly(lambda: daemon.get("/healthz")[0] == 200)
        await until_slowly(lambda: daemon.metric("foretick_engine_up") == 1)
        assert names() == ["first"]
        file = tmp_path / "foretick.toml"
        file.write_text(file.read_text().replace("first", "second"))
        daemon.signal(signal.SIGHUP)
        await until_slowly(lambda: names() == ["second"])
        file.write_text("nothing of it")
        daemon.signal(signal.SIGHUP)
        await until_slowly(lambda: "was not read again" in daemon.log)
        assert names() == ["second"]
        late = '[[sessions]]\nname = "late"\nsymbol = "V:B"\ninterval = "5m"\nretention_tokens = 512\n'
        file.write_text(f"{config.replace('first', 'second')}{late}")
        daemon.signal(signal.SIGHUP)
        with QueryClient(endpoint) as client:
            await until_slowly(lambda: [s.name for s in client.sessions().sessions] == ["aaa", "late"])
            assert client.ask("late", "Up?").data_version == 0
            assert 'foretick_bars_total{session="late"} 0' in daemon.get("/metrics")[1]
            assert [s.name for s in client.change_session("late", retention_tokens=256).sessions] == [
                "aaa",
                "late",
            ]
            assert [s.name for s in client.remove_session("late").sessions] == ["aaa"]
        assert 'session="late"' not in daemon.get("/metrics")[1]
        assert daemon.metric("foretick_config_reloads_total", outcome="refused") == 1
        assert daemon.terminate(START_S) == 0
