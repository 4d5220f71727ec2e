"""A daemon with `delivery = "exactly_once"`, killed and faulted: each question once of each bar."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from feeds.kafka_client import quiet_client_log
from feeds.messages import Answer
from tests.e2e.process import Daemon, Topics, committed, until_slowly
from tests.e2e.support import until
from tests.e2e.test_e2e_process import NAMES, SYMBOLS, kafka_config, second
from tests.fixtures_kafka import need_tools
from tests.kafka_proxy import Api, Fault, KafkaProxy
from tests.kafka_server import KafkaServer, create_topics

pytestmark = pytest.mark.kafka

TRADES = 3
"""Of each symbol in a second."""


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    need_tools()
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
    return min((len(found) for found in covered(topics.answers(name)).values()), default=0) // TRADES


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
    """Requests fail, engine and front are killed: nothing is lost, and nothing comes twice."""
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
