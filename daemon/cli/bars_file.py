"""`foretick replay --bars`: the bars that were made, as a table, so that anyone can check them."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from daemon.audit.bar_table import COLUMNS
from daemon.config.schema import SessionConfig
from feeds.decimals import DIGITS, format_fixed
from ingest.bar_kernel import ACTED, AMENDS, EMPTY, GAP, INCOMPLETE, JUMP, REPLAYED, ROLLED, SKEWED, Bars
from ingest.feed_rules import BITS
from ingest.volumes import volume_of

_FLAGS = {
    "skewed_clock": SKEWED,
    "gap": GAP,
    "empty": EMPTY,
    "replay": REPLAYED,
    "price_jump": JUMP,
    "rolled": ROLLED,
    "action": ACTED,
    "amended": AMENDS,
    "incomplete": INCOMPLETE,
    **{name: bit for name, bit in BITS.items() if name != "skewed_clock"},
}


class BarsFile:
    """Writes bars to a CSV file, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, session: SessionConfig, bars: Bars) -> None:
        """Write BAR [n] of a session."""
        self._writer.writerows(lines_of(session, bars))


def lines_of(session: SessionConfig, bars: Bars) -> Iterator[tuple[str, ...]]:
    """`COLUMNS` of BAR [n]: times in UTC, intervals in ns, prices and volumes as exact decimals.

    A bar that late records amend has a further line each time.
    """
    unit = 10 ** (DIGITS - session.scale)
    for bar in bars:
        yield (
            session.name,
            session.symbols[int(bar["leg"])],
            _utc(bar["ts_open"]),
            str(int(bar["interval"])),
            *(format_fixed(int(bar[name]) * unit) for name in "ohlc"),
            format_fixed(volume_of(bar).exact),
            str(int(bar["n_ticks"])),
            _utc(bar["ts_last_event"]),
            " ".join(name for name, flag in _FLAGS.items() if bar["flags"] & flag),
        )


def _utc(ns: Any) -> str:
    return f"{np.datetime64(int(ns), 'ns')}Z"
