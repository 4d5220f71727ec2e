"""The screens of `foretick top`: all sessions with what surrounds them, and the answers of one."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from daemon.top import panels
from daemon.top.panels import plain
from daemon.top.reader import Reader, Unavailable
from daemon.top.snapshot import COLUMNS, Reading, Row, Snapshot, chosen, snapshot
from feeds.market_data import Answer
from metrics.catalogue import OBJECTIVES

MAX_ROWS = 200
"""Of sessions in the table; a filter finds the others."""
_HISTORY = 240
_WIDTHS = [(0, "-narrow"), (150, "-wide")]
_HEIGHTS = [(0, "-short"), (36, "-tall")]
"""Classes of CSS that screens have from this many cells on."""
_PANELS = (panels.feeds, panels.pool, panels.queues, panels.stages)


class TopApp(App[None]):
    """Shows what ``reader`` reads every ``interval_s`` seconds; ``url``: in the first line."""

    CSS = """
    .panel { border: round $primary; height: auto; }
    #status { height: auto; max-height: 3; }
    #filter { display: none; }
    #sessions { height: 1fr; min-height: 6; }
    #panels, #lines { height: auto; }
    #panels > .panel { width: auto; height: 100%; max-height: 15; }
    #panels > #stages { width: 1fr; height: auto; }
    #lines > .panel { width: 1fr; }
    #newest { height: 1fr; }
    .-narrow #panels { layout: grid; grid-size: 2; grid-rows: auto; }
    .-narrow #panels > .panel { width: 1fr; }
    .-short #panels { max-height: 14; overflow-y: auto; }
    .-short #lines, .-short #answers { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit")]
    HORIZONTAL_BREAKPOINTS = _WIDTHS
    VERTICAL_BREAKPOINTS = _HEIGHTS
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, reader: Reader, interval_s: float, url: str = "") -> None:
        super().__init__()
        self._reader, self._interval_s, self._url = reader, interval_s, url

    def get_default_screen(self) -> Screen[None]:
        """All sessions."""
        return Overview(self._reader, self._interval_s, self._url)


class Overview(Screen[None]):
    """All sessions, feeds, queues, the pool and latencies, and the answers of the session at the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter"),
        Binding("escape", "clear", "no filter"),
        Binding("s", "sort", "sort by the next column"),
        Binding("r", "reverse", "reverse"),
    ]

    def __init__(self, reader: Reader, interval_s: float, url: str) -> None:
        super().__init__()
        self._reader, self._interval_s, self._url = reader, interval_s, url
        self._last: Reading | None = None
        self._snapshot = Snapshot()
        self._failure, self._restarted = "", ""
        self._column, self._reversed = 0, False
        self._rows: Sequence[Row] = ()
        # held here, because a poll may end while the screen is taken down and finds none by name
        self._status = Static("connecting", id="status", markup=False)
        self._filter = Input(placeholder="words of a name, a symbol or a state", id="filter", compact=True)
        self._table = DataTable[Text](id="sessions", classes="panel", cursor_type="row")
        self._panels = {render: _panel(render.__name__) for render in _PANELS}
        self._answers = _panel("answers")
        self._lines = {name: Sparkline(id=name, classes="panel", data=[]) for name in OBJECTIVES}

    def compose(self) -> ComposeResult:
        """All widgets."""
        self._table.add_columns(*(column.title for column in COLUMNS))
        yield self._status
        yield self._filter
        yield self._table
        yield Horizontal(*self._panels.values(), id="panels")
        with Horizontal(id="lines"):
            for name, line in self._lines.items():
                line.border_title = f"p99 of {name}"
                yield line
        yield self._answers
        yield Footer()

    def on_mount(self) -> None:
        """Begin to poll."""
        self._table.focus()
        self.run_worker(self._poll())

    @property
    def _selected(self) -> str:
        """The session at the cursor; empty without one."""
        row = self._table.cursor_row
        return self._rows[row].info.name if 0 <= row < len(self._rows) else ""

    async def _poll(self) -> None:
        while True:
            try:
                self._take(await self._reader.poll())
                self._failure = ""
                if self.is_current:
                    await self._show_answers()
            except Unavailable as error:
                self._failure = str(error)
            self._show_status()
            await asyncio.sleep(self._interval_s)

    def _take(self, reading: Reading) -> None:
        self._snapshot, self._last = snapshot(reading, self._last), reading
        if self._snapshot.restarted:
            self._restarted = f"counters began again at {time.strftime('%H:%M:%S')}"
        for render, panel in self._panels.items():
            panel.update(render(self._snapshot))
        for name, line in self._lines.items():
            p99 = self._snapshot.growth.quantile(0.99, "foretick_stage_seconds", stage=name)
            line.data = [*(line.data or ()), p99 or 0.0][-_HISTORY:]
        self._show_sessions()

    def _show_status(self) -> None:
        last, parts = self._last, [self._failure, self._url]
        if last:
            parts += [", ".join(last.reasons) or "ready", last.notice]
            if last.scrape.values:
                up, busy = map(last.scrape.total, ("foretick_engine_up", "foretick_utilisation_ratio"))
                parts.append(f"engine {'up' if up else 'down'}, {busy:.0%} busy")
            if self._failure:
                parts.append(f"shown is {time.monotonic() - last.at:.0f} s old")
        self._status.update(plain(" | ".join(filter(None, [*parts, self._restarted]))))

    def _show_sessions(self) -> None:
        """Fill the table again, with the cursor at the session where it was."""
        table, selected, scroll = self._table, self._selected, self._table.scroll_offset
        found = chosen(self._snapshot.rows, self._filter.value, self._column, self._reversed)
        self._rows = found[:MAX_ROWS]
        names = [row.info.name for row in self._rows]
        cells = ([plain(column.text(row)) for column in COLUMNS] for row in self._rows)
        _fill(table, cells, names.index(selected) if selected in names else 0)
        table.scroll_to(scroll.x, scroll.y, animate=False)
        order = f"by {COLUMNS[self._column].title}{', falling' if self._reversed else ''}"
        table.border_title = f"{len(names)} of {len(self._snapshot.rows)} sessions {order}"

    async def _show_answers(self) -> None:
        """Read the answers of the session at the cursor, and show them if it is still there."""
        session = self._selected
        found = await self._reader.answers(session) if session else ()
        if session == self._selected:
            self._answers.update(panels.answers(found))
            self._answers.border_title = plain(f"answers of {session}")

    async def _follow_cursor(self) -> None:
        with contextlib.suppress(Unavailable):  # the next poll says why
            await self._show_answers()

    def on_data_table_row_highlighted(self) -> None:
        """Read the answers of another session, before the next poll does."""
        self.run_worker(self._follow_cursor(), group="cursor", exclusive=True)

    def on_data_table_row_selected(self) -> None:
        """Show one session."""
        self.app.push_screen(SessionScreen(self._reader, self._interval_s, self._selected))

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by this column, or the other way round."""
        self._reversed = event.column_index == self._column and not self._reversed
        self._column = event.column_index
        self._show_sessions()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._column = (self._column + 1) % len(COLUMNS)
        self._show_sessions()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._reversed = not self._reversed
        self._show_sessions()

    def action_filter(self) -> None:
        """Let a filter be written."""
        self._filter.display = True
        self._filter.focus()

    def action_clear(self) -> None:
        """Show all sessions."""
        self._filter.value, self._filter.display = "", False
        self._table.focus()

    def on_input_changed(self) -> None:
        """Filter."""
        self._show_sessions()

    def on_input_submitted(self) -> None:
        """Go back to the table."""
        self._table.focus()


class SessionScreen(Screen[None]):
    """The newest answers of one session, and where the time of the one at the cursor went."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "back")]

    def __init__(self, reader: Reader, interval_s: float, session: str) -> None:
        super().__init__()
        self._reader, self._interval_s, self._session = reader, interval_s, session
        self._newest: Sequence[Answer] = ()
        self._status = Static(id="status", markup=False)
        self._table = DataTable[Text](id="newest", classes="panel", cursor_type="row")
        self._waterfall = _panel("waterfall")

    def compose(self) -> ComposeResult:
        """All widgets."""
        self._table.add_columns(*panels.ANSWER_COLUMNS)
        self._table.border_title = plain(f"answers of {self._session}")
        yield from (self._status, self._table, self._waterfall, Footer())

    def on_mount(self) -> None:
        """Begin to poll."""
        self.run_worker(self._poll())

    async def _poll(self) -> None:
        while True:
            try:
                self._newest, failure = await self._reader.answers(self._session), ""
            except Unavailable as error:
                failure = str(error)
            self._status.update(plain(failure))
            cells = (map(plain, panels.answer_row(answer)) for answer in self._newest)
            _fill(self._table, cells, self._table.cursor_row)
            self.on_data_table_row_highlighted()
            await asyncio.sleep(self._interval_s)

    def on_data_table_row_highlighted(self) -> None:
        """Show the stages of the answer at the cursor."""
        # called later, since a worker that another one replaces may never begin
        self.run_worker(self._show_stages, group="stages", exclusive=True)  # type: ignore[arg-type]

    async def _show_stages(self) -> None:
        for answer in self._newest[self._table.cursor_row :][:1]:
            with contextlib.suppress(Unavailable):  # the next poll says why
                found = await self._reader.spans(answer)
                self._waterfall.update(panels.bars(found) if found else "its trace is not kept any more")
                self._waterfall.border_title = plain(f"{answer.question}, version {answer.data_version}")


def _panel(name: str) -> Static:
    panel = Static(id=name, classes="panel", markup=False)
    panel.border_title = name
    return panel


def _fill(table: DataTable[Text], rows: Iterable[Iterable[Text]], cursor: int) -> None:
    with table.prevent(DataTable.RowHighlighted):
        table.clear()
        table.add_rows(rows)
        table.move_cursor(row=cursor, scroll=False)
