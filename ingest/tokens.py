"""Bars to token ids by table look-up, where the tokenizer allows it.

For tokenizers that split numbers into groups of three digits (Llama 3) or single digits (Qwen), table
look-ups of digit groups and three separators give the ids of a line. At start the tables are built from the
tokenizer and compared with it on random lines, single and joined. On any difference (GPT-2's unlimited digit
runs, a merge across a separator) every line goes through the tokenizer instead: slower, never wrong. Compact
lines, five groups of three digits each, have a table and a comparison of their own.
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ingest.bar_kernel import AMENDS, BAR, EMPTY, ROLLED, Bars
from ingest.lines import DAY_NS, MINUTE_NS, LineSpec, bar_line
from support.numba_kernel import kernel

Ids = npt.NDArray[np.int32]
Fields = npt.NDArray[np.int64]
"""Numbers from 0 to 999, [bars, 5]."""
Encode = Callable[[str], Sequence[int]]

# Characters of the longest line: six digits, then five numbers of sign, 19 digits, point and separator.
MAX_LINE_TOKENS = 6 + 5 * 22
MAX_COMPACT_TOKENS = 5 * 3 + 1
NANO = 9
"""Decimals of the unit of `v`."""
_SELF_TEST_LINES = 1024
_JOINED = 16


class DigitTables(NamedTuple):
    """Token ids of digit groups. Row i of `digits[w-1]`: number of ids, then the ids, of i in w digits."""

    group: int  # digits of a full group: 3 or 1
    one: Ids
    two: Ids
    three: Ids
    separators: Ids  # ids of ".", ",", "\n"


@kernel
def _put(out: Ids, at: int, table: Ids, row: int) -> int:
    for k in range(table[row, 0]):
        out[at] = table[row, 1 + k]
        at += 1
    return at


@kernel
def _put_digits(out: Ids, at: int, digits: Ids, n: int, group: int, one: Ids, two: Ids, three: Ids) -> int:
    """Ids of a run of `n` digits, grouped from the left."""
    i = 0
    if group == 3:
        while n - i >= 3:
            at = _put(out, at, three, digits[i] * 100 + digits[i + 1] * 10 + digits[i + 2])
            i += 3
        if n - i == 2:
            return _put(out, at, two, digits[i] * 10 + digits[i + 1])
    while i < n:
        at = _put(out, at, one, digits[i])
        i += 1
    return at


@kernel
def _split_digits(value: int, width: int, digits: Ids) -> int:
    """Decimal digits of `value` left to right, at least `width`; returns how many."""
    n = width
    rest = value
    for _ in range(width):
        rest //= 10
    while rest > 0:
        rest //= 10
        n += 1
    for i in range(n):
        digits[n - 1 - i] = value % 10
        value //= 10
    return n


@kernel
def whole_units(value: int, unit: int) -> int:
    """`ingest.lines.round_half_even` as a kernel; nothing in it exceeds `value` and `unit`."""
    whole = value // unit
    rest = value - whole * unit
    half = unit - rest
    if rest > half or (rest == half and whole % 2 == 1):
        whole += 1
    return whole


@kernel
def _fill_tokens(
    bars: Bars, price_decimals: int, volume_decimals: int, price_unit: int, volume_unit: int, group: int,
    one: Ids, two: Ids, three: Ids, separators: Ids, out: Ids, ends: npt.NDArray[np.int64],
) -> None:  # fmt: skip
    """Ids of every line into `out`, the end of line r into `ends[r]`. Numbers are 0 or more.

    The units are those of the last decimal printed, in units of the bars' own.
    """
    digits = np.empty(24, np.int32)
    fraction = np.empty(24, np.int32)
    at = 0
    for r in range(bars.shape[0]):
        bar = bars[r]
        seconds = bar["ts_open"] // 1_000_000_000 % 86400
        clock = seconds // 3600 * 100 + seconds // 60 % 60
        width = 4
        if bar["interval"] < MINUTE_NS:
            clock = clock * 100 + seconds % 60
            width = 6
        n = _split_digits(clock, width, digits)
        at = _put_digits(out, at, digits, n, group, one, two, three)
        for f in range(5):
            out[at] = separators[1]
            at += 1
            value = bar["o"]
            if f == 1:
                value = bar["h"]
            elif f == 2:
                value = bar["l"]
            elif f == 3:
                value = bar["c"]
            elif f == 4:
                value = bar["v"]
            decimals, unit = price_decimals, price_unit
            if f == 4:
                decimals, unit = volume_decimals, volume_unit
            n = _split_digits(whole_units(value, unit), decimals + 1, digits)
            at = _put_digits(out, at, digits, n - decimals, group, one, two, three)
            if decimals > 0:
                out[at] = separators[0]
                at += 1
                for k in range(decimals):
                    fraction[k] = digits[n - decimals + k]
                at = _put_digits(out, at, fraction, decimals, group, one, two, three)
        out[at] = separators[2]
        at += 1
        ends[r] = at


class GroupTable(NamedTuple):
    """Token ids of three digits; row i: number of ids, then the ids."""

    three: Ids
    newline: int


@kernel
def _fill_groups(fields: Fields, three: Ids, newline: int, out: Ids, ends: npt.NDArray[np.int64]) -> None:
    """Ids of every compact line into `out`, the end of line r into `ends[r]`."""
    at = 0
    for r in range(fields.shape[0]):
        for f in range(fields.shape[1]):
            at = _put(out, at, three, fields[r, f])
        out[at] = newline
        at += 1
        ends[r] = at


class Tokeniser:
    """Token ids of bar lines. `encode` returns the ids of a text without special tokens.

    ``plain`` gives a text of somebody else's without what `encode` reads as special tokens.
    """

    def __init__(self, encode: Encode, plain: Callable[[str], str] = str) -> None:
        self._encode = self.encode = encode
        self.plain = plain
        self._groups = build_groups(encode)
        candidates = (build_tables(encode, group) for group in (3, 1))
        self._tables = next((each for each in candidates if each and agrees(each, encode)), None)

    @property
    def fast(self) -> bool:
        """Whether lines are encoded by table look-up: the tables agreed with `encode`."""
        return self._tables is not None

    @property
    def fast_compact(self) -> bool:
        """As `fast`, for compact lines."""
        return self._groups is not None

    def compact(self, fields: Fields) -> list[list[int]]:
        """Token ids of each compact line, for fields [n, 5]."""
        if self._groups is not None:
            return look_up_groups(self._groups, fields)
        return [list(self._encode(compact_line(row))) for row in fields.tolist()]

    def lines(self, bars: Bars, spec: LineSpec) -> list[list[int]]:
        """Token ids of each bar's line, for BAR [n]."""
        is_looked_up = self._tables is not None and spec.form == "decimal" and spec.volume_decimals <= NANO
        if self._tables is None or not is_looked_up or _any_negative(bars):
            return [list(self._encode(bar_line(bar, spec))) for bar in bars]
        lines = look_up(self._tables, bars, spec)
        if spec.symbols:
            heads = [list(self._encode(f"{symbol},")) for symbol in spec.symbols]
            lines = [heads[leg] + line for leg, line in zip(bars["leg"].tolist(), lines, strict=True)]
        in_words = (bars["flags"] & (AMENDS | ROLLED | (EMPTY if spec.says_empty else 0))) != 0
        wide = (bars["v_high"] | bars["v_low"]) != 0
        in_words |= spec.dates | (bars["interval"] >= DAY_NS)
        for number in np.flatnonzero(in_words | wide).tolist():
            lines[number] = list(self._encode(bar_line(bars[number], spec)))
        return lines


def look_up(tables: DigitTables, bars: Bars, spec: LineSpec) -> list[list[int]]:
    """Ids of BAR [n] (no number negative) by table; the volume is that of `v` alone, of up to 9 decimals."""
    out = np.empty(len(bars) * MAX_LINE_TOKENS, np.int32)
    ends = np.empty(len(bars), np.int64)
    price_unit = 10 ** (spec.price_scale - spec.price_decimals)
    volume_unit = 10 ** (NANO - spec.volume_decimals)
    _fill_tokens(bars, spec.price_decimals, spec.volume_decimals, price_unit, volume_unit, *tables, out, ends)
    return _split(out, ends)


def _split(out: Ids, ends: npt.NDArray[np.int64]) -> list[list[int]]:
    """Ids of each line, which end at ``ends``."""
    starts = [0, *ends.tolist()]
    ids: list[int] = out[: starts[-1]].tolist()
    return [ids[a:b] for a, b in pairwise(starts)]


def compact_line(fields: Sequence[int]) -> str:
    """The line of five numbers from 0 to 999."""
    return "".join(f"{field:03d}" for field in fields) + "\n"


def look_up_groups(groups: GroupTable, fields: Fields) -> list[list[int]]:
    """Ids of compact lines by table, for fields [n, 5]."""
    out = np.empty(len(fields) * MAX_COMPACT_TOKENS, np.int32)
    ends = np.empty(len(fields), np.int64)
    _fill_groups(fields, groups.three, groups.newline, out, ends)
    return _split(out, ends)


def build_groups(encode: Encode, seed: int = 0) -> GroupTable | None:
    """The table of compact lines; None if it differs from `encode` on random lines or on flat bars."""
    three = _digit_table(encode, 3)
    newline = list(encode("\n"))
    if three is None or len(newline) != 1:
        return None
    groups = GroupTable(three, newline[0])
    drawn = np.random.default_rng(seed).integers(0, 1000, (_SELF_TEST_LINES, 5))
    flat = np.repeat(np.arange(1000)[:, None], 5, axis=1)  # as of bars without a trade
    for fields in np.array_split(np.concatenate([drawn, flat]), 2 * _SELF_TEST_LINES // _JOINED):
        texts, ids = list(map(compact_line, fields.tolist())), look_up_groups(groups, fields)
        if [list(encode(text)) for text in texts] != ids:
            return None
        if list(encode("".join(texts))) != [token for line in ids for token in line]:
            return None
    return groups


def build_tables(encode: Encode, group: int) -> DigitTables | None:
    """Tables for digit groups of 3 or 1; None if a separator or group has no ids of its own."""
    one, two, three = (_digit_table(encode, width) for width in (1, 2, 3))
    if one is None or two is None or three is None:
        return None
    separators = []
    for character in ".,\n":
        ids = list(encode(f"1{character}2"))
        if len(ids) != 3 or ids[0] != one[1, 1] or ids[2] != one[2, 1]:
            return None
        separators.append(ids[1])
    return DigitTables(group, one, two, three, np.array(separators, np.int32))


def agrees(tables: DigitTables, encode: Encode, seed: int = 0) -> bool:
    """Whether the tables agree with `encode` on random lines, one by one and joined."""
    source = random.Random(seed)
    for _ in range(_SELF_TEST_LINES // _JOINED):
        bars = np.zeros(_JOINED, BAR)
        interval = source.choice((MINUTE_NS, MINUTE_NS // 60))
        for bar in bars:
            bar["interval"] = interval
            bar["ts_open"] = source.randrange(2 * 10**18)
            for name in "ohlcv":
                bar[name] = source.randrange(10 ** source.randrange(19))
        scale = source.randrange(19)
        spec = LineSpec(source.randrange(scale + 1), source.randrange(10), price_scale=scale)
        ids = look_up(tables, bars, spec)
        texts = [bar_line(bar, spec) for bar in bars]
        if any(list(encode(text)) != line for text, line in zip(texts, ids, strict=True)):
            return False
        if list(encode("".join(texts))) != [token for line in ids for token in line]:
            return False
    return True


def _digit_table(encode: Encode, width: int) -> Ids | None:
    """Row i: number of ids, then ids, of i in `width` digits; None when one needs more ids than digits."""
    table = np.zeros((10**width, 1 + width), np.int32)
    for i in range(10**width):
        ids = list(encode(f"{i:0{width}d}"))
        if not 0 < len(ids) <= width:
            return None
        table[i, : 1 + len(ids)] = [len(ids), *ids]
    return table


def _any_negative(bars: Bars) -> bool:
    return any(bool((bars[name] < 0).any()) for name in ("o", "h", "l", "c", "v", "ts_open"))
