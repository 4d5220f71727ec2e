"""What the rules about feeds cost, and how soon a silent feed is flagged."""

import asyncio
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import uvloop
from numba import njit

import ingest
from bench.figures import Figure, Goal
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import FloodSource, instruments, payloads
from bench.stream.kafka import make_ingest
from bench.stream.processes import Counted, new_ring
from feeds import columns
from feeds.codec import encode
from feeds.decimals import parse_fixed
from feeds.market_data import Trade
from feeds.quality import silence
from feeds.quality.silence import SilenceMonitor
from feeds.source import Incoming
from ingest.bars import BarPolicy
from ingest.feed_rules import QUALITY, judge, repeats
from ingest.record import RECORD, Records
from lab.queued_source import QueuedSource

COST, SOON = Goal(0.05), Goal(1.3)
_BATCH = 2000
_MS = 1_000_000


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The rules and the learning of gaps alone, on trades of 16 symbols, each as if it had no id, which costs
    most; beside all of intake in one process: decoding, accounting, packing, ring, bars and tokens. Then a
    feed whose records come every so often, which stops: the time from its last record until an answer has the
    flag, beside three times the gap, or the floor of a second where that is more. The P99 is rounded up to a
    quarter of an octave.
    """
    trades, repeats_, gaps = run.sized((200_000, 5, (20, 500, 1000)), (800, 1, (20,)))
    ingest.warm_up()
    columns.warm_up()
    silence.warm_up()
    markets = instruments(16, 4)
    records = payloads(markets, trades)
    symbols = [market.key for market in markets]
    _rules(np.zeros(1, RECORD), np.zeros(16, QUALITY), 0, 1.0)
    rules, learning, whole = zip(
        *(uvloop.run(_costs(records, symbols)) for _ in range(repeats_)), strict=True
    )
    ours = [a + b for a, b in zip(rules, learning, strict=True)]
    shares = [a / b for a, b in zip(ours, whole, strict=True)]
    per_record = 1e9 / len(records)
    yield Figure(
        "cost of rules and silence", median(ours) * per_record, "ns a record",
        setting={"trades": len(records), "rules": round(median(rules) * per_record),
                 "silence": round(median(learning) * per_record)},
        against="intake without them", reference=median(whole) * per_record, paired=median(shares), goal=COST,
        n=repeats_, low=min(ours) * per_record, high=max(ours) * per_record,
    )  # fmt: skip
    for gap in gaps:
        took = uvloop.run(_until_silent(gap * _MS))
        expected = max(3 * gap, 1000)
        yield Figure(
            "silent feed to its flag", took / _MS, "ms", setting={"gap in ms": gap},
            against="three gaps, or the floor", reference=float(expected), goal=SOON,
        )  # fmt: skip


@njit  # type: ignore[untyped-decorator]  # numba has no types
def _rules(records: Records, states: Any, actions: int, band: float) -> int:
    found = 0
    for i in range(records.shape[0]):
        record = records[i]
        state = states[record["symbol"]]
        if not repeats(state, record):
            found += judge(state, record, record["a"], actions, band) != 0
    return found


async def _costs(records: list[tuple[str, bytes]], symbols: list[str]) -> tuple[float, float, float]:
    """CPU seconds of the rules, of learning gaps, and of intake without both."""
    source, policy = FloodSource((), records, _BATCH), BarPolicy(10**9)
    source.open()
    with new_ring(1 << (len(records) - 1).bit_length()) as ring:
        began = time.process_time()
        await make_ingest(source, ring, symbols).run()
        taken = time.process_time() - began
        rows = np.zeros(len(records), RECORD)
        if ring.pop(rows) != len(records):
            raise MeasurementFailed("the ring lacks records")
        ring.push(rows)
        counted = Counted(ring, symbols)
        began = time.process_time()
        counted.drain(len(records))
        taken += time.process_time() - began
    states, monitor = np.zeros(len(symbols), QUALITY), SilenceMonitor()
    monitor.read({symbol: number for number, symbol in enumerate(symbols)})
    began = time.process_time()
    for start in range(0, len(rows), _BATCH):
        _rules(rows[start : start + _BATCH], states, policy.actions, policy.bad_tick_band)
    rules = time.process_time() - began
    began = time.process_time()
    for start in range(0, len(rows), _BATCH):
        monitor.learn(rows[start : start + _BATCH], start + 1)
    learning = time.process_time() - began
    return rules, learning, taken - rules


async def _until_silent(gap_ns: int) -> int:
    """From the last record of a live feed until its symbol is silent, ns."""
    source, monitor, price = QueuedSource("live"), SilenceMonitor(), parse_fixed("1")

    def message(number: int, at: int) -> Incoming:
        trade = Trade(venue="V", symbol="S", ts_event=at, ts_recv=at, price=price, size=price)
        return Incoming("live", 0, number, None, encode(trade), {}, at)

    with new_ring(1024) as ring:
        decoding = asyncio.create_task(make_ingest(source, ring, ["V:S"], monitor).run())
        now = time.time_ns()
        source.put([message(n, now - (300 - n) * gap_ns) for n in range(300)])
        last = 0
        for number in range(300, 305):
            await asyncio.sleep(gap_ns / 1e9)
            source.put([message(number, time.time_ns())])
            last = time.monotonic_ns()
        deadline = last + 10 * max(3 * gap_ns, 10**9)
        while not monitor.is_silent("V:S", time.monotonic_ns(), time.time_ns()):
            if time.monotonic_ns() > deadline:
                raise MeasurementFailed("the silent feed has no flag")
            await asyncio.sleep(0.001)
        took = time.monotonic_ns() - last
        await source.stop()
        await decoding
    return took
