"""Records a second from Kafka to bars, and what each stage does alone on the same records.

The broker is the embedded one, in this process on threads of its own; a real one would leave more of the
machine to us. It keeps 5 MiB a partition, hence one partition a market.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import uvloop
from aiokafka import AIOKafkaProducer

import ingest
from bench import plane_process
from bench.children import child
from bench.figures import Rates, rates
from bench.flood import FloodSource
from bench.trades import instruments, payloads
from daemon.config.schema import SourceConfig
from daemon.front.ingest import Ingest
from daemon.front.offsets import OffsetTracker
from feeds.codec import decode_record
from feeds.kafka import KafkaSource
from feeds.messages import DeadLetter
from feeds.mock_broker import MockBroker
from feeds.source import Source
from ingest.ring import Ring
from metrics.store import MetricStore

TOPIC = "md.trades.v1"
BATCH = 2000
_DEFAULTS = SourceConfig()
_DEADLINE_S = 120.0

Records = Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class Plan:
    """How many trades, of how many markets, and how often."""

    records: int = 200_000
    markets: int = 16
    repeats: int = 3


class KafkaRate(msgspec.Struct, frozen=True):
    """``whole``: Kafka to bars in two processes. ``alone``: by stage, in the order of the way."""

    markets: int
    bytes_a_record: float
    bars: int
    tokens: int
    whole: Rates
    source: Rates
    decode: Rates
    intake: Rates
    plane: Rates

    @property
    def predicted(self) -> float:
        """Records a second if source and intake, which share one thread, are all that takes time."""
        return 1 / (1 / self.source.median + 1 / self.intake.median)


class Miscounted(RuntimeError):
    """Records or bars are missing, or there are too many: the times mean nothing."""


def run(plan: Plan) -> KafkaRate:
    """Measure. Raises Miscounted, MockUnavailable."""
    ingest.warm_up()
    markets = instruments(plan.markets, 4)
    records = payloads(markets, plan.records)
    symbols = [f"{market.venue}:{market.symbol}" for market in markets]
    seconds: list[tuple[float, ...]] = []
    with MockBroker() as broker:
        broker.create_topic(TOPIC, len(symbols))
        uvloop.run(_preload(broker.bootstrap, records, symbols))
        for _ in range(plan.repeats):
            decode = _decode(records)
            intake, plane, alone = uvloop.run(_stages(records, symbols))
            source, whole, counted = uvloop.run(_kafka(broker.bootstrap, len(records), symbols))
            if counted != alone:
                raise Miscounted(f"Kafka to bars gave {counted} (bars, tokens), the stages alone {alone}")
            seconds.append((whole, source, decode, intake, plane))
    size = sum(len(payload) for _, payload in records) / len(records)
    stages = (rates(len(records), took) for took in zip(*seconds, strict=True))
    return KafkaRate(len(symbols), size, *alone, *stages)


def make_intake(source: Source, ring: Ring, symbols: Sequence[str]) -> Ingest:
    """The front's intake, one session a symbol; a malformed record ends the measurement."""

    def refuse(letter: DeadLetter) -> None:
        raise RuntimeError(f"a synthetic record was refused: {letter.error}")

    return Ingest(
        source,
        ring,
        {symbol: (i, symbol) for i, symbol in enumerate(symbols)},
        OffsetTracker(),
        MetricStore.local({"session": list(symbols), "source": [source.name]}),
        refuse,
        max_bytes=_DEFAULTS.max_message_bytes,
        max_ahead_ns=_DEFAULTS.max_ahead,
    )


def _decode(records: Records) -> float:
    began = time.perf_counter()
    for _, payload in records:
        decode_record(payload, "json", _DEFAULTS.max_message_bytes)
    return time.perf_counter() - began


async def _stages(records: Records, symbols: list[str]) -> tuple[float, float, tuple[int, int]]:
    """Ingest from memory into a ring that holds it all, then the data plane over that ring, with counts."""
    ring = Ring.create(1 << (len(records) - 1).bit_length())
    source = FloodSource((), records, BATCH)
    source.open()
    try:
        began = time.perf_counter()
        await make_intake(source, ring, symbols).run()
        intake = time.perf_counter() - began
        counted = plane_process.Counted(ring, symbols)
        started = time.monotonic_ns()
        plane = (counted.drain(len(records)) - started) / 1e9
    finally:
        ring.close()
        ring.unlink()
    return intake, plane, (counted.bars, counted.tokens)


async def _kafka(bootstrap: str, total: int, symbols: list[str]) -> tuple[float, float, tuple[int, int]]:
    async with asyncio.timeout(_DEADLINE_S):
        alone = await _source_alone(bootstrap, total)
        whole, counted = await _whole(bootstrap, total, symbols)
    return alone, whole, counted


async def _preload(bootstrap: str, records: Records, symbols: list[str]) -> None:
    """Every market's records into its own partition."""
    partition = {symbol: i for i, symbol in enumerate(symbols)}
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=1 << 18)
    await producer.start()
    try:
        batches = [producer.create_batch() for _ in symbols]
        for key, payload in records:
            number = partition[key]
            if batches[number].append(key=key.encode(), value=payload, timestamp=None) is None:
                await producer.send_batch(batches[number], TOPIC, partition=number)
                batches[number] = producer.create_batch()
                batches[number].append(key=key.encode(), value=payload, timestamp=None)
        for number, batch in enumerate(batches):
            await producer.send_batch(batch, TOPIC, partition=number)
        await producer.flush()
    finally:
        await producer.stop()


def _source(bootstrap: str) -> KafkaSource:
    return KafkaSource("kafka", bootstrap, [TOPIC], None, max_records=BATCH)


async def _source_alone(bootstrap: str, total: int) -> float:
    source = _source(bootstrap)
    began = time.perf_counter()
    await source.start()
    seen = 0
    async for batch in source.batches():
        seen += len(batch)
        if seen >= total:
            break
    ended = time.perf_counter()
    await source.stop()
    if seen != total:
        raise Miscounted(f"the source gave {seen} records of {total}")
    return ended - began


async def _whole(bootstrap: str, total: int, symbols: list[str]) -> tuple[float, tuple[int, int]]:
    ring = Ring.create(_DEFAULTS.ring_capacity)
    source = _source(bootstrap)
    try:
        with child(plane_process.bars, ring.name, symbols, total) as pipe:
            began = time.monotonic_ns()
            await source.start()
            taking = asyncio.create_task(make_intake(source, ring, symbols).run())
            finished = asyncio.create_task(asyncio.to_thread(pipe.recv))
            await asyncio.wait([taking, finished], return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                taking.result()
            ended, bars, tokens = await finished
            await source.stop()
            await taking
    finally:
        ring.close()
        ring.unlink()
    return (ended - began) / 1e9, (bars, tokens)
