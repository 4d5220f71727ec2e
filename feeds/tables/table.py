"""Columns of a table as exact numbers and words, and its rows as text for the readers of lines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feeds.codec import MalformedRecord
from feeds.decimals import BinaryFloat
from feeds.file_format import Ref
from feeds.number_texts import JsonNumber

Integers = npt.NDArray[np.int64]
ColumnKind = Literal["decimal", "float", "instant", "wall", "text"]
_SECOND_NS = 10**9


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a table.

    ``values``: units of 10^-``scale`` of a ``decimal``; ns since 1970 of an ``instant``, or of a clock on the
    ``wall``; places in ``words`` of a ``text``; floats. ``valid``: where it has a value; None: everywhere.
    ``absent``: where not even null stands, which only documents know.
    """

    kind: ColumnKind
    values: npt.NDArray[Any]
    scale: int = 0
    words: Sequence[str] = ()
    valid: npt.NDArray[np.bool_] | None = None
    absent: npt.NDArray[np.bool_] | None = None

    def text(self, at: int) -> str | None:
        """The value in a row as exact text; None if it has none."""
        if self.valid is not None and not self.valid[at]:
            return None
        if self.kind == "float":
            return BinaryFloat(repr(float(self.values[at])))
        value = int(self.values[at])
        if self.kind == "text":
            return self.words[value]
        if self.kind == "decimal":
            return JsonNumber(_decimal_text(value, self.scale))
        seconds, ns = divmod(value, _SECOND_NS)
        return f"{np.datetime64(seconds, 's')}.{ns:09d}{'Z' if self.kind == 'instant' else ''}"


def words_column(texts: Sequence[str | None]) -> Column:
    """A column of these texts."""
    found = dict.fromkeys(texts)
    found.pop(None, None)
    words = [text for text in found if text is not None]
    places: dict[str | None, int] = {None: -1} | {word: at for at, word in enumerate(words)}
    values = np.fromiter(map(places.__getitem__, texts), np.int64, len(texts))
    return Column("text", values, words=words, valid=values >= 0)


def _decimal_text(units: int, scale: int) -> str:
    if not scale:
        return str(units)
    digits = f"{abs(units):0{scale + 1}d}"
    return f"{'-' if units < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of a file. ``first``: the number of the first, from 1. ``received``: times, ns, if known."""

    first: int
    length: int
    columns: Mapping[str, Column] = field(default_factory=dict)
    received: Integers | None = None

    def row(self, at: int) -> "TableRow":
        """One row, from 0."""
        received = 0 if self.received is None else int(self.received[at])
        return TableRow(self.first + at, received, self, at)

    def rows(self) -> Iterator["TableRow"]:
        """All rows."""
        return map(self.row, range(self.length))


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table: see `feeds.file_rows.Row`."""

    line: int
    received: int
    table: Table
    at: int
    width = 0

    def get(self, ref: Ref) -> str | None:
        """The value in a column as text; None if there is none."""
        column = self.table.columns.get(str(ref))
        return None if column is None else column.text(self.at)

    def is_null(self, ref: Ref) -> bool:
        """Whether a column has no value."""
        column = self.table.columns.get(str(ref))
        return column is not None and column.valid is not None and not column.valid[self.at]

    def elements(self, ref: str, of: str = "") -> Sequence["TableRow"]:
        """There is none. Raises MalformedRecord."""
        raise MalformedRecord("type", f"a table has no array {ref}")
