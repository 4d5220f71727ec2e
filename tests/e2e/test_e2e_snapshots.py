"""A daemon takes snapshots while it answers, and leaves its newest state when it stops."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from daemon.config.schema import RecoveryConfig
from daemon.engine.build import build
from daemon.engine.snapshot_store import SavedSession
from daemon.gateway.gateway import Gateway
from daemon.progress import Progress
from feeds.durations import Duration
from regions.offload.snapshot_format import Snapshot
from scheduler.interfaces import PriorityClass
from tests.kit import SECOND, START, MemorySink, QueueSource, inproc_config, until
from tests.kit.inproc import Tape, answers, ask_gateway, count, running


async def test_a_daemon_s_snapshots_hold_what_it_answered(state_directory: Path) -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(recovery=RecoveryConfig(Duration(SECOND // 20)))
    async with running(config, source, sink) as gateway:
        for n in range(5):
            source.put(tape.second(n))
            await until(lambda n=n: len(answers(sink)) == 6 * n)
        await until(lambda: count(gateway, "snapshots_written", session="aaa") > 0)
        source.put(tape.second(5))
        await until(lambda: len(answers(sink)) == 30)
        await gateway.stop()
    newest = max((state_directory / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    snapshot = Snapshot.open(newest)
    state = msgspec.msgpack.decode(snapshot.header.owner, type=SavedSession)
    assert (snapshot.header.state.version, state.bars) == (5, 5)
    assert state.closed == (START + 4 * SECOND,)
    assert not state.has_log  # a queue is not read again
    built = build(config, {"aaa": Progress(1, 5, 30, state.closed)})
    assert built.tapes["aaa"].version == 5
    assert built.tapes["aaa"].state.records == snapshot.header.state.records


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A directory in memory, as the service manager's runtime directory is."""
    mounts = [line.split()[1:4] for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [Path(at) for at, kind, how in mounts if kind == "tmpfs" and "rw" in how.split(",")]
    writable = next((each for each in found if os.access(each, os.W_OK | os.X_OK)), None)
    if writable is None:
        pytest.skip("no tmpfs to write to")
    with tempfile.TemporaryDirectory(prefix="foretick-", dir=writable) as folder:
        yield Path(folder) / "snapshots"


def computed(gateway: Gateway) -> int:
    """Tokens that went through the model."""
    return sum(count(gateway, "batch_tokens", **{"class": each.name.lower()}) for each in PriorityClass)


async def test_a_daemon_started_again_on_its_tmpfs_answers_without_prefilling_its_windows(
    tmpfs: Path,
) -> None:
    """What systemd's file-descriptor store would be for. Nothing is written to a disk."""
    config = inproc_config(recovery=RecoveryConfig(Duration(3600 * SECOND), str(tmpfs)))
    tape, source, sink = Tape("V:AAA"), QueueSource("dropping"), MemorySink()
    async with running(config, source, sink) as gateway:
        for n in range(13):
            source.put(tape.second(n))
            await until(lambda n=n: len(answers(sink)) == 6 * n)
        expected = await ask_gateway(gateway, "ask", "aaa", "What was the highest price?", 1)
        window = gateway.sessions.states["aaa"].live_tokens
        assert computed(gateway) > window
        await gateway.stop()
    async with running(config, QueueSource("dropping"), MemorySink()) as gateway:
        assert count(gateway, "snapshots_restored", session="aaa") == 1
        answer = await ask_gateway(gateway, "ask", "aaa", "What was the highest price?", 1)
        assert (answer.text, answer.data_version) == (expected.text, expected.data_version)
        question = computed(gateway)
        assert 0 < question < window / 2
        assert count(gateway, "reused_tokens", **{"class": "session"}) > window
        await gateway.stop()
