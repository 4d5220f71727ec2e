"""Idle sessions through the whole daemon: they are offloaded to disk, and answers continue unchanged."""

from __future__ import annotations

from pathlib import Path

from daemon.config.schema import PoolConfig
from feeds.durations import Duration
from tests.kit import MemorySink, QueueSource, inproc_config, until
from tests.kit.inproc import Tape, answers, running


def names(directory: Path) -> list[str]:
    return [file.name for file in directory.glob("*/*")]


async def test_an_idle_session_is_offloaded_to_disk_and_restored_with_the_next_bar(tmp_path: Path) -> None:
    """Nothing is computed again: the answers reuse the whole tape; a clean stop loses nothing."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    pool = PoolConfig(idle_spill=Duration(100_000_000), spill_dir=str(tmp_path))
    async with running(inproc_config(pool=pool), source, sink) as gateway:
        for n in range(5):
            source.put(tape.second(n))
            await until(lambda n=n: len(answers(sink)) == 6 * n)
        await until(lambda: names(tmp_path) == ["aaa.kv"], what="the idle session leaving")
        source.put(tape.second(5))
        await until(lambda: len(answers(sink)) == 30, what="the next bar's answers")
        await until(lambda: gateway.store.value("foretick_restores_total", outcome="disk") > 0)
        found = [a for a in answers(sink) if a.question == "trend"]
        assert [a.data_version for a in found] == [1, 2, 3, 4, 5]
        reused = [a.reused_tokens for a in found]
        assert reused == sorted(set(reused))  # grows with every bar
        assert gateway.store.value("foretick_integrity_failures_total") == 0
        assert await gateway.stop()
    assert source.committed == {("md.trades.v1", 0): 20}
