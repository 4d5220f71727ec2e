"""One daemon in two processes, as `foretick run` starts it, is asked, streams prompts and is scraped."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import dashboards
from daemon.api.client import QueryClient
from daemon.api.messages import FinishReply, QueryError
from daemon.cores import usable
from flash.question import PAPER_SIX
from tests.e2e.test_e2e_prompts import LINES, TEXT, same
from tests.kit import until_slowly
from tests.kit.daemon import Daemon, invoke
from tests.kit.kafka import free_ports
from tests.kit.prometheus import expressions
from tests.kit.samples import SAMPLES, write

STOP_S = 30.0
SAMPLE, SESSION = SAMPLES[2], "eurusd"


@dataclass(frozen=True)
class Replaying:
    """A daemon that has replayed a sample's few seconds, and continues to answer."""

    daemon: Daemon
    endpoint: str
    config: str


@pytest.fixture(scope="module")
def replaying(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replaying]:
    folder = tmp_path_factory.mktemp("daemon")
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    config = f"""
[model]
path = "untrained"
[[sessions]]
name = "{SESSION}"
symbol = "{SAMPLE.symbol}"
price_decimals = 5
[source]
kind = "replay"
[source.replay]
file = "{write(SAMPLE, folder)}"
format = "{SAMPLE.form}"
speed = 2.0
[query]
endpoint = "{endpoint}"
[process]
reserve_core = {str(len(usable()) > 1).lower()}
"""
    with Daemon(folder, config, {"SCHEDULER_TYPE": "KLPM"}) as daemon:
        asyncio.run(daemon.ready())
        yield Replaying(daemon, endpoint, config)
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
    daemon, trend = replaying.daemon, PAPER_SIX[0]
    await until_slowly(lambda: daemon.metric("foretick_bars_total") == SAMPLE.bars - 1)
    version = int(daemon.metric("foretick_data_version"))
    with QueryClient(replaying.endpoint) as client:
        await asyncio.to_thread(client.answers, SESSION, "", version)

    def ask(*arguments: str) -> Result:
        return invoke("ask", *arguments, "--endpoint", replaying.endpoint)

    choices = [word for choice in trend.choices or () for word in ("--choice", choice)]
    cached = ask(SESSION, trend.text, *choices)
    computed = ask(SESSION, "Rise or fall?", "--choice", "UP", "--choice", "DOWN")
    absent = ask("absent", "Rise or fall?")
    assert cached.exit_code == computed.exit_code == 0
    assert cached.stdout.splitlines()[0] in (trend.choices or ())
    assert "answered ahead, untrained model" in cached.stdout
    read = re.search(r"version (\d+), ", cached.stdout)
    assert read
    assert version <= int(read[1]) <= daemon.metric("foretick_data_version")
    assert "computed now, untrained model" in computed.stdout
    assert absent.exit_code == 1
    assert f"there is no session 'absent'; there are: {SESSION} (unknown_session)" in absent.stderr


@pytest.mark.prometheus
async def test_every_panel_shows_a_daemon_at_work(replaying: Replaying, start_prometheus) -> None:
    daemon = replaying.daemon
    folder = Path(dashboards.__file__).parent
    latency = json.loads((folder / "latency.json").read_text())
    prometheus = await asyncio.to_thread(start_prometheus, f"127.0.0.1:{daemon.http_port}")
    with QueryClient(replaying.endpoint) as client:
        await asyncio.to_thread(client.ask, SESSION, "Rise or fall?", 1, ("UP", "DOWN"))
    await until_slowly(lambda: daemon.metric("foretick_answers_total") >= 12)
    # its source is not Kafka
    await asyncio.to_thread(prometheus.wait_for_panels, latency, but="foretick_consumer_lag")
    assert len(expressions(latency)) > 20
    for name in ("overview", "engine", "scheduler"):
        board = json.loads((folder / f"{name}.json").read_text())
        await asyncio.to_thread(prometheus.wait_for_panels, board, but="foretick_consumer_lag")
    # Prometheus has the daemon's values
    answered = daemon.metric("foretick_answers_total")
    has_it = f'foretick_answers_total{{session="{SESSION}"}} >= {answered}'
    await asyncio.to_thread(prometheus.wait_for, has_it)
    (up,) = prometheus.query("foretick_engine_up")
    assert up["value"][1] == "1"
    p99 = prometheus.query('histogram_quantile(0.99, foretick_stage_seconds_bucket{stage="end_to_end"})')
    assert 0 < float(p99[0]["value"][1]) < 10


def cpus_of(pid: int) -> set[str]:
    """`Cpus_allowed_list` of all threads."""
    found = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        listed = re.search(r"^Cpus_allowed_list:\t(.*)$", status.read_text(), re.MULTILINE)
        assert listed is not None
        found.add(listed[1])
    return found


def cpus(listed: str) -> set[int]:
    """1-3,5 as numbers."""
    runs = (part.partition("-") for part in listed.split(","))
    return {cpu for first, _, last in runs for cpu in range(int(first), int(last or first) + 1)}


@pytest.mark.skipif(len(usable()) < 2, reason="needs two CPUs")
def test_the_gateway_has_a_core_of_its_own(replaying: Replaying) -> None:
    """As the kernel sees it: the CPUs of every thread of both processes."""
    daemon, (first, *others) = replaying.daemon, sorted(usable())
    engine = daemon.engine()
    assert engine is not None
    (of_engine,) = cpus_of(engine)
    assert cpus(of_engine) == set(others)
    assert cpus_of(daemon.pid) == {str(first)}
    assert f"gateway on CPU {first}, engine on CPU {of_engine}" in daemon.log


def test_with_one_cpu_the_daemon_does_not_start(tmp_path: Path) -> None:
    only = min(usable())
    code = f"import os; os.sched_setaffinity(0, {{{only}}}); from daemon.cli.main import main; main()"
    file = tmp_path / "foretick.toml"
    file.write_text('[process]\nreserve_core = true\n[query]\nendpoint = ""\n[http]\nport = 0\n')
    arguments = ["run", "--config", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    said = f"process.reserve_core: gateway and engine need a CPU each, but there is CPU {only} only"
    assert said in done.stdout + done.stderr


async def test_a_hangup_makes_the_process_read_its_configuration_again(replaying: Replaying) -> None:
    """The last test: it changes the questions."""
    daemon = replaying.daemon

    def configure(question: str, more: str = "") -> None:
        asked = f'[[questions]]\nname = "{question}"\ntext = "Up?"\n'
        daemon.configure(f'standing = "none"\n{replaying.config}\n{asked}{more}')
        daemon.signal(signal.SIGHUP)

    with QueryClient(replaying.endpoint) as client:

        def names() -> list[str]:
            return [question.name for question in client.questions(SESSION).questions]

        def listed() -> list[str]:
            return [session.name for session in client.sessions().sessions]

        configure("first")
        await until_slowly(lambda: names() == ["first"])
        daemon.configure("nothing of it")
        daemon.signal(signal.SIGHUP)
        await until_slowly(lambda: "was not read again" in daemon.log)
        assert names() == ["first"]
        configure("second", '[[sessions]]\nname = "late"\nsymbol = "V:B"\nretention_tokens = 512\n')
        await until_slowly(lambda: listed() == [SESSION, "late"])
        assert names() == ["second"]
        with pytest.raises(QueryError, match="late has read no") as refused:
            client.ask("late", "Up?")
        assert refused.value.code == "no_data"
        assert 'foretick_bars_total{session="late"} 0' in daemon.get("/metrics")[1]
        assert len(client.change_session("late", retention_tokens=256).sessions) == 2
        assert [each.name for each in client.remove_session("late").sessions] == [SESSION]
    assert 'session="late"' not in daemon.get("/metrics")[1]
    assert daemon.metric("foretick_config_reloads_total", outcome="refused") == 1
