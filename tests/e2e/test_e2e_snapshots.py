"""A daemon takes snapshots while it answers, and leaves its newest state when it stops."""

from __future__ import annotations

from pathlib import Path

import msgspec

from daemon.config.schema import RecoveryConfig
from daemon.engine.build import build
from daemon.engine.recovery import SessionState
from daemon.progress import Progress
from feeds.durations import Duration
from regions.offload.disk import Snapshot
from tests.e2e.inproc import Tape, answers, count, running
from tests.e2e.support import SECOND, START, MemorySink, QueueSource, inproc_config, until


async def test_a_daemon_s_snapshots_hold_what_it_answered(state_directory: Path) -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(recovery=RecoveryConfig(Duration(SECOND // 20)))
    async with running(config, source, sink) as front:
        for n in range(5):
            source.put(tape.second(n))
            await until(lambda n=n: len(answers(sink)) == 6 * n)
        await until(lambda: count(front, "snapshots_written", session="aaa") > 0)
        source.put(tape.second(5))
        await until(lambda: len(answers(sink)) == 30)
        await front.stop()
    newest = max((state_directory / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    snapshot = Snapshot.open(newest)
    state = msgspec.msgpack.decode(snapshot.header.owner, type=SessionState)
    assert (snapshot.header.state.version, state.bars) == (5, 5)
    assert state.closed == (START + 4 * SECOND,)
    assert not state.has_log  # a queue is not read again
    built = build(config, {"aaa": Progress(1, 5, 30, state.closed)})
    assert built.tapes["aaa"].version == 5
    assert built.tapes["aaa"].state.records == snapshot.header.state.records
