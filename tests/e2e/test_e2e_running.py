"""One daemon in two processes, as `foretick run` starts it, is asked, streams prompts and is scraped."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import dashboards
from daemon.api.client import QueryClient
from daemon.api.messages import FinishReply
from flash.question import PAPER_SIX
from tests.e2e.texts import LINES, TEXT, same
from tests.kit import until_slowly
from tests.kit.daemon import Daemon, Replaying, command
from tests.kit.kafka import free_ports
from tests.kit.prometheus import expressions
from tests.kit.samples import SAMPLES, write

STOP_S = 30.0


@pytest.fixture(scope="module")
def replaying(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replaying]:
    """It replays a few seconds; the tests only query it."""
    folder, sample, session = tmp_path_factory.mktemp("daemon"), SAMPLES[2], "eurusd"
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    config = f"""
[model]
path = "untrained"
[[sessions]]
name = "{session}"
symbol = "{sample.symbol}"
price_decimals = 5
[source]
kind = "replay"
[source.replay]
file = "{write(sample, folder)}"
format = "{sample.form}"
speed = 2.0
[query]
endpoint = "{endpoint}"
"""
    with Daemon(folder, config, {"SCHEDULER_TYPE": "KLPM"}) as daemon:
        asyncio.run(daemon.ready())
        yield Replaying(daemon, sample, session, endpoint)
        assert daemon.terminate(STOP_S) == 0


def appended(client: QueryClient, **how: Any) -> FinishReply:
    """TEXT line by line; each line's tokens do not depend on its position."""
    lengths = [opened := client.open_prompt(LINES[0], **how)]
    lengths += [client.append(opened.prompt, line) for line in LINES[1:]]
    tokens = [reply.prompt_tokens for reply in lengths]
    assert tokens == sorted(set(tokens))
    return client.finish(opened.prompt)


def updated(client: QueryClient, **how: Any) -> FinishReply:
    """TEXT after two others, which share a half and a third of it."""
    opened = client.open_prompt("".join(LINES[:9]) + "something else\n" * 4, **how)
    client.update(opened.prompt, "".join(LINES[:6]) + "again another\n" * 4)
    client.update(opened.prompt, TEXT)
    return client.finish(opened.prompt)


HOW: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"choices": ("YES", "NO")},
    {"max_tokens": 12, "temperature": 0.9},
]


def test_a_streamed_prompt_is_answered_like_the_same_prompt_at_once(replaying: Replaying) -> None:
    """In an engine process of its own; the answers are computed before any of the prompt is cached."""
    endpoint = replaying.endpoint
    with QueryClient(endpoint) as client:
        first = appended(client, **HOW[0])
        assert first.reused_tokens == 1, "the token that every prompt begins with"
        for how in HOW:
            whole = client.complete(TEXT, **how)
            assert whole.reused_tokens >= whole.prompt_tokens - 1, "the prefix cache knows it"
            assert whole.untrained
            assert 0 < whole.ttft_ns < whole.latency_ns
            assert same(appended(client, **how), whole)
            assert same(updated(client, **how), whole)
        assert same(first, client.complete(TEXT, **HOW[0]))
        assert client.complete(TEXT, **HOW[2]).text != first.text, "it is sampled"
        other = client.complete(TEXT + "And then?", **HOW[0])
        assert (other.text, other.prompt_tokens) != (first.text, first.prompt_tokens)
    with QueryClient(endpoint) as opener, QueryClient(endpoint) as finisher:
        opened = opener.open_prompt(TEXT, max_tokens=12)
        assert finisher.finish(opened.prompt).text == first.text


async def test_asking_a_running_daemon(replaying: Replaying) -> None:
    """A standing question is answered from the cache, another one is computed."""
    daemon, session, endpoint = replaying.daemon, replaying.session, replaying.endpoint
    trend = PAPER_SIX[0]
    closed = replaying.sample.bars - 1
    await until_slowly(lambda: daemon.metric("foretick_bars_total") == closed)
    version = int(daemon.metric("foretick_data_version"))
    with QueryClient(endpoint) as client:
        await asyncio.to_thread(client.answers, session, "", version)

    def ask(*arguments: str) -> Awaitable[CompletedProcess[str]]:
        return asyncio.to_thread(command, "ask", *arguments, "--endpoint", endpoint)

    choices = [word for choice in trend.choices or () for word in ("--choice", choice)]
    cached, computed, nobody = await asyncio.gather(
        ask(session, trend.text, *choices),
        ask(session, "Rise or fall?", "--choice", "UP", "--choice", "DOWN"),
        ask("nobody", "Rise or fall?"),
    )
    assert cached.returncode == computed.returncode == 0
    assert cached.stdout.splitlines()[0] in (trend.choices or ())
    assert "answered ahead, untrained model" in cached.stdout
    read = re.search(r"version (\d+), ", cached.stdout)
    assert read
    assert version <= int(read[1]) <= daemon.metric("foretick_data_version")
    assert "computed now, untrained model" in computed.stdout
    assert nobody.returncode == 1
    assert f"there is no session 'nobody'; there are: {session} (unknown_session)" in nobody.stderr


@pytest.mark.prometheus
async def test_every_panel_shows_a_daemon_at_work(replaying: Replaying, start_prometheus) -> None:
    daemon, session = replaying.daemon, replaying.session
    dashboard = json.loads((Path(dashboards.__file__).parent / "latency.json").read_text())
    prometheus = await asyncio.to_thread(start_prometheus, f"127.0.0.1:{daemon.http_port}")
    with QueryClient(replaying.endpoint) as client:
        await asyncio.to_thread(client.ask, session, "Rise or fall?", 1, ("UP", "DOWN"))
    await until_slowly(lambda: daemon.metric("foretick_answers_total") >= 12)
    # its source is not Kafka
    await asyncio.to_thread(prometheus.wait_for_panels, dashboard, but="foretick_consumer_lag")
    assert len(expressions(dashboard)) > 20
    # Prometheus has the daemon's values
    answered = daemon.metric("foretick_answers_total")
    has_it = f'foretick_answers_total{{session="{session}"}} >= {answered}'
    await asyncio.to_thread(prometheus.wait_for, has_it)
    (up,) = prometheus.query("foretick_engine_up")
    assert up["value"][1] == "1"
    p99 = prometheus.query('histogram_quantile(0.99, foretick_stage_seconds_bucket{stage="end_to_end"})')
    assert 0 < float(p99[0]["value"][1]) < 10
