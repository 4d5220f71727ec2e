"""From tick to answer through a real Kafka, with both deliveries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from msgspec.structs import replace

from bench.data.outage import TOPIC, send
from bench.figures import Figure, Goal, Setting, latency
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config, session_of
from daemon.config import schema
from daemon.gateway.wiring import make_gateway
from feeds.codec import decode_message
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.durations import Duration
from feeds.market_data import Answer, Trade
from feeds.synthetic import Instrument, SyntheticTape

_S = 1_000_000_000
_TICK_S = 0.05
DELIVERIES = ("at_least_once", "exactly_once")


@dataclass(frozen=True)
class DeliveryPlan:
    """``bars``: of one second in each window. ``seconds``: of each turn, after ``settle_s``."""

    markets: int = 4
    bars: int = 64
    seconds: float = 30.0
    settle_s: float = 5.0
    turns: int = 2
    longest_s: float = 60.0


QUICK = DeliveryPlan(markets=1, bars=4, seconds=3.0, settle_s=1.0, turns=1)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model reads four markets, 20 trades a second each, from the
    Kafka that `--broker` names, and answers six questions a session to a topic of it. The time runs from the
    trade that closes a bar, when it is given to the producer, to each answer, when a reader of committed
    messages has it; producer and reader share the gateway's process. Both deliveries take turns.
    """
    if not run.broker:
        raise MeasurementFailed("name a Kafka with --broker HOST:PORT: the embedded one has no transactions")
    return figures(run.sized(DeliveryPlan(), QUICK), run.broker, run.threads)


def figures(plan: DeliveryPlan, broker: str, threads: int) -> Iterator[Figure]:
    """Exactly once beside at least once."""
    took: dict[str, list[int]] = {delivery: [] for delivery in DELIVERIES}
    for turn in range(plan.turns):
        for delivery in DELIVERIES[:: -1 if turn % 2 else 1]:
            took[delivery] += uvloop.run(_measure(plan, broker, delivery, threads))
    setting: Setting = {"sessions": plan.markets, "bars in a window": plan.bars}
    yield from latency(
        "exactly once, tick to answer", took["exactly_once"], setting,
        against="at least once", reference_ns=took["at_least_once"], paired=False, goals={0.99: Goal(2.0)},
    )  # fmt: skip


async def _measure(plan: DeliveryPlan, broker: str, delivery: str, threads: int) -> list[int]:
    """ns from closing trades to their answers."""
    markets, name = instruments(plan.markets, plan.bars), f"bench.{time.time_ns()}"
    await create_topics(broker, {f"{name}.{TOPIC}": len(markets), name: 1})
    producer = AIOKafkaProducer(bootstrap_servers=broker)
    reader = AIOKafkaConsumer(name, bootstrap_servers=broker, isolation_level="read_committed")
    with TemporaryDirectory() as folder:
        settings = replace(
            config(
                schema.ModelConfig(threads=threads),
                [replace(session_of(market), retention_records=plan.bars) for market in markets],
            ),
            source=schema.SourceConfig(
                kind="kafka",
                backlog_policy="wait",
                kafka=KafkaSourceConnector(broker, (f"{name}.{TOPIC}",), group=name),
            ),
            sink=schema.SinkConfig(
                kafka=KafkaSinkConnector(broker, name, delivery=delivery, transactional_id=name)  # type: ignore[arg-type]  # one of `DELIVERIES`
            ),
            recovery=schema.RecoveryConfig(Duration(schema.OFF), folder),
        )
        gateway = make_gateway(settings)
        await producer.start()
        trades = Trades(producer, f"{name}.{TOPIC}", markets)
        await trades.window(plan.bars)
        await reader.start()
        trading = asyncio.create_task(trades.live())
        try:
            await gateway.start()
            async with asyncio.timeout(plan.longest_s):
                await _answers(reader, lambda answer: answer.as_of < trades.began)
            await _seen(reader, plan.settle_s)
            seen = await _seen(reader, plan.seconds)
        except TimeoutError:
            raise MeasurementFailed(f"no live answer within {plan.longest_s:.0f} s") from None
        finally:
            trading.cancel()
            await asyncio.gather(trading, return_exceptions=True)
            await gateway.stop()
            await reader.stop()
            await producer.stop()
    closed = (trades.closed.get((answer.session, answer.as_of // _S)) for _, answer in seen)
    return [at - when for (at, _), when in zip(seen, closed, strict=True) if when is not None]


class Trades:
    """Sends trades of each market to its partition, and notes when it closes which bar."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, markets: Sequence[Instrument]) -> None:
        self._producer, self._topic, self._markets = producer, topic, markets
        self._templates: list[Trade] = [next(iter(SyntheticTape(each, 7).second(0))) for each in markets]
        self._second = [0] * len(markets)
        self.began = time.time_ns()
        self.closed: dict[tuple[str, int], int] = {}
        """When, by session and second."""

    async def window(self, bars: int) -> None:
        """A trade in each of the seconds before now."""
        for number in range(len(self._markets)):
            for bar in range(bars):
                await self._send(number, self.began - (bars - bar) * _S)
        await self._producer.flush()

    async def live(self) -> None:
        """Go on until cancelled."""
        while True:
            for number in range(len(self._markets)):
                await self._send(number, time.time_ns())
            await asyncio.sleep(_TICK_S)

    async def _send(self, number: int, at: int) -> None:
        if at // _S > self._second[number]:
            self.closed[self._markets[number].symbol.lower(), self._second[number]] = time.time_ns()
            self._second[number] = at // _S
        await send(self._producer, number, self._templates[number], at, self._topic)


async def _seen(reader: AIOKafkaConsumer, seconds: float) -> list[tuple[int, Answer]]:
    """What comes within ``seconds``."""
    until = time.monotonic() + seconds
    return await _answers(reader, lambda answer: time.monotonic() < until)


async def _answers(reader: AIOKafkaConsumer, goes_on: Callable[[Answer], bool]) -> list[tuple[int, Answer]]:
    """Answers and when they came, wall clock in ns, up to the first with which it does not go on."""
    found: list[tuple[int, Answer]] = []
    async for record in reader:
        now, message = time.time_ns(), decode_message(record.value)
        if isinstance(message, Answer):
            found.append((now, message))
            if not goes_on(message):
                break
    return found


async def create_topics(broker: str, topics: dict[str, int]) -> None:
    """Create topics with ``partitions`` partitions."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, count, 1) for topic, count in topics.items()])
    finally:
        await admin.close()
