"""`foretick top` before a real daemon: what its screens show, and the command in a terminal."""

import asyncio
import os
import pty
import re
from collections.abc import AsyncIterator
from fcntl import ioctl
from struct import pack
from termios import TIOCSWINSZ

import httpx2
import pytest
import pytest_asyncio
from rich.text import Text
from textual.widgets import DataTable, Static

from daemon.top.app import SessionScreen, TopApp
from daemon.top.reader import HttpReader
from tests.kit import inproc_config
from tests.kit.daemon import FORETICK
from tests.kit.inproc import RunningDaemon, running
from tests.kit.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
_SEQUENCE = re.compile(rb"\x1b\[[0-9;?<>=$]*[a-zA-Z]")
"""What steers a terminal between two texts."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon() -> AsyncIterator[RunningDaemon]:
    async with running(inproc_config(("V:AAA", "V:BBB"))) as made:
        await made.advance(2)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def reader(daemon: RunningDaemon) -> AsyncIterator[HttpReader]:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{daemon.port}", trust_env=False) as client:
        yield HttpReader(client)


def cells(table: DataTable[Text]) -> list[list[str]]:
    return [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]


async def test_the_screens_show_what_the_daemon_does(daemon: RunningDaemon, reader: HttpReader) -> None:
    app = TopApp(reader, 0.1)
    async with app.run_test(size=(180, 50)) as pilot:
        table = app.screen.query_one("#sessions", DataTable)
        await until(lambda: table.row_count == 2)
        assert [row[:3] for row in cells(table)] == [["aaa", "V:AAA", "ok"], ["bbb", "V:BBB", "ok"]]
        version = daemon.state("aaa").version
        await daemon.advance(1)
        await until(lambda: cells(table)[0][7] == str(version + 1))
        stages, queues, feeds = (
            app.screen.query_one(f"#{name}", Static) for name in ("stages", "queues", "feeds")
        )

        def text(panel: Static) -> str:
            return "\n".join(strip.text for strip in panel.render_lines(panel.outer_size.region))

        await until(lambda: "flash" in text(queues) and "ring of" in text(feeds))
        await daemon.advance(1)
        await until(lambda: "end_to_end" in text(stages))
        await pilot.press("enter")
        screen = app.screen
        assert isinstance(screen, SessionScreen)
        newest = screen.query_one("#newest", DataTable)
        questions = [answer.question for answer in daemon.answers("aaa")[-6:]]
        await until(lambda: sorted(row[0] for row in cells(newest)) == sorted(questions))
        await until(lambda: "prefill" in text(screen.query_one("#waterfall", Static)))
        await pilot.press("q")
        await until(lambda: not app.is_running)


async def test_it_reads_a_dozen_families_and_no_series_of_sessions(
    daemon: RunningDaemon, reader: HttpReader
) -> None:
    found = await reader.poll()
    assert [each.name for each in found.sessions] == ["aaa", "bbb"]
    assert (found.reasons, found.notice) == ((), "")
    assert found.scrape.total("foretick_engine_up") == 1.0
    assert not [labels for _, labels in found.scrape.values if "session" in dict(labels)]
    assert len(await reader.answers("bbb")) == 6
    assert await reader.answers("zzz") == ()


async def test_ages_are_those_of_the_moment_where_they_are_asked_for(daemon: RunningDaemon) -> None:
    texts = [(await daemon.http("GET", "/metrics?name[]=foretick_staleness_seconds")).body for _ in range(2)]
    assert texts[0] != texts[1]
    assert all(text.count(b"\nforetick_staleness_seconds{") == 6 for text in texts)


async def test_the_command_runs_in_a_terminal(daemon: RunningDaemon) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, pack("HHHH", 50, 160, 0, 0))
    address = f"http://127.0.0.1:{daemon.port}"
    process = await asyncio.create_subprocess_exec(
        FORETICK, "top", "--http", address, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = bytearray()
    asyncio.get_running_loop().add_reader(ours, lambda: seen.extend(os.read(ours, 1 << 16)))
    try:
        await until(lambda: b"V:BBB" in _SEQUENCE.sub(b"", bytes(seen)), 60, "the second session")
        os.write(ours, b"q")
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
