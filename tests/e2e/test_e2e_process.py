"""`foretick run` as an operator sees it: a process, its broker, its signals, its exit status."""

import asyncio
import os
import signal
import socket
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from engine.model.embedded import build_tokenizer
from feeds.kafka_client import quiet_client_log
from feeds.kafka_source import KafkaSource
from feeds.market_data import Answer
from feeds.mock_broker import MockBroker
from flash.question import PAPER_SIX
from tests.kit import SECOND, START, trade, until, until_slowly
from tests.kit.daemon import SYMBOLS, Daemon, Topics, command, committed, gone, invoke, kafka_toml
from tests.kit.fakes import ServiceManager
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics, free_ports

STOP_S = 11.0
"""Time to drain, and to close connections to a broker on a busy machine."""
NAMES = {question.name for question in PAPER_SIX}
WATCHDOG_S = 2.0


def second(n: int, trades: int = 3) -> list[tuple[str, bytes]]:
    """Trades of both symbols in second ``n``, as (key, payload)."""
    return [
        (symbol, trade(symbol, START + n * SECOND + i * 1000, f"{100 + n % 7}.{i}5"))
        for i in range(trades)
        for symbol in SYMBOLS.values()
    ]


async def play(topics: Topics, seconds: range, answered: int = 0) -> int:
    """Second by second, each once the one before is answered; returns how many versions are answered.

    ``answered``: how many were when it began.
    """
    for n in seconds:
        await topics.produce(second(n))
        if n > 0:  # this closes the bar before
            answered += 1
            await asyncio.gather(*(topics.reached(name, answered) for name in SYMBOLS))
    return answered


def once_each(answers: list[Answer], versions: int) -> None:
    """Every question exactly once at so many versions, which ascend; their numbers have no gap."""
    trend = [a.data_version for a in answers if a.question == "trend"]
    assert len(trend) == versions
    assert all(a < b for a, b in pairwise(trend))
    assert Counter((a.data_version, a.question) for a in answers) == {
        (version, name): 1 for version in trend for name in NAMES
    }
    first = answers[0].sequence
    assert sorted(a.sequence for a in answers) == list(range(first, first + len(answers)))


def read_by(answers: list[Answer]) -> dict[int, list[tuple[int, int]]]:
    """Offset ranges by partition, sorted, each once."""
    ranges = defaultdict(set)
    for answer in answers:
        for i in answer.inputs:
            ranges[i.partition].add((i.first_offset, i.last_offset))
    return {partition: sorted(found) for partition, found in ranges.items()}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    quiet_client_log()
    made = ServiceManager(str(tmp_path / "notify"))
    yield made
    made.close()


async def test_a_daemon_s_life_on_the_embedded_broker(tmp_path: Path, manager: ServiceManager) -> None:
    """The broker starts late, ticks are answered once, the engine is killed, a second Ctrl-C ends at once."""
    with MockBroker() as broker:
        for topic in ("md.trades.v1", "answers.v1", "dlq.v1"):
            broker.create_topic(topic)
        config = kafka_toml(broker.bootstrap)
        environment = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
        broker.set_down()
        with Daemon(tmp_path, config, environment, spare=True) as daemon:
            await until_slowly(lambda: "does not answer, retrying" in daemon.log, what="a line in the log")
            await until_slowly(lambda: daemon.get("/healthz")[0] == 200)
            assert daemon.get("/readyz")[0] == 503
            assert daemon.reasons() == ["the engine is not up", "the source is not connected"]
            assert (manager.saw("READY=1"), manager.saw("WATCHDOG=1")) == (0, 0)
            broker.set_up()
            await daemon.ready()
            await until(lambda: manager.saw("READY=1") == 1)
            async with Topics(broker.bootstrap, "md.trades.v1", "answers.v1") as topics:
                reached = await play(topics, range(8))
                assert reached == 7
                for name, symbol in SYMBOLS.items():
                    found = topics.answers(name)
                    once_each(found, 7)
                    assert {a.symbol for a in found} == {symbol}
                    assert all(a.model == "foretick-tape" and a.staleness_ns >= 0 for a in found)
                await _bad_messages(daemon, topics, broker)
                beats = manager.saw("WATCHDOG=1")
                assert beats
                await until(lambda: manager.saw("WATCHDOG=1") > beats + 1, what="signs of life")
                assert daemon.metric("foretick_engine_up") == 1
                assert daemon.metric("foretick_versions_total", session="aaa") == 7
                assert daemon.metric("foretick_answers_total") == 2 * 7 * 6
                assert daemon.terminate(STOP_S) == 0
                assert manager.saw("STOPPING=1") == 1
                # the trades of seconds 0 to 6 are answered; those of the open bar and later ones wait
                stored = await committed(broker.bootstrap, "foretick", "md.trades.v1", 1)
                assert stored == {0: 7 * 6}
                first_life = {name: topics.answers(name) for name in SYMBOLS}

                with Daemon(tmp_path / "second", config, environment) as again:
                    await again.ready()
                    await _second_life(again, topics, first_life)
                    await _engine_killed(again, topics)
                    broker.set_down()
                    engine = again.engine()
                    assert engine is not None
                    again.signal(signal.SIGINT)
                    await until(lambda: manager.saw("STOPPING=1") == 2)
                    again.signal(signal.SIGINT)
                    assert again.wait(5) == 130
                    await until(lambda: gone(engine), what="the engine's end")
                    broker.set_up()
                    await _audited(broker.bootstrap)


@pytest.mark.kafka
async def test_a_daemon_s_life_on_apache_kafka(tmp_path: Path, real_kafka: RealKafka) -> None:
    """Once each over two partitions; the broker goes down and comes back; SIGTERM; a restart continues."""
    quiet_client_log()
    suffix, bootstrap = f".{uuid.uuid4().hex[:8]}", real_kafka.bootstrap
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(bootstrap, {trades: 2, answers: 1, f"dlq.v1{suffix}": 1})
    async with Topics(bootstrap, trades, answers) as topics:
        with Daemon(tmp_path, kafka_toml(bootstrap, suffix)) as daemon:
            await daemon.ready()
            reached = await play(topics, range(6))
            for name in SYMBOLS:
                once_each(topics.answers(name), reached)
            if real_kafka.server is not None:
                lines = daemon.log.count("does not answer")
                await asyncio.to_thread(real_kafka.server.stop)
                await until_slowly(lambda: daemon.log.count("does not answer") > lines)
                await asyncio.to_thread(real_kafka.server.start)
                reached = await play(topics, range(6, 10), reached)
            everything = {(version, name) for version in range(1, reached + 1) for name in NAMES}
            for name in SYMBOLS:
                found = {(a.data_version, a.question) for a in topics.answers(name)}
                assert found == everything, "nothing acknowledged was lost, nothing was skipped"
            assert daemon.metric("foretick_engine_restarts_total") == 0
            await until_slowly(lambda: daemon.metric("foretick_consumer_lag_records") == 0)
            for n in (0, 1):
                assert daemon.metric("foretick_consumer_lag_seconds", partition=f"{trades}/{n}") == 0
            assert daemon.terminate(STOP_S) == 0
        stored = await committed(bootstrap, f"foretick{suffix}", trades, 2)
        before = {name: topics.answers(name) for name in SYMBOLS}
        read = read_by([a for found in before.values() for a in found])
        assert {partition: stored[partition] for partition in read} == {
            partition: max(last for _, last in ranges) + 1 for partition, ranges in read.items()
        }, "committed up to the open bars, and no further"
        topics.messages.clear()
        inproc = {"process": 'mode = "inproc"'}
        with Daemon(tmp_path / "second", kafka_toml(bootstrap, suffix, more=inproc)) as again:
            await again.ready()
            await play(topics, range(reached + 1, reached + 3))
            assert again.terminate(STOP_S) == 0
        for name in SYMBOLS:
            (ranges,) = read_by(before[name] + topics.answers(name)).values()
            assert all(last < first for (_, last), (first, _) in pairwise(ranges)), "a tick answered twice"


async def _bad_messages(daemon: Daemon, topics: Topics, broker: MockBroker) -> None:
    """Malformed messages are counted and read back from the DLQ; nothing else changes."""
    bad = [("V:AAA", b"{"), ("V:AAA", trade("V:AAA", START, "-1")), ("V:ZZZ", trade("V:ZZZ", START))]
    await topics.produce(bad)
    await until_slowly(lambda: daemon.metric("foretick_dead_letters_total") == 2)
    assert daemon.metric("foretick_records_malformed_total", reason="json") == 1
    assert daemon.metric("foretick_records_malformed_total", reason="price") == 1
    assert daemon.metric("foretick_records_unknown_symbol_total") == 1
    dead_letters = KafkaSource("test-dlq", broker.bootstrap, ["dlq.v1"], None)
    await dead_letters.start()
    reasons: list[bytes] = []
    async with asyncio.timeout(20):
        async for batch in dead_letters.batches():
            reasons += [message.headers["reason"] for message in batch]
            if len(reasons) == 2:
                break
    await dead_letters.stop()
    assert reasons == [b"json", b"price"]


async def _second_life(daemon: Daemon, topics: Topics, before: dict[str, list[Answer]]) -> None:
    """After a restart the daemon continues after the last answered tick: none twice, none missing."""
    topics.messages.clear()
    # second 7 was read and not answered: second 8 closes it
    reached = await play(topics, range(8, 11))
    assert reached == 3
    for name in SYMBOLS:
        once_each(topics.answers(name), 3)
        first, last = topics.answers(name)[0], before[name][-1]
        assert (first.epoch, first.sequence) == (2, last.sequence + 1), "numbers go on"
        assert first.data_version > last.data_version
        ranges = sorted(read_by(before[name] + topics.answers(name))[0])
        assert all(last < first for (_, last), (first, _) in pairwise(ranges))
        assert len(ranges) == 10
    assert daemon.metric("foretick_records_repeated_total") == 0


async def _audited(bootstrap: str) -> None:
    """The topic holds each answer of three engines once."""
    given = ("--bootstrap", bootstrap, "--exactly-once")
    done = await asyncio.to_thread(command, "audit", "answers.v1", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"answers.v1: complete; {2 * 12 * 6} answers, 0 missing\n" in done.stdout


async def _engine_killed(daemon: Daemon, topics: Topics) -> None:
    """The gateway starts another engine and reads unanswered records again; version numbers continue."""
    engine = daemon.engine()
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    await until_slowly(lambda: daemon.get("/readyz")[0] == 503)
    assert "the engine process ended with status -9; starting it again" in daemon.log
    await daemon.ready()
    assert daemon.engine() not in (None, engine)
    assert daemon.metric("foretick_engine_restarts_total") == 1
    await until_slowly(lambda: daemon.metric("foretick_engine_up") == 1)
    await topics.produce(second(11))
    await asyncio.gather(*(topics.reached(name, 4, timeout_s=60) for name in SYMBOLS))
    await topics.produce(second(12))
    await asyncio.gather(*(topics.reached(name, 5) for name in SYMBOLS))
    for name in SYMBOLS:
        once_each(topics.answers(name), 5)
        assert [a.epoch for a in topics.answers(name)] == [2] * 18 + [3] * 12
        ranges = read_by(topics.answers(name))[0]
        assert len(ranges) == 5, "three bars before, two after, none of them twice"


NAMED = [
    ("model", 'path = "nowhere/model"', "no config.json"),
    ("pool", "blokcs = 3", "pool.blokcs: there is no such key"),
    ("source", 'kind = "replay"\n[source.replay]\nfile = "x"\nformat = "nothing"', "source.replay.format: "),
]


@pytest.mark.parametrize(("table", "lines", "said"), NAMED, ids=[table for table, _, _ in NAMED])
def test_a_wrong_setting_is_named(tmp_path: Path, table: str, lines: str, said: str) -> None:
    """With the engine in the gateway's process; the test of architectures covers the other mode."""
    file = tmp_path / "config.toml"
    session = '[[sessions]]\nname = "a"\nsymbol = "V:A"\n'
    file.write_text(f'{session}[process]\nmode = "inproc"\n[query]\nendpoint = ""\n[{table}]\n{lines}\n')
    done = invoke("run", "--config", str(file), "--set", "http.port=0")
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_an_architecture_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    """GPT-2 has learnt positions, which position frames cannot re-rotate."""
    gpt2 = GPT2Config(vocab_size=2048, n_positions=256, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    build_tokenizer().save_pretrained(tmp_path / "gpt2")
    port, query_port = free_ports(2)
    file = tmp_path / "config.toml"
    query = f'[query]\nendpoint = "tcp://127.0.0.1:{query_port}"'
    file.write_text(f'[model]\npath = "{tmp_path / "gpt2"}"\n[http]\nport = {port}\n{query}\n')
    done = command("run", "--config", str(file))
    assert done.returncode == 2, done.stderr
    assert "gpt2" in next(line for line in done.stderr.splitlines() if "model.path: " in line)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "config.toml"
        file.write_text(f"[http]\nport = {port}\n")
        done = command("run", "--config", str(file))
    assert done.returncode == 1
    assert f"cannot bind HTTP to 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
