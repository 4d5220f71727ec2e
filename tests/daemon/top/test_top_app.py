"""The screens of `foretick top`, before a reader of the test: sorting, filters, one session, failures."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import DataTable, Sparkline

from daemon.top.app import MAX_ROWS, SessionScreen, TopApp
from daemon.top.reader import Unavailable
from daemon.top.scrape import parse
from daemon.top.snapshot import FAMILIES, Reading
from daemon.traces.recorded_trace import Span
from feeds.market_data import Answer
from tests.kit.top import listed_answer, session_info
from tests.kit.waiting import until

SESSIONS = (
    session_info("bbb", staleness_ns=9_000_000_000),
    session_info("aaa", silent=True, data_version=30),
    session_info("ccc", bars_waiting=2),
)
AWAY = Unavailable("no reply: connection refused")
TEXT = """
foretick_engine_up 1.0
foretick_utilisation_ratio 0.25
foretick_stage_seconds_bucket{{stage="end_to_end",le="0.25"}} {0}
foretick_stage_seconds_bucket{{stage="end_to_end",le="+Inf"}} {0}
foretick_stage_seconds_count{{stage="end_to_end"}} {0}
foretick_stage_seconds_sum{{stage="end_to_end"}} {0}
"""


class Daemon:
    """A reader whose polls end when the test says what they find."""

    def __init__(self, *answers: Answer) -> None:
        self.found = asyncio.Queue[Reading | Unavailable]()
        self.newest: Sequence[Answer] | Unavailable = answers
        self.asked: list[str] = []
        self.polls = self.running = self.max_running = 0

    async def poll(self) -> Reading:
        self.polls += 1
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            found = await self.found.get()
        finally:
            self.running -= 1
        if isinstance(found, Unavailable):
            raise found
        return found

    async def answers(self, session: str) -> Sequence[Answer]:
        self.asked.append(session)
        if isinstance(self.newest, Unavailable):
            raise self.newest
        return self.newest

    async def spans(self, answer: Answer) -> Sequence[Span]:
        if answer.question == "forgotten":
            return ()
        return (Span("queue", 0, 5_000_000), Span("forward", 5_000_000, 3_000_000))


class Shown:
    """What an app shows."""

    def __init__(self, app: TopApp, daemon: Daemon, pilot: Pilot[None]) -> None:
        self.app, self.daemon, self.pilot = app, daemon, pilot
        self._found = 0

    async def find(self, *found: Reading | Unavailable) -> None:
        """Let polls find this, and wait until it is shown."""
        for each in found:
            self._found += 1
            self.daemon.found.put_nowait(each)
            await until(lambda: self.daemon.polls > self._found)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    def widget(self, name: str) -> Widget:
        return self.app.screen.query_one(f"#{name}")

    def text(self, name: str) -> str:
        """Of a widget, with its border."""
        widget = self.widget(name)
        return "\n".join(strip.text.strip() for strip in widget.render_lines(widget.outer_size.region))

    @property
    def table(self) -> DataTable[Any]:
        return self.app.screen.query_one(DataTable)

    @property
    def names(self) -> list[str]:
        """The first cells of the table's rows."""
        return [str(self.table.get_row_at(row)[0]) for row in range(self.table.row_count)]

    @property
    def at_cursor(self) -> str:
        return self.names[self.table.cursor_row]


@asynccontextmanager
async def running(*answers: Answer, size: tuple[int, int] = (160, 50)) -> AsyncIterator[Shown]:
    """The app, which pauses little between polls."""
    daemon = Daemon(*answers)
    app = TopApp(daemon, 0.02, "http://d:7800")
    async with app.run_test(size=size) as pilot:
        yield Shown(app, daemon, pilot)


def reading(at: float, answered: int = 0, **members: Any) -> Reading:
    return Reading(at, SESSIONS, parse(TEXT.format(answered), FAMILIES), **members)


async def test_sessions_are_shown_with_what_the_daemon_says_of_itself() -> None:
    async with running() as shown:
        assert shown.text("status") == "connecting"
        await shown.find(reading(1.0))
        assert shown.names == ["aaa", "bbb", "ccc"]
        assert shown.text("status") == "http://d:7800 | ready | engine up, 25% busy"
        assert "3 of 3 sessions by session" in str(shown.table.border_title)
        await shown.find(reading(2.0, reasons=("the engine is not up",), notice="no metrics: 403"))
        assert "the engine is not up | no metrics: 403" in shown.text("status")
        assert shown.daemon.max_running == 1


async def test_latencies_since_the_last_poll_are_a_line() -> None:
    async with running() as shown:
        await shown.find(reading(1.0, 100), reading(2.0, 110), reading(3.0, 110))
        line = shown.widget("end_to_end")
        assert isinstance(line, Sparkline)
        assert line.data == [0.0, 0.25 * 0.99, 0.0]


async def test_keys_and_headers_sort() -> None:
    async with running() as shown:
        await shown.find(reading(1.0))
        await shown.press("r")
        assert shown.names == ["ccc", "bbb", "aaa"]
        await shown.press("s", "s")
        assert shown.names == ["aaa", "bbb", "ccc"], "by state, falling"
        assert "by state, falling" in str(shown.table.border_title)
        await shown.pilot.click(shown.table, offset=(28, 1))
        assert "by age" in str(shown.table.border_title)
        assert (shown.names[-1], "falling" in str(shown.table.border_title)) == ("bbb", False)
        await shown.pilot.click(shown.table, offset=(28, 1))
        assert shown.names[0] == "bbb"


async def test_the_cursor_stays_at_its_session() -> None:
    async with running() as shown:
        await shown.find(reading(1.0))
        await shown.press("down", "r")
        assert (shown.names, shown.at_cursor) == (["ccc", "bbb", "aaa"], "bbb")
        await shown.press("up")
        await shown.find(reading(2.0))
        assert shown.at_cursor == "ccc"
        await shown.find(Reading(3.0, SESSIONS[:1], reading(3.0).scrape))
        assert shown.at_cursor == "bbb", "the only one left"


async def test_the_table_stays_scrolled() -> None:
    many = tuple(session_info(f"s{n:02}") for n in range(60))
    async with running(size=(160, 40)) as shown:
        await shown.find(Reading(1.0, many, reading(1.0).scrape))
        await shown.press("ctrl+end")
        lines = shown.table.scroll_y
        await shown.find(Reading(2.0, many, reading(2.0).scrape))
        assert (lines > 0, shown.table.scroll_y, shown.at_cursor) == (True, lines, "s59")


async def test_a_filter_leaves_some_and_escape_shows_all() -> None:
    async with running() as shown:
        await shown.find(reading(1.0))
        await shown.press("slash", *"late", "enter")
        assert shown.names == ["ccc"]
        assert "1 of 3 sessions" in str(shown.table.border_title)
        await shown.find(reading(2.0))
        assert (shown.names, shown.app.screen.focused) == (["ccc"], shown.table)
        await shown.press("slash", "x")
        assert shown.names == []
        await shown.press("enter", "enter")
        assert not isinstance(shown.app.screen, SessionScreen), "there is none to show"
        await shown.press("escape")
        assert len(shown.names) == 3


async def test_a_key_in_the_filter_is_a_character() -> None:
    async with running() as shown:
        await shown.find(reading(1.0))
        await shown.press("slash", "q")
        assert shown.app.is_running
        assert shown.names == []


async def test_rows_are_bounded() -> None:
    many = tuple(session_info(f"s{n:04}") for n in range(MAX_ROWS + 20))
    async with running() as shown:
        await shown.find(Reading(1.0, many, reading(1.0).scrape))
        assert len(shown.names) == MAX_ROWS
        assert f"{MAX_ROWS} of {MAX_ROWS + 20} sessions" in str(shown.table.border_title)
        await shown.press("slash", *f"s0{MAX_ROWS + 19}")
        assert shown.names == [f"s0{MAX_ROWS + 19}"]


async def test_answers_are_of_the_session_at_the_cursor() -> None:
    async with running(listed_answer("trend"), listed_answer("volume")) as shown:
        await shown.find(reading(1.0))
        assert shown.daemon.asked[-1] == "aaa"
        assert [word in shown.text("answers") for word in ("trend", "volume", "UP", "[")] == [True] * 3 + [
            False
        ]
        await shown.press("down")
        assert shown.daemon.asked[-1] == "bbb"
        assert "answers of bbb" in str(shown.widget("answers").border_title)


async def test_enter_shows_where_the_time_of_an_answer_went() -> None:
    newest = listed_answer("trend"), listed_answer("volume", data_version=9), listed_answer("forgotten")
    async with running(*newest) as shown:

        def title() -> str:
            return str(shown.widget("waterfall").border_title)

        await shown.find(reading(1.0))
        await shown.press("enter")
        await until(lambda: shown.names == ["trend", "volume", "forgotten"])
        await until(lambda: "trend, version 7" in title())
        await shown.press("down")
        await until(lambda: "volume, version 9" in title())
        lines = shown.text("waterfall").splitlines()
        assert [line.strip("│ ").split()[:4] for line in lines if "queue" in line or "forward" in line] == [
            ["queue", "5", "ms", "62%"],
            ["forward", "3", "ms", "38%"],
        ]
        await shown.press("down")
        await until(lambda: "its trace is not kept any more" in shown.text("waterfall"))
        shown.daemon.newest = AWAY
        await until(lambda: "connection refused" in shown.text("status"))
        assert shown.names == ["trend", "volume", "forgotten"], "it shows what it knows"
        shown.daemon.newest = ()
        await until(lambda: not shown.names and not shown.text("status").strip())
        await shown.press("escape")
        assert shown.names == ["aaa", "bbb", "ccc"]


async def test_a_daemon_that_is_away_is_named_until_it_is_back() -> None:
    async with running() as shown:
        await shown.find(AWAY)
        assert shown.text("status") == f"{AWAY} | http://d:7800"
        await shown.find(reading(1.0), AWAY)
        assert shown.text("status").startswith(f"{AWAY} | http://d:7800 | ready | engine up")
        assert (shown.names, " s old" in shown.text("status")) == (["aaa", "bbb", "ccc"], True)
        await shown.find(reading(2.0))
        assert shown.text("status") == "http://d:7800 | ready | engine up, 25% busy"


async def test_failing_answers_are_named() -> None:
    async with running() as shown:
        shown.daemon.newest = Unavailable("/v1/answers: 429, busy")
        await shown.find(reading(1.0))
        assert "429, busy" in shown.text("status")


async def test_a_restart_is_noted() -> None:
    async with running() as shown:
        await shown.find(reading(1.0, 100), reading(2.0, 120))
        assert "began again" not in shown.text("status")
        await shown.find(AWAY, reading(9.0, 3), reading(10.0, 4))
        assert "counters began again at" in shown.text("status")


async def test_it_ends_at_once_while_a_poll_waits() -> None:
    async with running() as shown:
        await shown.find(reading(1.0))
        assert shown.daemon.running == 1
        await shown.pilot.press("q")
        await until(lambda: not shown.app.is_running)
    assert shown.daemon.running == 0, "cancelled"


async def test_it_fits_a_small_terminal() -> None:
    async with running(listed_answer("up"), size=(80, 24)) as shown:
        await shown.find(reading(1.0), reading(2.0))
        assert all(shown.widget(name).region.bottom <= 24 for name in ("sessions", "feeds", "stages"))
        assert shown.table.size.height >= 4
        assert not shown.widget("answers").display
