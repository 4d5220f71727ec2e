"""A daemon takes snapshots while it answers, and leaves its newest state when it stops."""

import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from daemon.config.schema import RecoveryConfig
from daemon.engine.build import build
from daemon.engine.snapshot_store import SavedSession
from daemon.progress import Progress
from feeds.durations import Duration
from feeds.market_data import Answer
from regions.offload.snapshot_format import Snapshot
from scheduler.interfaces import PriorityClass
from tests.kit import SECOND, START, QueueSource, inproc_config, until
from tests.kit.inproc import RunningDaemon, running


async def test_a_daemon_s_snapshots_hold_what_it_answered(state_directory: Path) -> None:
    config = inproc_config(recovery=RecoveryConfig(Duration(SECOND // 20)))
    async with running(config) as daemon:
        await daemon.advance(4)
        await until(lambda: daemon.count("snapshots_written", session="aaa") > 0)
        await daemon.advance()
        await daemon.gateway.stop()
    newest = max((state_directory / "snapshots").glob("*.snapshot"), key=lambda path: path.stat().st_mtime_ns)
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


def computed(daemon: RunningDaemon) -> int:
    """Tokens that went through the model."""
    return sum(daemon.count("batch_tokens", **{"class": each.name.lower()}) for each in PriorityClass)


async def test_a_daemon_started_again_on_its_tmpfs_answers_without_prefilling_its_windows(
    tmpfs: Path,
) -> None:
    """What systemd's file-descriptor store would be for. Nothing is written to a disk."""
    config = inproc_config(recovery=RecoveryConfig(Duration(3600 * SECOND), str(tmpfs)))
    async with running(config, QueueSource("dropping")) as daemon:
        await daemon.advance(12)
        expected = await daemon.call("ask", "aaa", "What was the highest price?", 1)
        given = daemon.state().answers_of(daemon.state().questions)
        window = daemon.state().live_tokens
        assert computed(daemon) > window
        await daemon.gateway.stop()
    async with running(config, QueueSource("dropping")) as daemon:
        assert daemon.count("snapshots_restored", session="aaa") == 1
        answer = await daemon.call("ask", "aaa", "What was the highest price?", 1)
        assert (answer.text, answer.data_version) == (expected.text, expected.data_version)
        assert 0 < daemon.count("batch_tokens", **{"class": "session"}) < window / 2
        assert daemon.count("reused_tokens", **{"class": "session"}) > window
        await answers_are_ready_again(daemon, given)
        again = sum(each.computed_tokens for each in daemon.state().answers_of(daemon.state().questions))
        assert daemon.count("batch_tokens", **{"class": "stream"}) <= again
        await daemon.gateway.stop()


async def answers_are_ready_again(daemon: RunningDaemon, given: list[Answer]) -> None:
    """Those of the newest version, before any record, with the ages that they have now; none is published."""
    state = daemon.state()
    await until(lambda: len(state.answers_of(state.questions)) == len(given))
    ready = state.answers_of(state.questions)
    kept = ("question_hash", "text", "choice", "data_version", "as_of")
    assert [[getattr(each, name) for name in kept] for each in ready] == [
        [getattr(each, name) for name in kept] for each in given
    ]
    old = (datetime.now(UTC).timestamp() - START / SECOND) * SECOND
    for each in ready:
        assert each.staleness_ns == pytest.approx(old, rel=0.01)
        assert (each.sequence, each.published_at) == (0, 0)
        assert each.epoch > given[0].epoch
    assert daemon.answers() == []
    asked = await daemon.call("ask", "aaa", ready[0].question)
    assert (asked.text, asked.cached) == (ready[0].text, True)
