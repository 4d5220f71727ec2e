"""The text of the tape: one line per bar, `time,open,high,low,close,volume` and a newline.

The time is the bar's opening in UTC: the date for intervals of a day or more, `HHMM` for those of a minute
or more, else `HHMMSS`, behind the date where that is wanted. Numbers are plain decimals with the session's
number of decimals, rounded half to even in integer arithmetic.
`143000,101.25,101.50,101.25,101.38,12.500` is a one-second bar with two decimals for prices and three for
volume. Where a session reads several symbols, each line begins with its own: `ESZ6,143000,...`. A bar that a
late record amended is written again after the word `amend`: `amend,143000,...`. Where empty intervals are
said, one without a trade is `143000,no trade`. Before the first bar of another contract there is a line of
its own, `roll,ESH7`.

As a table the same cells are `| 143000 | 101.25 | ... |`, and in words each number has its name behind the
time: `143000 open 101.25 high 101.50 low 101.25 close 101.38 volume 12.500`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ingest.bar_kernel import AMENDS, EMPTY, RESETS, ROLLED
from ingest.volumes import SCALE as VOLUME_SCALE
from ingest.volumes import volume_of

_SECOND = 1_000_000_000
MINUTE_NS, DAY_NS = 60 * _SECOND, 86400 * _SECOND
Form = Literal["decimal", "table", "words"]
NAMES = ("open", "high", "low", "close", "volume")


@dataclass(frozen=True, slots=True)
class LineSpec:
    """A session's decimals, 0 to 18 each, and the names of its symbols if it has several.

    ``says_empty``: an empty bar's line says that nothing was traded, and no prices. ``price_scale``: decimals
    of the unit that its bars' prices count, 0 to 18; no fewer than are printed. ``rolls``: of each symbol,
    event times, ns, and names of the contracts that follow, the oldest first; nothing is said of one that
    resets the window. ``dates``: times have their date. ``form``: how a line is written.
    """

    price_decimals: int = 2
    volume_decimals: int = 3
    symbols: tuple[str, ...] = ()
    says_empty: bool = False
    price_scale: int = 9
    rolls: tuple[tuple[tuple[int, str], ...], ...] = ()
    dates: bool = False
    form: Form = "decimal"

    def __post_init__(self) -> None:
        check_decimals(self.price_decimals, self.price_scale)
        if not 0 <= self.volume_decimals <= VOLUME_SCALE:
            raise ValueError(f"volume_decimals must be from 0 to {VOLUME_SCALE}, not {self.volume_decimals}")


def check_decimals(price_decimals: int, price_scale: int) -> None:
    """Raises ValueError for decimals of printed prices that the unit of prices does not have."""
    if not 0 <= price_scale <= 18:
        raise ValueError(f"price_scale must be from 0 to 18, not {price_scale}")
    if not 0 <= price_decimals <= price_scale:
        raise ValueError(
            f"price_decimals must be from 0 to price_scale ({price_scale}), not {price_decimals}"
        )


def line_of(cells: Sequence[str], form: Form) -> str:
    """The line of these cells."""
    if form == "table":
        return f"| {' | '.join(cells)} |\n"
    return ("," if form == "decimal" else " ").join(cells) + "\n"


def bar_row(head: Sequence[str], numbers: Sequence[str], behind: Sequence[str], form: Form) -> str:
    """The line of a bar with these `open` to `volume`, which in words have their names."""
    if form == "words":
        numbers = [f"{name} {number}" for name, number in zip(NAMES, numbers, strict=True)]
    return line_of([*head, *numbers, *behind], form)


def round_half_even(value: int, unit: int) -> int:
    """``value`` in whole units."""
    whole, rest = divmod(value, unit)
    return whole + (2 * rest > unit or (2 * rest == unit and whole % 2 == 1))


def decimal(value: int, decimals: int, scale: int = 9) -> str:
    """`value`, in units of 10^-`scale`, with up to `scale` decimals, rounded half to even."""
    whole = round_half_even(abs(value), 10 ** (scale - decimals))
    digits = f"{whole:0{decimals + 1}d}"
    sign = "-" if value < 0 and whole else ""
    return sign + (f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits)


def time_text(ts_open: int, interval: int, *, dates: bool = False) -> str:
    """A bar's opening in its line: its date where bars last a day or more, else the time of day.

    ``dates``: behind its date.
    """
    if interval < DAY_NS and not dates:
        return clock_text(ts_open, interval)
    date = str(np.datetime64(ts_open, "ns").astype("datetime64[D]"))
    return date if interval >= DAY_NS else f"{date} {clock_text(ts_open, interval)}"


def clock_text(ts_open: int, interval: int) -> str:
    """Time of day (UTC) of a bar's opening: four or six digits."""
    hours, seconds = divmod(ts_open // _SECOND % 86400, 3600)
    minutes, seconds = divmod(seconds, 60)
    return f"{hours:02d}{minutes:02d}" + (f"{seconds:02d}" if interval < MINUTE_NS else "")


def _roll_line(bar: Any, spec: LineSpec) -> str:
    """What is said before a bar."""
    if not spec.rolls or bar["flags"] & (AMENDS | RESETS) or not bar["flags"] & ROLLED:
        return ""
    names = [name for at, name in spec.rolls[int(bar["leg"])] if at <= bar["ts_open"]]
    return line_of(["roll", names[-1]], spec.form) if names else ""


def bar_line(bar: Any, spec: LineSpec) -> str:
    """The line of one element of a BAR array."""
    before = _roll_line(bar, spec)
    head = ["amend"] if bar["flags"] & AMENDS else []
    if spec.symbols:
        head.append(spec.symbols[int(bar["leg"])])
    head.append(time_text(int(bar["ts_open"]), int(bar["interval"]), dates=spec.dates))
    if spec.says_empty and bar["flags"] & EMPTY:
        return before + line_of([*head, "no trade"], spec.form)
    prices = (decimal(int(bar[name]), spec.price_decimals, spec.price_scale) for name in "ohlc")
    volume = decimal(volume_of(bar).exact, spec.volume_decimals, VOLUME_SCALE)
    return before + bar_row(head, [*prices, volume], [], spec.form)
