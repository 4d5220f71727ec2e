"""Compact lines: a bar is five groups of three digits, `OOOHHHLLLCCCVVV`, around an anchor.

Prices are levels, 500 at the anchor's reference and one price unit apart; volumes are codes, 500 at the
anchor's volume and 200 a decade, so that a code is exact to 1.2 %. Code 0 is no volume. The anchor stands in
the frozen prefix (`Anchor.header`). A bar that leaves the levels 0 to 999 makes a `Restart`: another anchor,
and the retained bars encoded around it. Prices between two levels are rounded half to even and flagged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ingest.bar_kernel import BAR, RESETS, Bars
from ingest.lines import check_decimals, decimal, round_half_even
from ingest.plane_state import CompactState, Rows
from ingest.splits import adjusted, ratio_of
from ingest.tokens import Fields, Tokeniser, compact_line, whole_units
from ingest.volumes import HIGH, LOW, Volume
from ingest.volumes import SCALE as VOLUME_SCALE
from support.numba_kernel import kernel

CENTRE, HIGHEST = 500, 999
CODES_PER_DECADE = 200
FITTING = 400
"""Most levels between the lowest and the highest price of a window, when its anchor is chosen."""
TINY = 40
"""Levels of a window at or below which a finer unit is chosen, if there is one."""
REVIEW = 64
"""After this many bars, and after 1, 2, 4 ... before, it is checked whether the anchor suits the window."""
NO_VOLUME = 10**VOLUME_SCALE
"""The volume of an anchor, 1e-18, where none was traded yet."""
_SHIFTED = 10
"""A window's median volume differs from the anchor's by more than this factor: the anchor is replaced."""
_VOLUME_DIGITS = 3

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]

_BOUNDS: Floats = 10.0 ** ((np.arange(HIGHEST + 1) + 0.5 - CENTRE) / CODES_PER_DECADE)
"""Volumes over the anchor's below which the code is 0, 1, ..., 999, before it is limited to 1..999."""
# Columns of a retained bar.
_NAMES = ("o", "h", "l", "c", "v_high", "v", "v_low")
_EVENT, _TOKENS, _INEXACT, _COLUMNS = 7, 8, 9, 10
_PRICES, _VOLUME = slice(0, 4), slice(4, 7)
_ROUNDED, _SATURATED = 1, 2
_LEVEL = re.compile(r"\d{3}")


def header_text(reference: str, unit: str, volume: str, percent: int) -> str:
    """The line of the frozen prefix that says what levels and volume codes mean."""
    return f"reference {reference} unit {unit} volume {volume} percent {percent:03d}\n"


@dataclass(frozen=True, slots=True)
class Anchor:
    """What levels and volume codes stand for. ``reference`` is a multiple of ``unit``.

    Both are in 10^-``price_scale``; ``volume`` is in 1e-18.
    """

    reference: int
    unit: int
    volume: int
    price_decimals: int = 2
    """Decimals of a printed price."""
    price_scale: int = 9

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Reference, unit and volume as decimal text, exactly."""
        decimals = _decimals(self.unit, self.price_scale)
        reference, unit = (decimal(x, decimals, self.price_scale) for x in (self.reference, self.unit))
        return reference, unit, decimal(self.volume, _decimals(self.volume, VOLUME_SCALE), VOLUME_SCALE)

    @property
    def stored(self) -> tuple[str, str, str, int, int]:
        """What `of` takes: the volume may have more than the 64 bits of an integer in a file."""
        return (*self.numbers, self.price_decimals, self.price_scale)

    @classmethod
    def of(cls, reference: str, unit: str, volume: str, price_decimals: int, price_scale: int) -> Anchor:
        """The anchor with these `numbers`. Raises ValueError for a number that its unit cannot express."""
        prices = units_in(reference, price_scale), units_in(unit, price_scale)
        return cls(*prices, units_in(volume, VOLUME_SCALE), price_decimals, price_scale)

    @property
    def percent(self) -> int:
        """Units in one percent of the reference, 1 to 999."""
        return min(max(round_half_even(abs(self.reference), 100 * self.unit), 1), HIGHEST)

    @property
    def header(self) -> str:
        """See `header_text`."""
        return header_text(*self.numbers, self.percent)

    def price(self, level: int) -> int:
        """The price of a level."""
        return self.reference + (level - CENTRE) * self.unit

    def printed(self, text: str) -> str:
        """The price of a level of three digits, as text; other text as it is."""
        if _LEVEL.fullmatch(text) is None:
            return text
        return decimal(self.price(int(text)), self.price_decimals, self.price_scale)


WIDEST = Anchor(1 - 92 * 10**17, 1, (92 * 10**24 - 1) * 10**VOLUME_SCALE, price_scale=18)
"""An anchor with the longest header; volumes, of three significant digits, stay far below this one."""

WIDEST_LINE = compact_line([HIGHEST] * 5)


@dataclass(frozen=True, slots=True)
class CompactSpec:
    """A compact session: the decimals of its printed prices, its finest unit, and its tape's retention.

    ``unit`` in 10^-``price_scale``, 0 for one unit of the last decimal; 0 is no limit for ``records`` and
    ``span_ns``. ``begins``: an anchor that an earlier encoder chose, and how many bars it encoded around it:
    they come first.
    """

    price_decimals: int = 2
    unit: int = 0
    tokens: int = 4096
    records: int = 0
    span_ns: int = 0
    begins: tuple[Anchor, int] | None = None
    price_scale: int = 9

    def __post_init__(self) -> None:
        check_decimals(self.price_decimals, self.price_scale)
        if self.unit < 0:
            raise ValueError("the unit of a price must not be negative")

    @property
    def finest(self) -> int:
        """The finest unit, in 10^-``price_scale``."""
        return self.unit or int(10 ** (self.price_scale - self.price_decimals))

    @property
    def blank(self) -> Anchor:
        """The anchor before the first bar."""
        return Anchor(0, self.finest, NO_VOLUME, self.price_decimals, self.price_scale)


@dataclass(frozen=True, slots=True)
class Restart:
    """A window that begins again: token ids and event time (ns) of each of its bars, oldest first.

    ``anchor``: what they are encoded around; None of decimal lines. ``opened``: of those, when each bar of
    the window opened, ns.
    """

    anchor: Anchor | None
    window: tuple[tuple[tuple[int, ...], int], ...]
    opened: tuple[int, ...] = ()


class Encoded(NamedTuple):
    """Some bars of a session, BAR [n], as token ids, all around one anchor (None: decimal lines).

    ``restart``: to be carried out before these bars are appended. ``rounded``: for each bar, whether it or
    another bar of its window has a rounded price.
    """

    bars: Bars
    lines: list[list[int]]
    anchor: Anchor | None = None
    rounded: list[bool] | None = None
    restart: Restart | None = None


def unit_for(span: int, finest: int) -> int:
    """The finest of ``finest`` times 1, 2, 5, 10, 20 ... that makes ``span`` at most `FITTING` levels."""
    unit, step = finest, 0
    while span > FITTING * unit:
        step += 1
        unit = finest * (1, 2, 5)[step % 3] * 10 ** (step // 3)
    return unit


def typical_volume(volumes: Ints, unknown: int = NO_VOLUME) -> int:
    """The median of the volumes above 0, in 1e-18; ``unknown`` where there are none.

    ``volumes``: rows of three as in `Volume`.
    """
    traded = volumes[volumes.any(axis=1)]
    if not len(traded):
        return unknown
    order = np.lexsort(traded.T[::-1])
    return Volume(*traded[order[len(traded) // 2]].tolist()).exact


def anchor_for(low: int, high: int, volume: int, spec: CompactSpec) -> Anchor:
    """The anchor for a window's lowest and highest price, and its typical volume in 1e-18."""
    unit = unit_for(high - low, spec.finest)
    reference = round_half_even(low + high, 2 * unit) * unit
    scale = int(10 ** max(len(str(volume)) - _VOLUME_DIGITS, 0))
    volume = round_half_even(volume, scale) * scale
    return Anchor(reference, unit, volume, spec.price_decimals, spec.price_scale)


def fields_of(bars: Bars, anchor: Anchor) -> Fields:
    """Levels and volume codes [bars, 5] as printed. Raises ValueError when a price leaves 0 to 999."""
    fields, fitting, _ = _encode(bars, anchor)
    if fitting < len(bars):
        raise ValueError(f"bar {fitting} is outside the levels 0 to {HIGHEST} of {anchor}")
    return fields


class CompactEncoder:
    """Encodes a session's bars, and retains what its tape retains. The result doesn't depend on batches.

    ``rounded`` counts bars with a rounded price, ``saturated`` bars whose volume is outside the codes, and
    ``anchors`` the anchors so far.
    """

    def __init__(self, tokeniser: Tokeniser, spec: CompactSpec) -> None:
        self.rounded = self.saturated = self.anchors = 0
        self._tokeniser, self._spec = tokeniser, spec
        self._anchor: Anchor | None = None
        self._rows = np.zeros((64, _COLUMNS), np.int64)
        self._start = self._end = self._tokens = 0
        self._inexact = 0  # retained bars with a rounded price
        self._age = 0  # bars since the anchor was chosen
        self._given = 0  # bars to come that another encoder chose the anchor for
        if spec.begins is not None:
            self._anchor, self._given = spec.begins
            self._age = -self._given

    def encode(self, bars: Bars) -> list[Encoded]:
        """The bars, BAR [n], oldest first, in pieces of one anchor each."""
        pieces: list[Encoded] = []
        at, restart = 0, None
        if self._given and self._anchor is not None:
            restart, self._given = Restart(self._anchor, ()), 0
            self.anchors += 1
        ends = [*np.flatnonzero(bars["flags"] & np.uint32(RESETS)).tolist(), len(bars)]
        while at < len(bars):
            if at == ends[0]:
                self._begin_again(float(bars[at]["split"]))
            if self._anchor is None or self._is_due(bars[at]):
                restart = self._restart(bars[at : at + 1])
            ends = [end for end in ends if end > at]
            piece = self._encode(bars[at : min(at + self._until_review, ends[0])], restart)
            if piece.lines:
                pieces.append(piece)
                at, restart = at + len(piece.lines), None
            else:
                restart = self._restart(bars[at : at + 1])
        return pieces

    @property
    def totals(self) -> dict[str, int]:
        """What it has counted, by metric."""
        return {
            "bars_rounded": self.rounded,
            "volumes_saturated": self.saturated,
            "anchors": self.anchors,
        }

    def retain(self, spec: CompactSpec) -> None:
        """Retain what a tape with the limits of ``spec`` does, from the next bar on."""
        self._spec = spec

    def cut(self) -> CompactState:
        """Its state, without its counters."""
        anchor = self._anchor
        stored = None if anchor is None else anchor.numbers
        window = Rows.of(self._rows[self._start : self._end])
        return CompactState(stored, window, self._tokens, self._inexact, self._age)

    def restore(self, cut: CompactState) -> None:
        """Go on from a cut. Raises ValueError for rows of another layout."""
        rows: Ints = cut.window.array(np.int64, _COLUMNS)
        self._rows, self._start, self._end = rows, 0, len(rows)
        spec = self._spec
        decimals = spec.price_decimals, spec.price_scale
        self._anchor = None if cut.anchor is None else Anchor.of(*cut.anchor, *decimals)
        self._tokens, self._inexact, self._age = cut.tokens, cut.inexact, cut.age

    @property
    def window(self) -> Ints:
        """The retained bars, [bars, 7]: open, high, low, close, and the volume as in `Volume`."""
        return self._rows[self._start : self._end, : len(_NAMES)]

    @property
    def _until_review(self) -> int:
        age = self._age
        if age < 0:
            return -age
        return (1 << age.bit_length()) - age if age < REVIEW else REVIEW - age % REVIEW

    def _encode(self, bars: Bars, restart: Restart | None) -> Encoded:
        """The first bars that fit around the anchor; they may be none."""
        assert self._anchor is not None
        fields, fitting, marks = _encode(bars, self._anchor)
        lines = self._tokeniser.compact(fields[:fitting])
        self._age += fitting
        return Encoded(bars[:fitting], lines, self._anchor, self._retain(bars, lines, marks), restart)

    def _retain(self, bars: Bars, lines: list[list[int]], marks: Flags) -> list[bool]:
        """Retain the bars of ``lines`` and evict as the tape does; whether each one's window is rounded."""
        n = len(lines)
        if self._end + n > len(self._rows):
            kept = self._rows[self._start : self._end]
            self._rows = np.zeros((2 * (len(kept) + n) + 64, _COLUMNS), np.int64)
            self._rows[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        shown = np.empty(n, np.bool_)
        lengths = np.fromiter(map(len, lines), np.int64, n)
        spec = self._spec
        self._start, self._tokens, self._inexact, rounded, saturated = _retain(
            bars, lengths, marks, self._rows, self._start, self._end, self._tokens, self._inexact,
            spec.tokens, spec.records, spec.span_ns, shown,
        )  # fmt: skip
        self._end += n
        self.rounded += rounded
        self.saturated += saturated
        return list(shown.tolist())

    def _is_due(self, bar: np.void) -> bool:
        """Whether another anchor would suit the window and ``bar`` much better. Looks only at some bars."""
        assert self._anchor is not None
        age, anchor = self._age, self._anchor
        if age <= 0 or (age & (age - 1) if age < REVIEW else age % REVIEW):
            return False
        low, high, volume = self._extent(bar)
        coarse = anchor.unit > self._spec.finest and high - low <= TINY * anchor.unit
        return coarse or volume > _SHIFTED * anchor.volume or volume * _SHIFTED < anchor.volume

    def _extent(self, bar: np.void) -> tuple[int, int, int]:
        """Lowest and highest price of the window and ``bar``, and the median of their volumes above 0."""
        own, window = [int(bar[name]) for name in _NAMES], self.window
        low, high = min(own[_PRICES]), max(own[_PRICES])
        if len(window):
            low = min(low, int(window[:, _PRICES].min()))
            high = max(high, int(window[:, _PRICES].max()))
        unknown = NO_VOLUME if self._anchor is None else self._anchor.volume
        volumes = np.concatenate([window[:, _VOLUME], np.array([own[_VOLUME]], np.int64)])
        return low, high, typical_volume(volumes, unknown)

    def _begin_again(self, factor: float) -> None:
        """Adjust the window to a split, or empty it, where the ``factor`` is 0 or too large."""
        self._anchor = None
        rows = self._rows[self._start : self._end].copy()
        try:
            for row in rows if factor > 0 else ():
                own = row.tolist()
                row[_PRICES], row[_VOLUME] = adjusted(own[_PRICES], Volume(*own[_VOLUME]), ratio_of(factor))
        except ArithmeticError:
            factor = 0.0
        if factor > 0:
            self._rows[self._start : self._end] = rows
        else:
            self._start, self._tokens, self._inexact = self._end, 0, 0

    def _restart(self, bar: Bars) -> Restart:
        """Make room for ``bar`` (BAR [1]), choose the anchor for both, and encode the window around it."""
        spec, event = self._spec, int(bar["ts_last_event"][0])
        events = self._rows[self._start : self._end, _EVENT]
        beyond = len(events) + 1 - spec.records if spec.records else 0
        if spec.span_ns:
            inside = events >= event - spec.span_ns
            beyond = max(beyond, int(inside.argmax()) if inside.any() else len(events))
        self._start += max(beyond, 0)
        low, high, volume = self._extent(bar[0])
        self._anchor = anchor = anchor_for(low, high, volume, spec)
        self.anchors += 1
        self._age = 0
        rows = self._rows[self._start : self._end]
        kept = np.zeros(len(rows) + 1, BAR)
        kept[-1] = bar[0]
        for column, name in enumerate(_NAMES):
            kept[name][:-1] = rows[:, column]
        fields, _, marks = _encode(kept, anchor)
        lines = self._tokeniser.compact(fields)
        rows[:, _TOKENS] = [len(line) for line in lines[:-1]]
        rows[:, _INEXACT] = marks[:-1] & _ROUNDED
        # other numbers may be more tokens, where the tokenizer has no token for every group of digits
        first, tokens = 0, sum(map(len, lines))
        while tokens > spec.tokens and first < len(rows):
            tokens -= len(lines[first])
            first += 1
        self._start += first
        self._tokens, self._inexact = tokens - len(lines[-1]), int(rows[first:, _INEXACT].sum())
        window = zip(lines[first:-1], rows[first:, _EVENT].tolist(), strict=True)
        return Restart(anchor, tuple((tuple(line), event) for line, event in window))


def _decimals(value: int, scale: int) -> int:
    """Decimals that print ``value``, in 10^-``scale``, exactly."""
    digits = f"{value % 10**scale:0{scale}d}" if scale else ""
    return len(digits.rstrip("0"))


def units_in(text: str, scale: int) -> int:
    """Plain decimal text in units of 10^-``scale``. Raises ValueError where it is finer, or no such text."""
    whole, _, fraction = text.partition(".")
    if len(fraction) > scale:
        raise ValueError(f"{text!r} has more than {scale} decimals")
    return int(whole + fraction.ljust(scale, "0"))


def _encode(bars: Bars, anchor: Anchor) -> tuple[Fields, int, Flags]:
    """Levels and codes [bars, 5] of the first bars, how many of them fit, and their marks [bars]."""
    fields, marks = np.empty((len(bars), 5), np.int64), np.zeros(len(bars), np.uint8)
    lowest = anchor.reference // anchor.unit - CENTRE
    fitting: int = _fill_fields(bars, lowest, anchor.unit, anchor.volume / LOW, _BOUNDS, fields, marks)
    return fields, fitting, marks


@kernel
def _fill_fields(
    bars: Bars, lowest: int, unit: int, volume: float, bounds: Floats, fields: Fields, marks: Flags
) -> int:
    """Levels, codes and marks of the bars before the first one outside the levels; returns how many.

    ``volume``, the anchor's, in 1e-9.
    """
    for r in range(bars.shape[0]):
        bar = bars[r]
        for f in range(4):
            price = bar["o"]
            if f == 1:
                price = bar["h"]
            elif f == 2:
                price = bar["l"]
            elif f == 3:
                price = bar["c"]
            if price % unit:
                marks[r] |= _ROUNDED
            level = whole_units(price, unit) - lowest
            if level < 0 or level > HIGHEST:
                return r
            fields[r, f] = level
        fields[r, 4] = 0
        traded = bar["v_high"] * float(HIGH) + bar["v"] + bar["v_low"] / LOW
        if traded > 0:
            code = np.searchsorted(bounds, traded / volume, side="right")
            fields[r, 4] = min(max(code, 1), HIGHEST)
            if fields[r, 4] != code:
                marks[r] |= _SATURATED
    return len(bars)


@kernel
def _retain(
    bars: Bars, lengths: Ints, marks: Flags, rows: Ints, start: int, end: int, tokens: int, inexact: int,
    max_tokens: int, max_records: int, span_ns: int, shown: npt.NDArray[np.bool_],
) -> tuple[int, int, int, int, int]:  # fmt: skip
    """Add the first bars at row ``end``, one by one, and evict as `regions.tape.Tape.make_room` does.

    Returns the new start, tokens and number of rounded rows; and of the new bars, how many are rounded and
    how many have a saturated volume.
    """
    rounded, saturated = 0, 0
    for i in range(len(lengths)):
        new, bar = end + i, bars[i]
        row = rows[new]
        row[0], row[1], row[2], row[3] = bar["o"], bar["h"], bar["l"], bar["c"]
        row[4], row[5], row[6] = bar["v_high"], bar["v"], bar["v_low"]
        row[_EVENT], row[_TOKENS], row[_INEXACT] = bar["ts_last_event"], lengths[i], marks[i] & _ROUNDED
        while start < new and (
            tokens + row[_TOKENS] > max_tokens
            or (max_records > 0 and new + 1 - start > max_records)
            or (span_ns > 0 and rows[start, _EVENT] < row[_EVENT] - span_ns)
        ):
            tokens -= rows[start, _TOKENS]
            inexact -= rows[start, _INEXACT]
            start += 1
        tokens += row[_TOKENS]
        inexact += row[_INEXACT]
        rounded += row[_INEXACT]
        saturated += marks[i] // _SATURATED
        shown[i] = inexact > 0
    return start, tokens, inexact, rounded, saturated
