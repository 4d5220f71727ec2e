"""Records a second from Kafka to bars, and what each stage does alone on the same records.

The broker is the embedded one, in this process on threads of its own; a real one would leave more of the
machine to us. It keeps 5 MiB a partition, hence one partition a market.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import uvloop
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

import ingest
from bench.figures import Figure, Goal, Setting, rate
from bench.run import MeasurementFailed, Run
from bench.stream import plane_process
from bench.stream.children import child
from bench.stream.flood import FloodSource
from bench.stream.trades import instruments, payloads
from daemon.config.schema import SourceConfig
from daemon.front.ingest import Ingest
from daemon.front.offsets import OffsetTracker
from feeds.codec import decode_record
from feeds.kafka import KafkaSource
from feeds.messages import DeadLetter
from feeds.mock_broker import MockBroker, MockUnavailable
from feeds.source import Source
from ingest.ring import Ring
from metrics.store import MetricStore

_WHOLE, _SOURCE, _PLANE = (
    "Kafka to bars as tokens, two processes",
    "source, not decoded",
    "data plane: ring, bars, tokens",
)
STAGES = (_WHOLE, _SOURCE, "decoding", "ingest: decode, account, pack, push", _PLANE)
"""The whole way, then each stage alone."""
_COMPUTED = "source and ingest one after the other, computed"
"""They share one thread."""
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


QUICK = Plan(records=5000, markets=4, repeats=1)
_EXPECTED = {_SOURCE: 300_000.0, _PLANE: 1_000_000.0}


class Miscounted(MeasurementFailed):
    """Records or bars are missing, or there are too many: the times mean nothing."""


def measure(run: Run) -> Iterator[Figure]:
    """Trades preloaded into the embedded broker, read by the real source and ingest, through the ring
    into the data plane in another process, to closed bars as token ids. Each stage is also measured
    alone, on the same records.
    """
    try:
        yield from figures(QUICK if run.quick else Plan())
    except MockUnavailable as error:
        raise MeasurementFailed(str(error)) from None


def figures(plan: Plan) -> Iterator[Figure]:
    """Records a second from Kafka to bars, then of each stage alone, in the order of the way."""
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
            taken, plane, alone = uvloop.run(_stages(records, symbols))
            source, whole, counted = uvloop.run(_kafka(broker.bootstrap, len(records), symbols))
            if counted != alone:
                raise Miscounted(f"Kafka to bars gave {counted} (bars, tokens), the stages alone {alone}")
            seconds.append((whole, source, decode, taken, plane))
    size = round(sum(len(payload) for _, payload in records) / len(records))
    setting: Setting = {
        "trades": len(records), "bytes of JSON": size, "partitions": len(symbols), "bars": alone[0],
        "tokens": alone[1],
    }  # fmt: skip
    yield from staged(dict(zip(STAGES, zip(*seconds, strict=True), strict=True)), len(records), setting)


def staged(seconds: Mapping[str, Sequence[float]], n: int, setting: Setting) -> Iterator[Figure]:
    """The figures of ``n`` records, from the seconds each run of each of `STAGES` took."""
    whole = rate("records a second", n, seconds[_WHOLE], "", setting={**setting, "stage": _WHOLE})
    yield replace(whole, goal=Goal(50_000, "at least", "ours"))
    alone = [rate("records a second", n, seconds[stage], "") for stage in STAGES[1:]]
    source, _, taken, _ = (figure.ours for figure in alone)
    computed = Figure("records a second", 1 / (1 / source + 1 / taken))
    for stage, figure in zip((*STAGES[1:], _COMPUTED), (*alone, computed), strict=True):
        goal = Goal(_EXPECTED[stage], "at least", "ours") if stage in _EXPECTED else None
        yield replace(
            figure,
            setting={**setting, "stage": stage},
            against="Kafka to bars",
            reference=whole.ours,
            goal=goal,
        )


def make_ingest(source: Source, ring: Ring, symbols: Sequence[str]) -> Ingest:
    """The front's ingest, one session a symbol; a malformed record ends the measurement."""

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
        await make_ingest(source, ring, symbols).run()
        taken = time.perf_counter() - began
        counted = plane_process.Counted(ring, symbols)
        started = time.monotonic_ns()
        plane = (counted.drain(len(records)) - started) / 1e9
    finally:
        ring.close()
        ring.unlink()
    return taken, plane, (counted.bars, counted.tokens)


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
            taking = asyncio.create_task(make_ingest(source, ring, symbols).run())
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
