"""Time to live answers after an outage: a daemon finds a backlog in Kafka and live trades behind it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import uvloop
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from bench.figures import Figure, Goal, Setting
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config, session_of
from daemon.config import schema
from daemon.gateway.wiring import make_gateway
from feeds.codec import decode_message, encode
from feeds.connector import SinkRoute
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.market_data import Answer, Trade
from feeds.mock_broker import MockBroker, MockUnavailable
from feeds.synthetic import SyntheticTape

OUTAGES = {"a minute": 60, "an hour, sparse": 3600, "a day, sparse": 86_400}
TOPIC = "md.trades.v1"
_LIVE_S = 0.25
_S = 1_000_000_000


@dataclass(frozen=True)
class OutagePlan:
    """``trades``: in the backlog, spread over the outage. ``window``: bars of one second in a session.

    ``longest_s``: wait for live answers.
    """

    trades: int = 60_000
    markets: int = 4
    window: int = 64
    longest_s: float = 300.0
    outages: Mapping[str, int] = field(default_factory=lambda: OUTAGES)


QUICK = OutagePlan(trades=400, markets=1, window=8, longest_s=60.0, outages={"an hour, sparse": 3600})


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model starts at the committed offset and finds 60,000 trades
    from the time of the outage: 1,000 a second for a minute, and as many spread over an hour or a day,
    because the embedded broker keeps 5 MiB of each partition. So the sparse rows tell what the time since
    the outage costs; a day at 1,000 a second, 86 million trades, has not been measured. A partition that is
    at most 100,000 records behind is read whole, so the source passes over none of them; the engine reads
    only the bars that the windows still show. Live trades arrive meanwhile. The time runs from the connection
    of the source to the moment when each session has an answer read from a trade made since. In the reference
    the engine reads every bar (`source.backlog_policy = "wait"`).
    """
    try:
        yield from figures(run.sized(OutagePlan(), QUICK), run.threads)
    except MockUnavailable as error:
        raise MeasurementFailed(str(error)) from None


def figures(plan: OutagePlan, threads: int) -> Iterator[Figure]:
    """Of each outage."""
    for name, seconds in plan.outages.items():
        whole, _ = uvloop.run(_measure(plan, seconds, "wait", threads))
        ours, skipped = uvloop.run(_measure(plan, seconds, "skip", threads))
        setting: Setting = {
            "outage": name, "trades": plan.trades, "a second": round(plan.trades / seconds, 1),
            "sessions": plan.markets, "bars in a window": plan.window, "skipped": skipped,
        }  # fmt: skip
        yield Figure(
            "time to live answers", ours, "s", setting=setting, against="reading the whole backlog",
            reference=whole, goal=Goal(10.0, of="ours"),
        )  # fmt: skip


class Fresh:
    """A sink that waits until every session has an answer from a trade made after ``since``."""

    name = "bench"

    def __init__(self, sessions: set[str], since: int) -> None:
        self.expect(sessions, since)

    def expect(self, sessions: set[str], since: int) -> None:
        """Wait for these sessions, and answers from trades made after ``since``."""
        self._missing, self._since = sessions, since
        self.all = asyncio.Event()

    async def start(self) -> None:
        """Nothing to connect to."""

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Look at an answer."""
        message = decode_message(payload)
        if isinstance(message, Answer) and message.as_of >= self._since:
            self._missing.discard(message.session)
            if not self._missing:
                self.all.set()

    async def stop(self) -> None:
        """Nothing to close."""


async def _measure(
    plan: OutagePlan, outage_s: int, behind: Literal["wait", "skip"], threads: int
) -> tuple[float, int]:
    """Seconds to live answers of every session, and records skipped."""
    markets = instruments(plan.markets, plan.trades // plan.markets)
    with MockBroker() as broker:
        broker.create_topic(TOPIC, len(markets))
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, max_batch_size=1 << 18)
        await producer.start()
        began = time.time_ns()
        templates = []
        for number, market in enumerate(markets):
            # one second of the tape, stretched over the outage
            for trade in SyntheticTape(market, 7).second(0):
                at = began - outage_s * _S + trade.ts_event * outage_s
                await send(producer, number, trade, at)
            templates.append(trade)
        await producer.flush()
        settings = config(
            schema.ModelConfig(threads=threads),
            [replace(session_of(market), retention_records=plan.window) for market in markets],
        )
        source = schema.SourceConfig(
            kind="kafka", backlog_policy=behind, kafka=KafkaSourceConnector(broker.bootstrap, (TOPIC,))
        )
        sink = Fresh({session.name for session in settings.sessions}, began)
        settings = replace(settings, source=source, sink=schema.SinkConfig())
        gateway = make_gateway(settings, routes=[SinkRoute(sink, "answers.v1")])
        trading = asyncio.create_task(live(producer, templates))
        try:
            await gateway.start()
            connected = time.monotonic()
            async with asyncio.timeout(plan.longest_s):
                await sink.all.wait()
            took = time.monotonic() - connected
            passed_over = int(gateway.store.value("foretick_records_skipped_total", source="kafka"))
        except TimeoutError:
            raise MeasurementFailed(f"no live answers within {plan.longest_s:.0f} s") from None
        finally:
            trading.cancel()
            await asyncio.gather(trading, return_exceptions=True)
            await gateway.stop()
            with contextlib.suppress(Exception):
                await producer.stop()
    return took, passed_over


async def live(producer: AIOKafkaProducer, templates: list[Trade]) -> None:
    """A trade of each market four times a second."""
    while True:
        for number, trade in enumerate(templates):
            await send(producer, number, trade, time.time_ns())
        await asyncio.sleep(_LIVE_S)


async def send(producer: AIOKafkaProducer, number: int, trade: Trade, at: int, topic: str = TOPIC) -> None:
    """Send a trade made ``at`` this time, ns, to partition ``number``."""
    sent = replace(trade, ts_event=at, ts_recv=at)
    await producer.send(
        topic, encode(sent), trade.key.encode(), partition=number, timestamp_ms=at // 1_000_000
    )
