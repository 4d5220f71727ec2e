"""Documents as a table, many at a time: a column for each place that a format reads from."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feeds.codec import MalformedRecord
from feeds.decimals import BinaryFloat
from feeds.documents import member, text_of
from feeds.file_format import Ref
from feeds.tables.table import Column, Table, words_column

OfMessages = Callable[[str], Sequence[str | None] | None]
"""What comes with messages, by its place; None where the place is in their documents."""


def table_of(
    documents: Sequence[Any], refs: Iterable[Ref], received: npt.NDArray[np.int64], of_messages: OfMessages
) -> Table | None:
    """A row for each document, which is received at these times, ns; None where a column has no one type."""
    columns: dict[str, Column] = {}
    for ref in map(str, refs):
        given = of_messages(ref)
        column = words_column(given) if given is not None else _column(ref, values_at(documents, ref))
        if column is None:
            return None
        columns[ref] = column
    return Table(1, len(documents), columns, received)


def values_at(documents: Sequence[Any], ref: str) -> list[Any]:
    """The values at a path; `ABSENT` where there is none."""
    values = list(documents)
    for at, name in enumerate(ref.split(".")):
        if at == 0 and name == "$":
            continue
        try:
            values = [value[name] for value in values]  # of objects that all have it
        except (KeyError, TypeError, IndexError):
            values = [member(value, name) for value in values]
    return values


def _column(ref: str, values: list[Any]) -> Column | None:
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return Column("decimal", np.array(values, np.int64))
        except OverflowError:
            return words_column([_text(ref, value) for value in values])
    if kinds == {float}:
        return Column("float", np.array(values, np.float64))
    if kinds == {str}:
        return words_column(values)
    if kinds == {bool}:
        return Column("text", np.array(values, np.int64), words=("false", "true"))
    texts = [_text(ref, value) for value in values]
    if float in kinds and any(type(text) is not BinaryFloat for text in texts if text is not None):
        return None  # equal texts would be one word
    return words_column(texts)


def _text(ref: str, value: Any) -> str | None:
    """Without a text where there is none that can be read: the row is read by itself then."""
    try:
        return text_of(ref, value)
    except MalformedRecord:
        return None
