"""A daemon with `delivery = "exactly_once"`, killed and faulted: each question once of each bar."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.config.load import load_config
from daemon.config.signals import rules_of
from feeds.kafka_client import quiet_client_log
from feeds.market_data import Signal
from flash.signals import SignalRule
from tests.e2e.test_e2e_group import TRADES, covered, seconds_answered
from tests.e2e.test_e2e_process import NAMES, second
from tests.kit import until, until_slowly
from tests.kit.daemon import SYMBOLS, Daemon, Topics, committed, kafka_toml
from tests.kit.kafka import KafkaServer, create_topics
from tests.kit.kafka_proxy import Api, Fault, KafkaProxy
from tests.kit.signals import ids_of

pytestmark = pytest.mark.kafka
SIGNALS = """
[[signals]]
name = "turn"
when = [{ question = "trend", changed = true }]
withheld_by = []
[[signals]]
name = "stays"
when = [{ question = "volume", answer = ["YES"], for_bars = 2 }]
withheld_by = []
[[signals]]
name = "both"
cooldown_bars = 3
when = [{ question = "trend", answer = ["DOWN"] }, { question = "pullback", answer = ["NO"], for_bars = 2 }]
withheld_by = []
"""


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    quiet_client_log()
    with KafkaServer() as running:
        yield running


@dataclass
class Market:
    """Topics of a test's own, and the trades in them."""

    server: KafkaServer
    suffix: str
    topics: Topics
    seconds: int = 0

    def config(self, bootstrap: str, group: str = "foretick") -> str:
        once = f'delivery = "exactly_once"\ntransactional_id = "daemon{self.suffix}"'
        once += f'\nsignals = "answers.v1{self.suffix}"'
        return kafka_toml(bootstrap, self.suffix, more={"sink.kafka": once}, group=group) + SIGNALS

    async def trade(self, seconds: int, pause_s: float = 0.0) -> None:
        choice = random.Random(self.seconds)
        for _ in range(seconds):
            await self.topics.produce(second(self.seconds, TRADES))
            self.seconds += 1
            await asyncio.sleep(choice.uniform(0.0, pause_s))

    async def check(self) -> None:
        """Every bar but the open one is answered, in order, each question once."""
        for name in SYMBOLS:
            await until(lambda name=name: seconds_answered(self.topics, name) >= self.seconds - 1, 60, name)
        await asyncio.sleep(0.5)
        for name in SYMBOLS:
            found = covered(self.topics.answers(name))
            assert found.keys() == NAMES
            offsets = next(iter(found.values()))
            assert offsets == sorted(set(offsets)), f"{name}: a record was answered twice"
            assert len(offsets) == (self.seconds - 1) * TRADES, f"{name}: a record was lost"
            assert all(each == offsets for each in found.values())

    def check_signals(self, rules: list[SignalRule]) -> None:
        """Those that the answers make, each once."""
        answers = [each for name in SYMBOLS for each in self.topics.answers(name)]
        made = [each.signal_id for each in self.topics.messages if isinstance(each, Signal)]
        assert made, "the test needs some"
        assert sorted(made) == sorted(ids_of(rules, answers))


@pytest.fixture
async def market(server: KafkaServer) -> AsyncIterator[Market]:
    suffix = f".{uuid.uuid4().hex[:8]}"
    trades, answers = f"md.trades.v1{suffix}", f"answers.v1{suffix}"
    await create_topics(server.bootstrap, {trades: 2, answers: 1, f"dlq.v1{suffix}": 1})
    async with Topics(server.bootstrap, trades, answers) as topics:
        yield Market(server, suffix, topics)


@pytest.fixture
async def proxy(server: KafkaServer) -> AsyncIterator[KafkaProxy]:
    proxy = KafkaProxy(server.proxy_port, server.behind_port)
    await proxy.start()
    yield proxy
    await proxy.stop()


async def test_kills_and_faults_of_a_daemon(tmp_path: Path, market: Market, proxy: KafkaProxy) -> None:
    """Requests fail, engine and gateway are killed: nothing is lost, and nothing comes twice."""
    config = market.config(market.server.behind)
    faults = [(Api.END_TXN, "duplicate"), (Api.TXN_OFFSET_COMMIT, "cut_after"), (Api.END_TXN, "cut_after")]
    with Daemon(tmp_path, config) as daemon:
        await daemon.ready()
        proxy.faults += [Fault(api, act) for api, act in faults]
        await market.trade(12, pause_s=0.1)
        await market.check()
        assert daemon.metric("foretick_transactions_total", outcome="committed") >= 3
        engine = daemon.engine()
        assert engine is not None
        await market.trade(4, pause_s=0.1)
        os.kill(engine, signal.SIGKILL)
        await until_slowly(lambda: daemon.metric("foretick_engine_restarts_total") == 1)
        await until_slowly(lambda: daemon.metric("foretick_engine_up") == 1)
        await market.trade(4, pause_s=0.1)
        await market.check()
        await market.trade(6, pause_s=0.1)
        daemon.signal(signal.SIGKILL)
        daemon.wait(10)
    with Daemon(tmp_path, config) as daemon:
        await daemon.ready()
        await market.trade(4, pause_s=0.1)
        await market.check()
        assert daemon.terminate(30) == 0
    (tmp_path / "signals.toml").write_text(config)
    market.check_signals(rules_of(load_config(tmp_path / "signals.toml", {})))
    assert dict(proxy.applied) == {f"{api.name} {act}": 1 for api, act in faults}
    trades = f"md.trades.v1{market.suffix}"
    stored = await committed(market.server.bootstrap, f"foretick{market.suffix}", trades, 2)
    assert sum(offset or 0 for offset in stored.values()) >= (market.seconds - 1) * TRADES * len(SYMBOLS)


async def test_a_second_daemon_with_the_same_id_ends_the_first(tmp_path: Path, market: Market) -> None:
    """The first one says why, and leaves the rest to its supervisor. Groups differ, so that both read."""
    bootstrap = market.server.bootstrap
    with Daemon(tmp_path / "first", market.config(bootstrap)) as first:
        await first.ready()
        with Daemon(tmp_path / "second", market.config(bootstrap, group="other")) as other:
            await other.ready()
            await market.trade(3)
            assert await asyncio.to_thread(first.wait, 60) != 0
            assert "another process has this transactional id" in first.log
            assert other.get("/readyz")[0] == 200
