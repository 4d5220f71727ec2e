"""The embedded Kafka, and trades in it: a backlog, and new ones meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from bench.run import MeasurementFailed
from feeds.codec import encode
from feeds.market_data import Trade
from feeds.mock_broker import MockBroker, MockUnavailable
from feeds.synthetic import Instrument, SyntheticTape

TOPIC = "md.trades.v1"
_LIVE_S = 0.25
_S = 1_000_000_000


@contextmanager
def embedded_broker(partitions: int, *others: str) -> Iterator[str]:
    """Its bootstrap address; `TOPIC` is there, and ``others`` of one partition.

    Raises MeasurementFailed where its library is missing.
    """
    try:
        with MockBroker() as broker:
            broker.create_topic(TOPIC, partitions)
            for topic in others:
                broker.create_topic(topic, 1)
            yield broker.bootstrap
    except MockUnavailable as error:
        raise MeasurementFailed(str(error)) from None


@asynccontextmanager
async def trading(markets: Sequence[Instrument], span_s: int) -> AsyncIterator[tuple[str, int]]:
    """Each market has a partition, and a second of its trades is spread over the last ``span_s`` seconds.

    Four more trades a second follow until the end. Gives the broker's address, and when the first ones end
    (ns).
    """
    with embedded_broker(len(markets)) as bootstrap:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=1 << 18)
        await producer.start()
        began, newest = time.time_ns(), list[Trade]()
        for number, market in enumerate(markets):
            trades = list(SyntheticTape(market, 7).second(0))
            for left, trade in zip(range(len(trades), 0, -1), trades, strict=True):
                await _send(producer, number, trade, began - left * span_s * _S // len(trades))
            newest.append(trade)
        await producer.flush()
        going_on = asyncio.create_task(_go_on(producer, newest))
        try:
            yield bootstrap, began
        finally:
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)
            with suppress(Exception):
                await producer.stop()


async def _go_on(producer: AIOKafkaProducer, trades: Sequence[Trade]) -> None:
    while True:
        for number, trade in enumerate(trades):
            await _send(producer, number, trade, time.time_ns())
        await asyncio.sleep(_LIVE_S)


async def _send(producer: AIOKafkaProducer, number: int, trade: Trade, at: int) -> None:
    """Send a trade made ``at`` this time, ns, to partition ``number``."""
    sent = encode(replace(trade, ts_event=at, ts_recv=at))
    await producer.send(TOPIC, sent, trade.key.encode(), partition=number, timestamp_ms=at // 1_000_000)
