"""Ready-made bars of a file: updates of one that is unfinished, and openings beside the grid."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from feeds.columns.record_columns import RecordColumns
from feeds.csv_rows import Notice
from feeds.durations import Duration
from feeds.file_format import UNFINISHED, RecordFormat
from feeds.market_data import Bar
from feeds.row_records import ParsedRecord, grid_ns

OnSkipped = Callable[[int, str], None]
"""Called for every line without a record: its number, and the name under which it is counted."""


@dataclass(slots=True)
class _Count:
    """How many lines something is true of, and the first."""

    lines: int = 0
    first: int = 0

    def add(self, line: int) -> None:
        self.lines += 1
        self.first = self.first or line


class Candles:
    """Resolves updates of unfinished candles of one text, and counts what a format should say of its bars."""

    def __init__(self, forms: Sequence[RecordFormat], skip: OnSkipped, notice: Notice) -> None:
        self._forms, self._skip, self._notice = forms, skip, notice
        self._waiting: dict[tuple[int, str], ParsedRecord] = {}
        self._last: dict[tuple[int, str], Bar] = {}
        self._repeated, self._off_grid = _Count(), _Count()

    def finished(
        self, records: Iterator[ParsedRecord | RecordColumns]
    ) -> Iterator[ParsedRecord | RecordColumns]:
        """Records in their order; of candles with ``ready = "last"`` the last update, once a newer one opens.

        Columns stay as they are. The last candle of the file counts as it stands at its end.
        """
        for parsed in records:
            bar = None if isinstance(parsed, RecordColumns) else parsed.record
            if isinstance(parsed, RecordColumns) or not isinstance(bar, Bar):
                yield parsed
                continue
            if bar.ts_event % grid_ns(bar.interval_ns):
                self._off_grid.add(parsed.line)
            if self._forms[parsed.declared].ready == "last":
                yield from self._replaced(parsed)
            else:
                self._look_for_repeats(parsed, bar)
                yield parsed
        yield from sorted(self._waiting.values(), key=lambda parsed: parsed.record.ts_event)
        self._say()

    def _replaced(self, parsed: ParsedRecord) -> Iterator[ParsedRecord]:
        """What an update makes sure: the candle before it, or an older one's update, which is late."""
        before = self._waiting.get(parsed.series)
        if before is not None and parsed.record.ts_event < before.record.ts_event:
            yield parsed
            return
        self._waiting[parsed.series] = parsed
        if before is None:
            return
        if parsed.record.ts_event == before.record.ts_event:
            self._skip(before.line, UNFINISHED)
        else:
            yield before

    def _look_for_repeats(self, parsed: ParsedRecord, bar: Bar) -> None:
        before = self._last.get(parsed.series)
        if before is not None and before.ts_event == bar.ts_event and before != bar:
            self._repeated.add(parsed.line)
        self._last[parsed.series] = bar

    def _say(self) -> None:
        if self._repeated.lines:
            self._notice(
                f"{self._repeated.lines} bars repeat the opening before them with other values, first in "
                f'line {self._repeated.first}: of updates of unfinished candles, declare ready = "last"'
            )
        if self._off_grid.lines:
            grids = sorted({grid_ns(form.interval) for form in self._forms if form.interval})
            spelled = " or ".join(str(Duration(grid)) for grid in grids)
            self._notice(
                f"{self._off_grid.lines} bars do not open on a multiple of {spelled}, first in line "
                f"{self._off_grid.first}"
            )
