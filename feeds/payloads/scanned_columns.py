"""Values that compiled code found in payloads, as the columns of a table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feeds.columns.places import (
    ABSENT,
    BOOL,
    DIGITS,
    ENUM,
    FLOAT,
    INT,
    NULL,
    NUMBER,
    OTHER,
    SINGLE,
    TEXT,
    TIME,
    Integers,
    Scanned,
)
from feeds.columns.text_kernel import distinct, integers_of
from feeds.documents import ABSENT as NO_VALUE
from feeds.number_texts import JsonNumber
from feeds.payloads.tables import column_of
from feeds.tables.table import Column

_SECOND_NS = 10**9
_MAX_SECONDS = 9_000_000_000
Bools = npt.NDArray[np.bool_]


def _bits(*kinds: int) -> int:
    return sum(1 << kind for kind in kinds)


_NO_VALUE, _TEXTS = _bits(ABSENT, NULL, OTHER), _bits(TEXT, DIGITS, NUMBER)


class ScannedColumns:
    """The columns of some payloads. ``rows``: which. ``places``: of references."""

    def __init__(self, scanned: Scanned, rows: Integers, places: Mapping[str, int]) -> None:
        self._scanned, self._rows, self._places = scanned, rows, places
        self._every = len(rows) == len(scanned.read)

    def column(self, ref: str) -> Column | None:
        """The values at a reference; None where they have no one type."""
        place = self._places[ref]
        seen = int(self._scanned.seen[place])
        kinds = self._part(self._scanned.kinds[place])
        valid = kinds > OTHER if seen & _NO_VALUE else None
        made = self._of_one_kind(place, seen & ~_NO_VALUE, valid)
        if made is None:
            return column_of(ref, [self._value(place, row) for row in self._rows.tolist()])
        if not seen & _bits(ABSENT, OTHER):
            return made
        return replace(made, absent=(kinds == ABSENT) | (kinds == OTHER))

    def _part(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self._every else values[self._rows]

    def _of_one_kind(self, place: int, seen: int, valid: Bools | None) -> Column | None:
        """The column where one type has all values; None where they are of several."""
        a, b = self._part(self._scanned.a[place]), self._part(self._scanned.b[place])
        if seen == _bits(INT):
            return Column("decimal", a, valid=valid)
        if seen == _bits(DIGITS):
            return Column("decimal", integers_of(self._scanned.raw, a, b), valid=valid)
        if seen == _bits(FLOAT):
            return Column("float", a.view(np.float64), valid=valid)
        if seen == _bits(SINGLE):
            return Column("float", _of_singles(a), valid=valid)
        if seen == _bits(BOOL):
            return Column("text", a, words=("false", "true"), valid=valid)
        if seen == _bits(TIME):
            inside = (a >= 0) & (a < _MAX_SECONDS) & (b >= 0) & (b < _SECOND_NS)
            return Column("decimal", a * _SECOND_NS + b, scale=9, valid=valid) if inside.all() else None
        if seen == _bits(ENUM):
            return self._of_enum(place, a, valid)
        if seen & ~_TEXTS:
            return None
        codes, words = distinct(self._scanned.raw, a if valid is None else np.where(valid, a, -1), b)
        return Column("text", codes, words=words, valid=valid)

    def _of_enum(self, place: int, numbers: Integers, valid: Bools | None) -> Column | None:
        names = self._scanned.enums[place]
        known = np.array(sorted(names), np.int64)
        at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        if not ((known[at] == numbers) if valid is None else (known[at] == numbers) | ~valid).all():
            return None
        return Column("text", at, words=[names[number] for number in known.tolist()], valid=valid)

    def _value(self, place: int, row: int) -> Any:
        """A value as in a document."""
        kind, raw = int(self._scanned.kinds[place, row]), self._scanned.raw
        a, b = int(self._scanned.a[place, row]), int(self._scanned.b[place, row])
        if kind == FLOAT:
            return float(np.int64(a).view(np.float64))
        if kind == SINGLE:
            return float(_of_singles(np.array([a], np.int64))[0])
        if kind == ENUM:
            return self._scanned.enums[place].get(a, a)
        if kind == TIME:
            return JsonNumber(f"{a}.{b:09d}")
        if kind in (TEXT, DIGITS, NUMBER):
            text = raw[a:b].decode()
            return text if kind == TEXT else int(text) if kind == DIGITS else JsonNumber(text)
        plain = {ABSENT: NO_VALUE, NULL: None, OTHER: {}, BOOL: bool(a), INT: a}
        return plain[kind]


def _of_singles(bits: Integers) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of NaN that signals
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
