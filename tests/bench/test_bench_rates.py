"""Measurements around a daemon carry every record, and count the same bars as the stages alone."""

import asyncio
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from bench.data import files, patterns, quality, ticks, websocket
from bench.figures import Figure
from bench.query import cached
from bench.run import SuiteRun
from bench.stream import kafka, processes
from bench.stream.flood import FloodSource, instruments, payloads
from ingest.tokens import Tokeniser

QUICK = SuiteRun(quick=True, threads=1)


def test_kafka_to_bars_counts_every_bar() -> None:
    """Two markets of four trades a second: one bar per second and market, in both measurements."""
    found = list(kafka.measure(QUICK))
    assert [f.setting["stage"] for f in found] == list(kafka.STAGES)
    assert {(f.setting["trades"], f.setting["bars"]) for f in found} == {(800, 200)}
    assert all(f.ours > 0 for f in found)
    assert [f.against for f in found] == [against for against, _ in kafka.STAGES.values()]
    assert all(f.ratio for f in found if f.against)


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_files_to_bars_read_every_record() -> None:
    found = list(files.measure(QUICK))
    assert [(f.setting["file"], f.setting["trades"]) for f in found] == [("Parquet", 4000), ("DBN", 4000)]
    assert all(f.ours > 0 and f.ratio for f in found)


def test_frames_of_a_stream_to_bars() -> None:
    (found,) = websocket.measure(QUICK)
    assert found.ours > 0
    assert found.ratio


@pytest.mark.rotated(3, "benchmarks in their smallest size")
async def test_sessions_of_patterns_are_opened_and_answered_from_a_small_pool() -> None:
    plan = patterns.PatternsPlan((2,), 2, 5)
    found, opened_s, level_s, megabytes = await patterns.measure_one(
        plan, 2, "by pattern, small pool", threads=1
    )
    assert found.took_ns
    assert 0 < found.answered <= 1
    assert opened_s > 0
    assert level_s > 0
    assert megabytes > 100


async def test_the_flood_waits_until_it_is_let_in() -> None:
    """The first part arrives at once, the rest only after opening, in order and complete."""
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
    assert [(message.payload, message.offset) for message in seen] == [
        (payload, offset) for offset, (_, payload) in enumerate(records)
    ]
    assert source.dry


def fails(pipe: Connection) -> None:
    raise SystemExit(1)


def test_a_child_that_does_not_get_ready_is_an_error() -> None:
    """Its death before "ready" raises at once."""
    with pytest.raises(EOFError), processes.child(fails):
        pass


def test_the_stand_in_tokenizer_takes_the_fast_path() -> None:
    """Otherwise the data plane would be measured on its slow path."""
    assert Tokeniser(processes.encode).fast


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_hits_come_from_the_cache_of_a_real_gateway() -> None:
    """Gateway, engine and client are three processes; every ask of an idle session is a hit."""
    found = list(cached.hits(QUICK))

    def values(name: str) -> Iterator[Figure]:
        return (f for f in found if f.name == name)

    idle, others, own = values("hits")
    assert (idle.ours > 0, others.ours > 0) == (True, True)
    assert [f.ours for f in values("computed asks")][:2] == [0, 0]
    hit, latest = next(values("hit P50")), list(values("latest answer P50"))
    assert hit.n == latest[0].n == idle.ours
    assert hit.against == "bare echo"
    assert latest[2].setting == own.setting
    assert latest[2].n > 0


def test_the_rules_have_a_cost_and_a_silent_feed_is_flagged() -> None:
    cost, flag = quality.measure(QUICK)
    assert (cost.ours > 0, cost.ratio is not None, cost.n) == (True, True, 1)
    assert flag.ours >= flag.reference == 1000


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_every_tick_is_taken_and_bars_are_answered_in_both_conditions() -> None:
    found = list(ticks.measure(QUICK))
    assert [f.setting["prompts"] for f in found if f.name == "bars answered"] == ["none", "2 clients"]
    assert all(f.ours > 0 for f in found if f.name in ("tick to answer P50", "bars answered"))
    assert [f.against for f in found if f.name == "tick to answer P50"] == ["", "without prompts"]
