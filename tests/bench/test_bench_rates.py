"""Throughput measurements carry every record, count the same bars as the stages alone, and notice loss."""

from __future__ import annotations

import asyncio

import pytest

from bench import hits, kafka_rate, plane_process, ring_rate
from bench.children import child
from bench.flood import FloodSource
from bench.trades import instruments, payloads
from ingest.tokens import Tokeniser


def test_kafka_to_bars_counts_every_bar() -> None:
    """Two markets of four trades a second: as many bars as seconds and markets, on both ways."""
    found = kafka_rate.run(kafka_rate.Plan(records=800, markets=2, repeats=1))
    assert found.bars == 200
    assert found.whole.n == 800
    assert all(
        rate.median > 0 for rate in (found.whole, found.source, found.decode, found.intake, found.plane)
    )
    assert found.predicted < min(found.source.median, found.intake.median)


def test_the_ring_and_the_queue_carry_everything() -> None:
    """Both sides are checked by what arrived; every way reports as many runs as asked for."""
    found = ring_rate.run(ring_rate.Plan(records=70_000, batched=2000, queued=20, repeats=2))
    ways = (found.ring, found.queue, found.queue_batched, found.copied)
    assert [len(way.per_second) for way in ways] == [2, 2, 2, 2]
    assert found.ring.n == 70_000 // found.batch * found.batch


def test_a_record_too_few_fails_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="adds up to 3"):
        ring_rate._check(3, 4)


def test_a_child_that_does_not_get_ready_is_an_error() -> None:
    """Its death before "ready" raises at once."""
    with pytest.raises(EOFError), child(plane_process.pops, "no-such-ring", 1):
        pass


def test_the_stand_in_tokenizer_takes_the_fast_path() -> None:
    """Otherwise the plane would be measured on its slow way."""
    assert Tokeniser(plane_process.encode).fast


async def test_the_flood_waits_until_it_is_let_in() -> None:
    """The first part comes at once, the rest only once opened, in order and complete."""
    records = payloads(instruments(1, 4), 20)
    source = FloodSource(records[:4], records[4:], batch=3)
    batches = source.batches()
    seen = list(await anext(batches))
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    source.open()
    seen += await waiting
    async for batch in batches:
        assert len(batch) <= 3
        seen += batch
    assert [message.payload for message in seen] == [payload for _, payload in records]
    assert [message.offset for message in seen] == list(range(len(records)))
    assert source.dry


def test_hits_come_from_the_cache_of_a_real_front() -> None:
    """Front, engine and client are three processes; with a still session every ask is a hit."""
    found = hits.run(hits.Plan(threads=(1,), seconds=1.0, records=100_000, batch=500))
    idle, others, own = found.conditions
    assert (idle.hit_share, others.hit_share) == (1.0, 1.0)
    assert idle.hits is not None
    assert idle.hits.n == idle.latest.n == idle.echo.n
    assert idle.versions_per_second == 0
    assert others.versions_per_second > 0
    assert own.latest.n > 0
