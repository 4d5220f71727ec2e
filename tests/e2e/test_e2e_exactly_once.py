"""A daemon with `delivery = "exactly_once"`, killed and faulted: each question once of each bar."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from aiokafka.partitioner import DefaultPartitioner

from daemon.audit.completeness import Audit
from daemon.config.schema import UNTRAINED
from feeds.kafka_client import quiet_client_log
from feeds.market_data import Answer
from tests.e2e.test_e2e_process import NAMES, SYMBOLS, kafka_config, second
from tests.kit import SECOND, START, trade, until, until_slowly
from tests.kit.daemon import Daemon, Topics, committed
from tests.kit.kafka import KafkaServer, create_topics
from tests.kit.kafka_proxy import Api, Fault, KafkaProxy

pytestmark = pytest.mark.kafka

TRADES = 3
"""Of each symbol in a second."""


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    quiet_client_log()
    with KafkaServer() as running:
        yield running


def exactly_once(config: str, suffix: str) -> str:
    return config.replace(
        "[sink.kafka]\n", f'[sink.kafka]\ndelivery = "exactly_once"\ntransactional_id = "daemon{suffix}"\n'
    )


def covered(answers: Sequence[Answer]) -> dict[str, list[int]]:
    """Offsets that a question's answers were read from, in the order of the answers."""
    found = defaultdict(list)
    for answer in answers:
        for each in answer.inputs:
            found[answer.question] += range(each.first_offset, each.last_offset + 1)
    return found


def seconds_answered(topics: Topics, name: str) -> int:
    return min((len(set(found)) for found in covered(topics.answers(name)).values()), default=0) // TRADES


async def check(topics: Topics, seconds: int) -> None:
    """Every bar of ``seconds`` but the open one, in order, each question once."""
    for name in SYMBOLS:
        try:
            await until(lambda name=name: seconds_answered(topics, name) >= seconds - 1, 60, name)
        except TimeoutError:
            for name in SYMBOLS:
                raise AssertionError(
                    f"{name}: of {seconds} seconds: {covered(topics.answers(name))}"
                ) from None
    await asyncio.sleep(0.5)
    for name in SYMBOLS:
        found = covered(topics.answers(name))
        assert found.keys() == NAMES
        offsets = next(iter(found.values()))
        assert offsets == sorted(set(offsets)), f"{name}: a record was answered twice"
        assert len(offsets) == (seconds - 1) * TRADES, f"{name}: a record was lost"
        assert all(each == offsets for each in found.values())


async def test_kills_and_faults_of_a_daemon(tmp_path: Path, server: KafkaServer) -> None:
    """Requests fail, engine and gateway are killed: nothing is lost, and nothing comes twice."""
    suffix = f".{uuid.uuid4().hex[:8]}"
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(server.bootstrap, {trades: 2, answers: 1, f"dlq.v1{suffix}": 1})
    config = exactly_once(kafka_config(server.behind, suffix), suffix)
    choice, n = random.Random(1), 0
    proxy = KafkaProxy(server.proxy_port, server.behind_port)
    await proxy.start()

    async def play(topics: Topics, seconds: int) -> None:
        nonlocal n
        for _ in range(seconds):
            await topics.produce(second(n, TRADES))
            n += 1
            await asyncio.sleep(choice.uniform(0.0, 0.1))

    async with Topics(server.bootstrap, trades, answers) as topics:
        with Daemon(tmp_path, config) as daemon:
            await daemon.ready()
            proxy.faults += [
                Fault(Api.END_TXN, "duplicate"),
                Fault(Api.TXN_OFFSET_COMMIT, "cut_after"),
                Fault(Api.END_TXN, "cut_after"),
            ]
            await play(topics, 12)
            await check(topics, n)
            assert daemon.metric("foretick_transactions_total", outcome="committed") >= 3
            engine = daemon.engine()
            assert engine is not None
            await play(topics, 4)
            os.kill(engine, signal.SIGKILL)
            await until_slowly(lambda: daemon.metric("foretick_engine_restarts_total") == 1)
            await until_slowly(lambda: daemon.metric("foretick_engine_up") == 1)
            await play(topics, 4)
            await check(topics, n)
            await play(topics, 6)
            daemon.signal(signal.SIGKILL)
            daemon.wait(10)
        with Daemon(tmp_path, config) as daemon:
            await daemon.ready()
            await play(topics, 4)
            await check(topics, n)
            assert daemon.terminate(30) == 0
        assert dict(proxy.applied) == {
            "END_TXN duplicate": 1, "TXN_OFFSET_COMMIT cut_after": 1, "END_TXN cut_after": 1
        }  # fmt: skip
        stored = await committed(server.bootstrap, f"foretick{suffix}", trades, 2)
        assert sum(offset or 0 for offset in stored.values()) >= (n - 1) * TRADES * len(SYMBOLS)
    await proxy.stop()


async def test_a_second_daemon_with_the_same_id_ends_the_first(tmp_path: Path, server: KafkaServer) -> None:
    """The first one says why, and leaves the rest to its supervisor."""
    suffix = f".{uuid.uuid4().hex[:8]}"
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(server.bootstrap, {trades: 1, answers: 1, f"dlq.v1{suffix}": 1})
    # outside of the first one's group, so that both read the partition
    first = exactly_once(kafka_config(server.bootstrap, suffix), suffix)
    second_one = exactly_once(kafka_config(server.bootstrap, suffix), suffix).replace(
        f'group = "foretick{suffix}"', f'group = "other{suffix}"'
    )
    async with Topics(server.bootstrap, trades, answers) as topics:
        with Daemon(tmp_path / "first", first) as daemon:
            await daemon.ready()
            with Daemon(tmp_path / "second", second_one) as other:
                await other.ready()
                await topics.produce([each for n in range(3) for each in second(n)])
                assert await asyncio.to_thread(daemon.wait, 60) != 0
                assert "another process has this transactional id" in daemon.log
                assert other.get("/readyz")[0] == 200


def markets(partitions: int) -> dict[str, str]:
    """A symbol for each partition, by session."""
    found: dict[int, str] = {}
    for dead_letter in "ABCDEFGHIJKLM":
        every = list(range(partitions))
        found.setdefault(DefaultPartitioner()(f"V:{dead_letter * 3}".encode(), every, every), dead_letter * 3)
    assert len(found) == partitions
    return {symbol.lower(): f"V:{symbol}" for symbol in found.values()}


async def trading(topics: Topics, symbols: Iterable[str], played: list[int], stop: asyncio.Event) -> None:
    """Whole seconds of trades, one every 400 ms or longer, until ``stop``; ``played`` holds their number."""
    while not stop.is_set():
        at = START + played[0] * SECOND
        trades = [trade(symbol, at + i * 1000, f"100.{i}5") for i in range(TRADES) for symbol in symbols]
        await topics.produce(zip([*symbols] * TRADES, trades, strict=True))
        played[0] += 1
        await asyncio.sleep(0.4)


@pytest.mark.timeout(900)
async def test_members_of_a_group_join_leave_and_are_killed(tmp_path: Path, server: KafkaServer) -> None:
    """Each has a transactional id of its own. None ends by itself, and every answer is there once."""
    suffix = f".{uuid.uuid4().hex[:8]}"
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(server.bootstrap, {trades: 4, answers: 1, f"dlq.v1{suffix}": 1})
    sessions, played, stop = markets(4), [0], asyncio.Event()
    questions = ("up", "calm")

    def member(name: str) -> Daemon:
        config = exactly_once(kafka_config(server.bootstrap, suffix, "inproc", sessions), f"{suffix}.{name}")
        config = config.replace(
            "[source]\n", f'[model]\npath = "{UNTRAINED}"\n[source]\nbacklog_policy = "wait"\n'
        )
        config = config.replace("[source.kafka]\n", '[source.kafka]\nsession_timeout = "6s"\n')
        config += f'\n[recovery]\ndirectory = "{tmp_path / "snapshots"}"\ninterval = "1s"'
        for question in questions:  # a choice, for free text may be left out where the next bar is there
            config += f'\n[[questions]]\nname = "{question}"\ntext = "{question}?"\nchoices = ["Yes", "No"]'
        return Daemon(tmp_path / name, f'standing = "none"\n{config}')

    async with Topics(server.bootstrap, trades, answers) as topics:

        async def answered(running: Sequence[Daemon], seconds: int = 0) -> None:
            """Wait until all sessions have answers to what is played by now; so long none ends."""
            wanted = seconds or played[0]

            def look() -> bool:
                for each in running:
                    assert each.poll() is None, f"it ended with {each.poll()}:\n{each.log[-3000:]}"
                return all(seconds_answered(topics, name) >= wanted for name in sessions)

            await until_slowly(look, 180, f"{wanted} seconds of all sessions")

        async def shared(one: Daemon, other: Daemon) -> None:
            """Wait until both have partitions, which then move from the one to the other."""
            await until_slowly(lambda: all(holds(each) for each in (one, other)), 60, "two owners")

        with member("one") as one:
            await one.ready()
            market = asyncio.create_task(trading(topics, sessions.values(), played, stop))
            try:
                await answered([one])
                with member("two") as two:
                    await two.ready()
                    await shared(one, two)
                    await answered([one, two])
                    assert two.terminate(60) == 0, two.log[-3000:]
                await answered([one])
                with member("two") as two:
                    await two.ready()
                    await shared(one, two)
                    await answered([one, two])
                    one.signal(signal.SIGKILL)
                    one.wait(10)
                    await answered([two])
                    stop.set()
                    await market
                    await answered([two], played[0] - 1)
            finally:
                market.cancel()
        audit = Audit(whole=True)
        for message in topics.messages:
            if isinstance(message, Answer):
                audit.take(message)
        for name in sessions:
            asked = {each: [a for a in topics.answers(name) if a.question == each] for each in questions}
            for found in asked.values():
                times = [each.as_of for each in found]
                assert times == sorted(set(times)), f"{name}: a bar was answered twice, or late"
                # a version that begins with a bar of the daemon before has that one's records, too
                assert set(*covered(found).values()) == set(range((played[0] - 1) * TRADES))
        assert {each.session for each in audit.result()} == sessions.keys()
        for each in audit.result():
            assert each.holds(exactly_once=True), each


def holds(daemon: Daemon) -> bool:
    """Whether it has partitions."""
    return "foretick_consumer_lag_records{" in daemon.get("/metrics")[1]
