"""Throughput measurements carry every record, count the same bars as the stages alone, and detect loss."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from bench.figures import Figure
from bench.stream import hits, idle, kafka, processes, ring, sessions
from bench.stream.flood import FloodSource, instruments, payloads
from ingest.tokens import Tokeniser


def test_kafka_to_bars_counts_every_bar() -> None:
    """Two markets of four trades a second: one bar per second and market, in both measurements."""
    found = list(kafka.figures(trades=800, markets=2, repeats=1))
    assert [f.setting["stage"] for f in found[:-1]] == list(kafka.STAGES)
    assert {(f.setting["trades"], f.setting["bars"]) for f in found} == {(800, 200)}
    assert all(f.ours > 0 for f in found)
    _, source, _, _, taken, _, computed = (f.ours for f in found)
    assert computed < min(source, taken), "both in one thread"
    assert found[1].reference == found[0].ours


def test_the_ring_and_the_queue_carry_everything() -> None:
    """What arrived is checked on both sides; every way reports the requested number of runs."""
    found = list(ring.figures(ring=70_000, batched=2000, queued=20, repeats=2))
    assert [f.n for f in found] == [2] * 8
    assert [f.against for f in found[::2]] == [f.name for f in found[1::2]]
    assert [f.reference for f in found[::2]] == [f.ours for f in found[1::2]]


def test_a_record_too_few_fails_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="3"):
        ring.check(3, 4)


def test_a_child_that_does_not_get_ready_is_an_error() -> None:
    """Its death before "ready" raises at once."""
    with pytest.raises(EOFError), processes.child(processes.pops, "no-such-ring", 1):
        pass


def test_the_stand_in_tokenizer_takes_the_fast_path() -> None:
    """Otherwise the data plane would be measured on its slow path."""
    assert Tokeniser(processes.encode).fast


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
    assert [message.payload for message in seen] == [payload for _, payload in records]
    assert [message.offset for message in seen] == list(range(len(records)))
    assert source.dry


def test_hits_come_from_the_cache_of_a_real_gateway() -> None:
    """Gateway, engine and client are three processes; every ask of an idle session is a hit."""
    found = list(
        hits.figures(hits.HitsPlan(threads=(1,), seconds=0.3, fill_s=0.1, records=80_000, batch=500))
    )

    def values(name: str) -> dict[str | int | float, Figure]:
        return {f.setting["condition"]: f for f in found if f.name == name}

    idle, others, own = values("hits")
    asked, computed, versions = values("hits"), values("computed asks"), values("versions a second")
    assert (asked[idle].ours > 0, asked[others].ours > 0) == (True, True)
    assert (computed[idle].ours, computed[others].ours) == (0, 0)
    assert values("hit P50")[idle].n == values("latest answer P50")[idle].n == asked[idle].ours
    assert values("hit P50")[idle].against == "bare echo"
    assert versions[idle].ours == 0
    assert versions[others].ours > 0
    assert values("latest answer P50")[own].n > 0


def test_every_bar_of_every_session_is_answered_before_the_next() -> None:
    (found,) = sessions.figures(sessions.SessionsPlan(sessions=(2,), window=3, rounds=2), threads=1)
    assert found.n == 2
    assert found.ours > 0
    assert isinstance(found.reference, float)
    assert found.setting == {"sessions": 2, "engine threads": 1}


def test_cpu_time_is_the_process_s_own() -> None:
    before = time.process_time()
    found = idle.cpu_s(os.getpid())
    assert before <= found <= time.process_time()


def test_what_a_waiting_daemon_burns_is_told_by_process_and_condition() -> None:
    found = list(idle.figures(idle.IdlePlan(sessions=2, window=3, seconds=2), threads=1))
    assert [(f.name, f.setting["condition"]) for f in found] == [
        ("CPU of the gateway", "nothing arrives"),
        ("CPU of the engine", "nothing arrives"),
        ("CPU of the gateway", "a bar a second"),
        ("CPU of the engine", "a bar a second"),
        ("CPU time a bar", "a bar a second"),
    ]
    assert all(f.ours > 0 and f.ratio is not None for f in found)
    assert found[3].ours > found[1].ours
