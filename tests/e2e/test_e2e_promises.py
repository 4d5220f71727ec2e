"""The daemon's promises of freshness: missed ones are counted and shown, and prompts are refused."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from daemon.api.messages import QueryError
from daemon.config.schema import Config, SourceConfig
from daemon.engine.build import build
from feeds.connectors.zeromq import ZmqSourceConnector
from feeds.durations import Duration
from tests.kit import MemorySink, QueueSource, inproc_config, sessions, until
from tests.kit.inproc import Tape, answers, ask_gateway, count, running


def config(promise_ns: int) -> Config:
    promised = Duration(promise_ns)
    return inproc_config(sessions=sessions("V:AAA", retention_tokens=1024, max_staleness=promised))


async def test_prompts_are_refused_while_bars_are_read_later_than_promised() -> None:
    """No device reads a bar within a nanosecond."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(config(1), source, sink) as gateway:
        await ask_gateway(gateway, "complete", "one two", choices=("YES", "NO"))

        def over_http() -> tuple[int, str | None, str]:
            body = json.dumps({"text": "one two", "choices": ["YES", "NO"]}).encode()
            url = f"http://127.0.0.1:{gateway.http.port}/v1/complete"
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            with refused.value as error:
                return error.code, error.headers["retry-after"], json.loads(error.read())["code"]

        for second in range(3):
            source.put(tape.second(second))
        await until(lambda: count(gateway, "freshness_misses", session="aaa") >= 2, what="a missed promise")
        with pytest.raises(QueryError) as refused:
            await ask_gateway(gateway, "complete", "one two", choices=("YES", "NO"))
        assert refused.value.code == "overloaded"
        source.put(tape.second(3))
        await until(lambda: count(gateway, "freshness_misses", session="aaa") >= 3, what="a missed promise")
        assert await asyncio.to_thread(over_http) == (429, "1", "overloaded")
        assert count(gateway, "prompts_refused") == 2
        (session,) = (await ask_gateway(gateway, "sessions")).sessions
        assert (session.promise_ns, session.promises_missed) == (1, 3)
        await asyncio.sleep(1)
        await ask_gateway(gateway, "complete", "one two", choices=("YES", "NO"))


async def test_a_kept_promise_refuses_nothing() -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(config(3600 * 10**9), source, sink) as gateway:
        for second in range(3):
            source.put(tape.second(second))
        await until(lambda: len(answers(sink)) >= 1, what="an answer")
        await ask_gateway(gateway, "complete", "one two", choices=("YES", "NO"))
        assert (count(gateway, "freshness_misses", session="aaa"), count(gateway, "prompts_refused")) == (
            0,
            0,
        )


def test_a_live_source_promises_three_bars_and_a_file_nothing() -> None:
    live = SourceConfig(kind="zeromq", zeromq=ZmqSourceConnector("tcp://127.0.0.1:1"))
    plain = inproc_config(sessions=sessions("V:AAA", retention_tokens=1024))
    second = plain.bars.interval
    assert plain.promise_ns(plain.sessions[0]) == 0
    for source, promise in (
        (live, 3 * second),
        (SourceConfig(kind="none", backlog_policy="skip"), 3 * second),
    ):
        made = inproc_config(sessions=plain.sessions, source=source)
        assert made.promise_ns(made.sessions[0]) == promise
    waits = inproc_config(sessions=plain.sessions, source=SourceConfig(kind="none", backlog_policy="skip"))
    assert build(waits, {}).tapes["aaa"].staleness_ns == 3 * second
