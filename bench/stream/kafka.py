"""Records per second from Kafka to bars, and from each stage alone on the same records.

The broker is the embedded one, on threads of this process; a real one would leave us more of the machine. It
keeps 5 MiB per partition, hence one partition per market.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from msgspec.structs import replace

import ingest
from bench.data.broker import TOPIC, embedded_broker
from bench.figures import Figure, Goal, Setting, median_ratio, rate
from bench.run import MeasurementFailed, SuiteRun
from bench.stream import processes
from bench.stream.flood import FloodSource, Records, instruments, payloads
from bench.stream.processes import Counted, child, new_ring
from daemon.config.schema import SourceConfig
from daemon.config.symbols import SymbolRoute
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.record_decoder import RecordDecoder
from feeds import columns
from feeds.kafka_source import KafkaSource
from feeds.market_data import DeadLetter
from feeds.payloads.payload_decoder import PayloadDecoder, WireDecoder
from feeds.quality.silence import SilenceMonitor
from feeds.source import Source
from ingest.ring import Ring
from metrics.store import MetricStore

_IN_TURN, _BARE = "source, then ingest", "bare aiokafka"
STAGES = {
    "Kafka to bars as tokens, two processes": (_IN_TURN, Goal(0.9, "at least")),
    "source, not decoded": (_BARE, Goal(0.75, "at least")),
    "ingest: decode, account, pack, push": ("", None),
    "data plane: ring, bars, tokens": (_IN_TURN, Goal(1.0, "at least")),
}
"""The whole path, then each stage alone; the reference of each, and the goal of its ratio.

Source and ingest share the gateway's thread, so the path is at best as fast as they are in turn. The data
plane, in the engine's process, must not be what limits it.
"""
_BATCH = 2000
_DEFAULTS = SourceConfig()
_DEADLINE_S = 120.0
_source = partial(KafkaSource, "kafka", topics=[TOPIC], group=None, max_records=_BATCH)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Trades preloaded into the embedded broker, read by the real source and ingest, through the ring
    into the data plane in another process, to closed bars as token ids. Each stage is also measured
    alone, on the same records. *Bare aiokafka* is the library's consumer, which drops what it is given;
    *source, then ingest* are the two stages one after the other.
    """
    trades, markets, repeats = run.sized((200_000, 16, 3), (800, 2, 1))
    ingest.warm_up()
    columns.warm_up()
    synthetic = instruments(markets, 4)
    records = payloads(synthetic, trades)
    symbols = [market.key for market in synthetic]
    seconds: list[tuple[float, ...]] = []
    with embedded_broker(len(symbols)) as broker:
        uvloop.run(_preload(broker, records, symbols))
        for _ in range(repeats):
            taken, plane, alone = uvloop.run(_stages(records, symbols))
            bare = uvloop.run(_bare(broker, len(records)))
            source = uvloop.run(_source_alone(broker, len(records)))
            took, counted = uvloop.run(_whole(broker, len(records), symbols))
            if counted != alone:
                raise MeasurementFailed(
                    f"bars and tokens: {counted} from Kafka, {alone} from the stages alone"
                )
            seconds.append((took, source, taken, plane, bare, source + taken))
    size = round(sum(len(payload) for _, payload in records) / len(records))
    setting: Setting = {
        "trades": len(records), "bytes of JSON": size, "partitions": len(symbols), "bars": alone[0],
        "tokens": alone[1],
    }  # fmt: skip
    *stages, bare_s, in_turn_s = zip(*seconds, strict=True)
    references = {_BARE: bare_s, _IN_TURN: in_turn_s}
    for (stage, (against, goal)), took_s in zip(STAGES.items(), stages, strict=True):
        figure = rate("records a second", len(records), took_s, "")
        compared: dict[str, Any] = {}
        if against:
            other_s = references[against]
            paired, reference = median_ratio(other_s, took_s), rate("", len(records), other_s, "").ours
            compared = {"against": against, "reference": reference, "paired": paired}
        yield replace(figure, setting={**setting, "stage": stage}, goal=goal, **compared)


def make_ingest(
    source: Source,
    ring: Ring,
    symbols: Sequence[str],
    silence: SilenceMonitor | None = None,
    payloads: PayloadDecoder | None = None,
) -> RecordDecoder:
    """The gateway's ingest, one session per symbol; a malformed record ends the measurement."""

    def refuse(dead_letter: DeadLetter) -> None:
        raise RuntimeError(f"a synthetic record was refused: {dead_letter.error}")

    return RecordDecoder(
        source,
        ring,
        {symbol: SymbolRoute(i, (symbol,)) for i, symbol in enumerate(symbols)},
        OffsetTracker(),
        MetricStore.local({"session": list(symbols), "source": [source.name]}),
        refuse,
        payloads=payloads or WireDecoder(_DEFAULTS.max_message_bytes),
        max_ahead_ns=_DEFAULTS.max_ahead,
        silence=silence,
    )


async def _stages(records: Records, symbols: list[str]) -> tuple[float, float, tuple[int, int]]:
    """Ingest from memory into a ring that holds everything, then the data plane over it, with counts."""
    source = FloodSource((), records, _BATCH)
    source.open()
    with new_ring(1 << (len(records) - 1).bit_length()) as ring:
        began = time.perf_counter()
        await make_ingest(source, ring, symbols).run()
        taken = time.perf_counter() - began
        counted = Counted(ring, symbols)
        started = time.monotonic_ns()
        plane = (counted.drain(len(records)) - started) / 1e9
    return taken, plane, (counted.bars, counted.tokens)


async def _preload(bootstrap: str, records: Records, symbols: list[str]) -> None:
    """Every market's records into its own partition."""
    partition = {symbol: i for i, symbol in enumerate(symbols)}
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=1 << 18)
    await producer.start()
    try:
        for key, payload in records:
            await producer.send(TOPIC, payload, key.encode(), partition=partition[key])
        await producer.flush()
    finally:
        await producer.stop()


async def _source_alone(bootstrap: str, total: int) -> float:
    source, seen = _source(bootstrap=bootstrap), 0
    began = time.perf_counter()
    await source.start()
    async with asyncio.timeout(_DEADLINE_S):
        async for batch in source.batches():
            seen += len(batch)
            if seen >= total:
                break
    took = time.perf_counter() - began
    await source.stop()
    if seen != total:
        raise MeasurementFailed(f"the source gave {seen} records of {total}")
    return took


async def _bare(bootstrap: str, total: int) -> float:
    """Seconds in which aiokafka's own consumer gives ``total`` records."""
    consumer, seen = AIOKafkaConsumer(TOPIC, bootstrap_servers=bootstrap, auto_offset_reset="earliest"), 0
    began = time.perf_counter()
    await consumer.start()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            while seen < total:
                seen += sum(map(len, (await consumer.getmany(timeout_ms=200, max_records=_BATCH)).values()))
        return time.perf_counter() - began
    finally:
        await consumer.stop()


async def _whole(bootstrap: str, total: int, symbols: list[str]) -> tuple[float, tuple[int, int]]:
    source = _source(bootstrap=bootstrap)
    with new_ring(_DEFAULTS.ring_capacity) as ring, child(processes.bars, ring.name, symbols, total) as pipe:
        began = time.monotonic_ns()
        await source.start()
        taking = asyncio.create_task(make_ingest(source, ring, symbols).run())
        finished = asyncio.create_task(asyncio.to_thread(pipe.recv))
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.wait([taking, finished], return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                taking.result()
            ended, bars, tokens = await finished
        await source.stop()
        await taking
    return (ended - began) / 1e9, (bars, tokens)
