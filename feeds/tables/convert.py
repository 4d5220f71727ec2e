"""Tables to columns of records, many rows at a time; what is not plain is left to the readers of rows.

A row that is taken holds what `RowReader` would read from it, and one that it would refuse is never taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from feeds.codec import SIZES, YEAR_1990, YEAR_2100, is_name
from feeds.columns.decode import COLUMNS, Columns
from feeds.columns.decode_kernel import BUY, QUOTE, SELL, TRADE, UNKNOWN, tokens_of_numbers, tokens_of_texts
from feeds.columns.record_columns import Keys
from feeds.columns.text_kernel import Words, instants_of, spans, units_of
from feeds.decimals import FLOAT_NOISE, FLOAT_UNITS, NANO, SCALE, BinaryFloat, parse_fixed, to_units
from feeds.file_format import NUMBERS, PRICES, FileFormat, Kind, Match
from feeds.row_records import RowReader
from feeds.tables.table import Column, Integers, Table
from feeds.timestamps import EPOCH_UNITS
from feeds.wall_times import fixed_offset, parse_zone

PLAIN_KINDS: tuple[Kind, ...] = ("trade", "quote")
"""Kinds of records that columns hold."""
_LIMIT = 9_200_000_000 * 10**9
_NONE = -(2**63)
"""Of a number that is not read here."""
_SIDES = {"unknown": UNKNOWN, "buy": BUY, "sell": SELL}
_ULP = 2.0**-52
_MAX_KEYS = 1 << 20
Bools = npt.NDArray[np.bool_]


class Unusual(Exception):
    """A table is left to the readers of rows."""


@dataclass(frozen=True)
class TableReader:
    """Reads the tables of one format as columns."""

    readers: Sequence[RowReader]
    form: FileFormat

    @classmethod
    def compile(cls, form: FileFormat, readers: Sequence[RowReader]) -> "TableReader | None":
        """None where each row may need a look at others, or a text may stand for no value of a number."""
        if any(character.isdigit() for word in form.null for character in word):
            return None
        for each in form.records:
            if each.kind == "bar" and each.ready:
                return None
            if each.time.format not in EPOCH_UNITS and _offset(each.time.zone) is None:
                return None
        return cls(readers, form)

    def read(self, table: Table) -> tuple[Columns, Keys]:
        """COLUMNS [rows of the table]; ``taken`` is 0 where a row is left to the readers of rows."""
        rows = np.zeros(table.length, COLUMNS)
        names: list[str] = []
        left = np.ones(table.length, np.bool_)
        try:
            for reader in self.readers:
                covered = left & _matching(reader.form.match, table)
                left &= ~covered
                if reader.form.kind in PLAIN_KINDS and covered.any():
                    _fill(rows, names, reader, table, covered)
        except Unusual:
            rows["taken"] = 0
        return rows, Keys(names)


def _offset(zone: str) -> int | None:
    """The offset of a zone that has only one, ns."""
    found = fixed_offset(parse_zone(zone))
    if isinstance(found, int):
        return found
    return 0 if zone in ("UTC", "GMT") else None


def _fill(rows: Columns, names: list[str], reader: RowReader, table: Table, covered: Bools) -> None:
    form, length = reader.form, table.length
    at = slice(None) if covered.all() else covered
    event = _times(reader, table)
    received = event if table.received is None else np.where(table.received > 0, table.received, event)
    taken = covered & _plausible_times(event) & _plausible_times(received)
    keys = _keys(reader, table, names)
    taken &= keys >= 0
    trade = form.kind == "trade"
    none = np.zeros(length, np.int64)
    members = NUMBERS[form.kind]
    values = [_numbers(reader, name, table) if name in form.fields else none for name in members]
    side = np.full(length, UNKNOWN, np.int64)
    if trade:
        side = _sides(reader, table)
        if form.signed:
            size = values[1]
            side = np.where(size < 0, SELL, np.where(size > 0, BUY, UNKNOWN))
            values[1] = np.where(size == _NONE, size, np.abs(size))
        taken &= side >= 0
        rows["token"][at] = _tokens(reader, table)[at]
    if "seq" in form.fields:
        numbers = _column(table, form.fields["seq"])
        if numbers.kind != "decimal" or numbers.scale:
            raise Unusual
        taken &= _where_valid(numbers, numbers.values) >= 0
        rows["seq"][at] = np.maximum(numbers.values, 0)[at]
    for name, found in zip(members, values, strict=True):
        taken &= (found >= (name in PRICES)) & (found <= _LIMIT)
    for column, found in zip("abcd", values, strict=False):
        rows[column][at] = found[at]
    rows["kind"][at] = TRADE if trade else QUOTE
    more: dict[str, npt.NDArray[Any]] = {
        "ts_event": event, "ts_recv": received, "key": keys, "x": side, "taken": taken
    }  # fmt: skip
    for column, made in more.items():
        rows[column][at] = made[at]


def _plausible_times(times: Integers) -> Bools:
    return (times >= YEAR_1990) & (times < YEAR_2100)


def _matching(match: Match | None, table: Table) -> Bools:
    if match is None:
        return np.ones(table.length, np.bool_)
    column = table.columns.get(str(match.field))
    if column is None:
        return np.zeros(table.length, np.bool_)
    column = _as_words(column)
    hits = [match.covers(word) for word in column.words]
    found: Bools = np.array([*hits, False])[column.values]
    return found if column.valid is None else found & column.valid


def _by_word(column: Column, read: Callable[[str], int], plain: Integers | None = None) -> Integers:
    """What ``read`` makes of each text; `_NONE` where there is none, or it raises ValueError.

    ``plain`` has it already of some words, and -1 of the others.
    """
    made = np.full(len(column.words) + 1, _NONE, np.int64)
    left: Sequence[int] = range(len(column.words))
    if plain is not None:
        made[:-1] = np.where(plain < 0, _NONE, plain)
        left = np.flatnonzero(plain < 0).tolist()
    for at in left:
        try:
            made[at] = read(column.words[at])
        except (ValueError, OverflowError):
            continue
    return _where_valid(column, made[column.values])


def _where_valid(column: Column, values: Integers) -> Integers:
    return values if column.valid is None else np.where(column.valid, values, _NONE)


def _times(reader: RowReader, table: Table) -> Integers:
    form = reader.form.time
    if len(reader.form.time.refs) > 1 or reader.parse_time is None:
        raise Unusual
    column, parse = _column(table, form.field), reader.parse_time
    if column.kind == "text":
        plain = reader.values.plain if form.counts else None

        def read(text: str) -> int:
            moment = parse(text if plain is None else plain(text))
            return _NONE if text in reader.values.null or moment.fold_ns else moment.ns

        return _by_word(column, read, instants_of(column.words) if form.format == "iso" else None)
    values: Integers = column.values
    if column.kind == "decimal" and form.format in EPOCH_UNITS:
        unit, finer = divmod(EPOCH_UNITS[form.format], 10**column.scale)
        if finer:
            raise Unusual
        inside = (values >= YEAR_1990 // unit) & (values < YEAR_2100 // unit)
        return _where_valid(column, np.where(inside, values * unit, _NONE))
    if form.format == "iso" and column.kind in ("instant", "wall"):
        return _where_valid(
            column, values if column.kind == "instant" else values - (_offset(form.zone) or 0)
        )
    raise Unusual


def _numbers(reader: RowReader, name: str, table: Table) -> Integers:
    """The numbers of a field in units of 1e-9."""
    form = reader.form
    column = _column(table, form.fields[name])
    if column.kind == "text":

        def read(text: str) -> int:
            units = _NONE if text in reader.values.null else to_units(reader.values.read_number(name, text))
            return _NONE if units is None else units

        changed = form.implied_decimals if name in PRICES else form.multiplier
        is_plain = reader.values.plain is None and not changed and not _has_floats(column)
        return _by_word(column, read, units_of(column.words) if is_plain else None)
    if column.kind == "float":
        if name not in form.float_decimals:
            raise Unusual
        rounded = _rounded(column.values, form.float_decimals[name])
        return _where_valid(column, _multiplied(reader, name, rounded))
    if column.kind != "decimal":
        raise Unusual
    scale = column.scale + (form.implied_decimals if name in PRICES else 0)
    values: Integers = column.values
    if scale <= NANO:
        factor = 10 ** (NANO - scale)
        most = _LIMIT // factor
        found = np.where((values <= most) & (values >= -most), values * factor, _NONE)
    else:
        units, rest = np.divmod(values, 10 ** min(scale - NANO, 18))
        found = np.where((rest == 0) & (scale - NANO <= 18), units, _NONE)
    return _where_valid(column, _multiplied(reader, name, found))


def _multiplied(reader: RowReader, name: str, units: Integers) -> Integers:
    """Sizes times the declared multiplier; `_NONE` where that is not in whole units."""
    if not reader.form.multiplier or name not in SIZES:
        return units
    times, of = Fraction(parse_fixed(reader.form.multiplier), SCALE).as_integer_ratio()
    most = _LIMIT // times
    whole, rest = np.divmod(units, of)
    fits = (units != _NONE) & (rest == 0) & (whole <= most) & (whole >= -most)
    return np.where(fits, np.where(fits, whole, 0) * min(times, _LIMIT), _NONE)


def _has_floats(column: Column) -> bool:
    words = column.words
    return not isinstance(words, Words) and any(type(word) is BinaryFloat for word in words)


def _rounded(values: Any, decimals: int) -> Integers:
    """Floats in units of 1e-9, where it is beyond doubt that `fixed_of_float` takes them."""
    with np.errstate(all="ignore"):
        units = values * 10.0**decimals
        nearest = np.rint(units)
        near = np.abs(units - nearest) <= float(FLOAT_NOISE) / 2 + np.abs(units) * _ULP
        most = min(FLOAT_UNITS - 1, _LIMIT // 10 ** (NANO - decimals))
        near &= np.abs(nearest) <= most  # not of NaN
        whole = np.where(near, nearest, 0).astype(np.int64)
    return np.where(near, whole * 10 ** (NANO - decimals), _NONE)


def _keys(reader: RowReader, table: Table, names: list[str]) -> Integers:
    """Numbers of symbols among ``names``, to which they are added; -1 for one that is no name."""
    form = reader.form
    found: list[tuple[Integers, Sequence[str]]] = []
    for name in ("venue", "symbol"):
        if name not in form.fields:
            constant = getattr(form, name)
            found.append((np.full(table.length, is_name(constant) - 1, np.int64), [constant]))
            continue
        column = _as_words(_column(table, form.fields[name]))
        usable = [is_name(word) and word not in reader.values.null for word in column.words]
        places = np.where(np.array([*usable, False])[column.values], column.values, -1)
        found.append((_where_valid(column, places), column.words))
    (venues, venue_words), (symbols, symbol_words) = found
    if len(venue_words) * len(symbol_words) > _MAX_KEYS:
        raise Unusual
    base = len(names)
    names += [f"{venue}:{symbol}" for venue in venue_words for symbol in symbol_words]
    good = (venues >= 0) & (symbols >= 0)
    return np.where(good, base + venues * len(symbol_words) + symbols, -1)


def _sides(reader: RowReader, table: Table) -> Integers:
    """Codes of sides; `_NONE` where a word means none that is known."""
    ref = reader.form.fields.get("side")
    if ref is None:
        return np.full(table.length, UNKNOWN, np.int64)
    column = _as_words(_column(table, ref))
    values = dict.fromkeys(reader.values.null, UNKNOWN) | {
        word: _SIDES[side] for word, side in reader.form.side_values.items() if word not in reader.values.null
    }
    found = _by_word(column, lambda word: values.get(word, _NONE))
    if column.valid is None or not reader.values.null:
        return found
    return np.where(column.valid if column.absent is None else column.valid | column.absent, found, UNKNOWN)


def _tokens(reader: RowReader, table: Table) -> npt.NDArray[np.uint32]:
    """The tokens of ids."""
    tokens = np.zeros(table.length, np.uint32)
    ref = reader.form.fields.get("id")
    column = None if ref is None else table.columns.get(str(ref))
    if column is None:
        return tokens
    if column.kind == "decimal" and not column.scale and (column.values >= 0).all():
        tokens_of_numbers(column.values, tokens)
    else:
        column = _as_words(column)
        words = column.words
        if reader.values.null:
            words = ["" if word in reader.values.null else word for word in words]
        made = np.zeros(len(words) + 1, np.uint32)
        tokens_of_texts(*spans(words), made)
        tokens = made[column.values]
    return tokens if column.valid is None else np.where(column.valid, tokens, np.uint32(0))


def _as_words(column: Column) -> Column:
    """A column of texts: of whole numbers their digits."""
    if column.kind == "text":
        return column
    if column.kind != "decimal" or column.scale:
        raise Unusual
    numbers, places = np.unique(column.values, return_inverse=True)
    return Column(
        "text", places, words=list(map(str, numbers.tolist())), valid=column.valid, absent=column.absent
    )


def _column(table: Table, ref: object) -> Column:
    column = table.columns.get(str(ref))
    if column is None:
        raise Unusual
    return column
