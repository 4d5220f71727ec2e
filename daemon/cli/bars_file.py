"""`foretick replay --bars`: the bars that were made, as a table, so that anyone can check them."""

import csv
from pathlib import Path
from typing import Any, Self

import numpy as np

from daemon.config.schema import SessionConfig
from feeds.decimals import DIGITS, format_fixed
from ingest.bar_kernel import AMENDS, EMPTY, GAP, INCOMPLETE, JUMP, REPLAYED, ROLLED, SKEWED, Bars
from ingest.feed_rules import BITS
from ingest.volumes import volume_of

COLUMNS = (
    *("session", "symbol", "opens", "interval", "open", "high", "low", "close", "volume", "records"),
    "flags",
)
_FLAGS = {
    "skewed_clock": SKEWED,
    "gap": GAP,
    "empty": EMPTY,
    "replay": REPLAYED,
    "price_jump": JUMP,
    "rolled": ROLLED,
    "amended": AMENDS,
    "incomplete": INCOMPLETE,
    **{name: bit for name, bit in BITS.items() if name != "skewed_clock"},
}


class BarsFile:
    """Writes bars to a CSV file: openings in UTC, intervals in ns, prices and volumes as exact decimals.

    A bar that late records amend has a further row each time.
    """

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
        self._writer.writerows(self._row(session, bar) for bar in bars)

    def _row(self, session: SessionConfig, bar: Any) -> tuple[str, ...]:
        unit = 10 ** (DIGITS - session.scale)
        return (
            session.name,
            session.symbols[int(bar["leg"])],
            f"{np.datetime64(int(bar['ts_open']), 'ns')}Z",
            str(int(bar["interval"])),
            *(format_fixed(int(bar[name]) * unit) for name in "ohlc"),
            format_fixed(volume_of(bar).exact),
            str(int(bar["n_ticks"])),
            " ".join(name for name, flag in _FLAGS.items() if bar["flags"] & flag),
        )
