"""The bars of `foretick replay --bars`, and which of them an answer was read from.

It is part of the Python client, too, and needs the standard library only.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

FROM_BAR = ("opens", "interval", "open", "high", "low", "close", "volume", "records")
"""What an answer's row has of its bar, in columns named `bar_open` and so on, as exact text."""
COLUMNS = ("session", "symbol", *FROM_BAR, "newest", "flags")


class BarRow(NamedTuple):
    """One line of the file, without session and symbol."""

    opens: str
    interval: str
    open: str
    high: str
    low: str
    close: str
    volume: str
    records: str
    newest: str
    flags: str


@dataclass(eq=False)
class BarSeries:
    """The bars of one symbol of a session by their openings (ns), as they were when they closed."""

    rows: dict[int, BarRow] = field(default_factory=dict)
    _opened: list[int] = field(default_factory=list)

    @property
    def opened(self) -> Sequence[int]:
        """Openings, ascending."""
        if len(self._opened) != len(self.rows):
            self._opened = sorted(self.rows)
        return self._opened

    def opening(self, as_of: int, answer_id: str) -> int | None:
        """That of the bar of an answer; None where it is not there.

        An id names it, of the session's first symbol where it has several. Where none is named, it is that of
        the bar which holds ``as_of`` (ns), if that is the time of its newest record, as far as this is known:
        else the bar closed only after the answer.
        """
        named = answer_id.rpartition(":")[2].partition(",")[0]
        if named.removeprefix("-").isdecimal():  # -1 of a symbol without a bar
            return int(named) if int(named) in self.rows else None
        at = bisect_right(self.opened, as_of) - 1
        if at < 0:
            return None
        opening = self.opened[at]
        row = self.rows[opening]
        holds = as_of - opening < max(1, int(row.interval))
        return opening if holds and (not row.newest or ns_of(row.newest) == as_of) else None


class BarTable:
    """Bars by session and symbol."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], BarSeries] = {}

    @classmethod
    def read(cls, path: str | Path) -> BarTable:
        """The table of a file. Raises OSError, and ValueError for a file of another kind."""
        table = cls()
        with Path(path).open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file)
            missing = {*COLUMNS} - {"newest"} - {*(lines.fieldnames or ())}
            if missing:
                raise ValueError(f"{path} has no bars of foretick replay --bars: no column {min(missing)!r}")
            for line in lines:
                table.add(line)
        return table

    def add(self, line: Mapping[str, str | None]) -> None:
        """The next line. A correction is a further line of its bar: it came later, so the first one stays.

        Raises ValueError for an opening that is no time.
        """
        key = line["session"] or "", line["symbol"] or ""
        row = BarRow(*(line.get(name) or "" for name in BarRow._fields))
        self._series.setdefault(key, BarSeries()).rows.setdefault(ns_of(row.opens), row)

    def series(self, session: str, symbol: str) -> BarSeries:
        """Those of one symbol; empty where there are none."""
        return self._series.get((session, symbol), BarSeries())

    def row(self, session: str, symbol: str, as_of: int, answer_id: str | None) -> BarRow | None:
        """The bar of an answer, None where it is not there."""
        series = self.series(session, symbol)
        opening = series.opening(as_of, answer_id or "")
        return None if opening is None else series.rows[opening]


def ns_of(text: str) -> int:
    """A time in UTC, with up to nine decimals of a second, in ns. Raises ValueError."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    whole = int(datetime.fromisoformat(f"{seconds}+00:00").timestamp())
    return whole * 10**9 + int(fraction[:9].ljust(9, "0"))
