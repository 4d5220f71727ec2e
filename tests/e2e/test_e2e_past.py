"""What a session keeps of its versions is there again when the daemon starts again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from daemon.api.messages import VersionsReply
from daemon.config.schema import Config, RecoveryConfig
from feeds.durations import Duration
from tests.kit import SECOND, QueueSource, inproc_config, until
from tests.kit.inproc import RunningDaemon, Tape, running

HOUR = Duration(3600 * SECOND)


def config(interval: Duration = HOUR) -> Config:
    return inproc_config(recovery=RecoveryConfig(interval))


async def versions(daemon: RunningDaemon) -> VersionsReply:
    found = await daemon.call("versions", "aaa")
    assert isinstance(found, VersionsReply)
    return found


def said(reply: VersionsReply) -> list[tuple[object, ...]]:
    """Of each version: number, event time, close, and answers, of which the newest may have come again."""
    return [
        (each.data_version, each.as_of, each.close, {answer.question: answer.text for answer in each.answers})
        for each in reply.versions
    ]


def modes(directory: Path) -> list[int]:
    """Who may do what with each file."""
    return [each.stat().st_mode & 0o777 for each in directory.rglob("*.past")]


def overwrite(file: Path, content: bytes) -> None:
    file.write_bytes(content)


async def ran(tape: Tape, bars: int) -> VersionsReply:
    """What a daemon has of these bars, which it answered and then stopped."""
    async with running(config(), QueueSource("dropping"), tape) as daemon:
        await daemon.advance(bars)
        found = await versions(daemon)
        await daemon.gateway.stop()
    return found


async def test_the_past_goes_on_from_where_the_daemon_stopped(state_directory: Path) -> None:
    """Prices, answers and all that was said of them."""
    tape = Tape("V:AAA")
    before = await ran(tape, 5)
    assert [len(each.answers) for each in before.versions] == [6] * 5
    async with running(config(), QueueSource("dropping"), tape) as daemon:
        again = await versions(daemon)
        assert said(again) == said(before)
        assert again.versions[:4] == before.versions[:4]
        assert again.revision > before.revision
        daemon.feed(2)  # the bar that was open may be lost: this source cannot read it again
        await until(lambda: daemon.answered("aaa", 6), 60)
        await daemon.advance()
        found, newest = await versions(daemon), daemon.state().version
        assert [each.data_version for each in found.versions] == [*range(1, newest + 1)]
        assert said(found)[:5] == said(before)
        assert len(found.versions[-1].answers) == 6
        news = await daemon.call("versions", "aaa", again.revision)
        changed = {each.data_version for each in news.versions}
        assert {*range(6, newest + 1)} <= changed <= {*range(5, newest + 1)}
        await daemon.gateway.stop()
    assert modes(state_directory) == [0o600]


@pytest.mark.parametrize("content", [b"", b"\x92\x01", msgspec.msgpack.encode([1, [b"?"]])])
async def test_a_file_that_cannot_be_read_costs_the_past_alone(
    state_directory: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    tape = Tape("V:AAA")
    await ran(tape, 2)
    overwrite(state_directory / "snapshots" / "aaa.past", content)
    async with running(config(), QueueSource("dropping"), tape) as daemon:
        assert (await versions(daemon)).versions == ()
        assert "aaa: what was answered before is not known" in caplog.text
        daemon.feed(2)
        await until(lambda: daemon.answered("aaa", 3), 60)
        assert (await versions(daemon)).versions[0].data_version == 3
        await daemon.gateway.stop()


async def test_without_recovery_nothing_is_written(state_directory: Path) -> None:
    async with running(config(Duration(0))) as daemon:
        await daemon.advance()
        await daemon.gateway.stop()
    assert modes(state_directory) == []
