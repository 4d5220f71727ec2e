"""Faults of a running daemon, and the alerts that a real Prometheus raises: each its own, and no other.

Prometheus reads the committed rules with windows a sixtieth as long, so ten minutes are ten seconds.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import pytest

from dashboards import alerts
from feeds.kafka_client import quiet_client_log
from feeds.mock_broker import MockBroker
from tests.kit import SECOND, trade, until_slowly
from tests.kit.daemon import Daemon, Topics, kafka_toml
from tests.kit.prometheus import PrometheusServer

FASTER = 60
SETTLE_S = 14.0
"""Until a fault is out of all windows that saw it."""
TABLES = {
    "source": 'sequence = "symbol"',
    "bars": 'interval = "250ms"',
}
PATTERN = """
[[sessions]]
match = "V:P*"
max_sessions = 1
price_decimals = 2
"""


class Market:
    """Trades of the present, ten a second and symbol, while the block lasts."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._numbers = {symbol: count(1) for symbol in ("V:AAA", "V:BBB", "V:PA", "V:PB")}
        self._walk, self._cents = random.Random(7), 10_000

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Market"]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def send(
        self,
        symbol: str = "V:AAA",
        n: int = 1,
        *,
        event_s: float = 0,
        receipt_s: float = 0,
        skip: int = 0,
        **more: object,
    ) -> None:
        """Trades whose event and receipt are this far from now (s), after leaving out ``skip`` numbers."""
        numbers = self._numbers[symbol]
        for _ in range(skip):
            next(numbers)
        now = time.time_ns()
        more = {"ts_recv": now + int(receipt_s * SECOND), **more}
        moments = [now + int(event_s * SECOND) + i - n for i in range(n)]
        self._cents += self._walk.randint(-4, 4)
        price = f"{self._cents / 100:.2f}"
        await self._topics.produce(
            [(symbol, trade(symbol, each, price, **more, seq=next(numbers))) for each in moments]
        )

    async def _run(self) -> None:
        while True:
            for symbol in ("V:AAA", "V:BBB", "V:PA"):
                # a broker that is down holds its records back, and nothing else
                with contextlib.suppress(TimeoutError):
                    await self.send(symbol)
            await asyncio.sleep(0.1)


class Bench:
    """A daemon, its broker and a Prometheus that watches it."""

    def __init__(self, daemon: Daemon, broker: MockBroker, topics: Topics, market: Market) -> None:
        self.daemon, self.broker, self.topics, self.market = daemon, broker, topics, market

    def stop_gateway(self) -> None:
        self.daemon.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.daemon.signal(signal.SIGCONT)

    def kill_engine(self) -> None:
        engine = self.daemon.engine()
        assert engine is not None
        os.kill(engine, signal.SIGKILL)

    def reload(self, config: str) -> None:
        self.daemon.configure(config)
        self.daemon.signal(signal.SIGHUP)


async def fires(prometheus: PrometheusServer, *expected: str, may: str = "", ends: bool = True) -> None:
    """Wait until each of these has fired and, if it ``ends``, none does. Others must not, but for ``may``."""
    seen: set[str] = set()

    def look() -> bool:
        seen.update(found := prometheus.firing())
        others = seen - {*expected, may}
        assert not others, f"{others} fires, expected {expected}"
        return seen >= set(expected) and not (ends and found)

    await until_slowly(look, 90, f"{expected} to fire, so far {seen}")


# its clock is sixty times as fast: a machine that is busy for two seconds is two minutes late
@pytest.mark.long
@pytest.mark.prometheus
async def test_each_fault_of_a_daemon_raises_its_own_alert(
    tmp_path: Path, start_prometheus: Callable[..., PrometheusServer]
) -> None:
    quiet_client_log()
    rules = alerts.prometheus(alerts.read(), FASTER)
    with MockBroker() as broker:
        for topic in ("md.trades.v1", "answers.v1", "dlq.v1"):
            broker.create_topic(topic)
        config = kafka_toml(broker.bootstrap, more=TABLES) + PATTERN
        with Daemon(tmp_path, config) as daemon:
            async with (
                Topics(broker.bootstrap, "md.trades.v1", "answers.v1") as topics,
                Market(topics).open() as market,
            ):
                await daemon.ready()
                await asyncio.sleep(SETTLE_S)
                prometheus = await asyncio.to_thread(start_prometheus, f"127.0.0.1:{daemon.http_port}", rules)
                await asyncio.to_thread(prometheus.wait_for, "rate(foretick_answers_total[5s]) > 0")
                await _faults(Bench(daemon, broker, topics, market), prometheus, config)


async def _faults(bench: Bench, prometheus: PrometheusServer, config: str) -> None:
    market = bench.market
    await bench.topics.produce([("V:AAA", b"{")])
    await fires(prometheus, "ForetickDeadLetters")
    await market.send(skip=3)
    await fires(prometheus, "ForetickFeedGap")
    await market.send(n=20, size="0")
    await fires(prometheus, "ForetickFeedFaults")
    await market.send(n=20, receipt_s=-0.1)
    await fires(prometheus, "ForetickClockSkewed")
    await market.send(n=30, event_s=-30)
    await fires(prometheus, "ForetickRecordsLate")
    await market.send("V:PB", 3)
    await fires(prometheus, "ForetickSymbolsRefused")
    bench.reload(config + "\n[nothing]\nof = 1\n")
    await fires(prometheus, "ForetickConfigurationRefused")
    bench.reload(config)
    bench.broker.set_down()
    await until_slowly(lambda: "ForetickSourceDown" in prometheus.firing(), 60)
    bench.broker.set_up()
    # the silence is seen seconds before the broker is missed, which are minutes here
    await fires(prometheus, "ForetickSourceDown", may="ForetickFeedSilent")
    bench.stop_gateway()
    await until_slowly(lambda: "ForetickDown" in prometheus.firing(), 60)
    bench.go_on()
    await fires(prometheus, "ForetickDown")
    # last: what an engine is away for is minutes by Prometheus' clock, so bars are late for an hour of it
    bench.kill_engine()
    await fires(
        prometheus,
        "ForetickEngineDown",
        "ForetickEngineRestarted",
        may="ForetickFreshnessBurnsSlowly",
        ends=False,
    )
