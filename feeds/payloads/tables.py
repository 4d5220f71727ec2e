"""Values of documents, many at a time, as a column of a table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from feeds.codec import MalformedRecord
from feeds.decimals import BinaryFloat
from feeds.documents import member, text_of
from feeds.tables.table import Column, words_column


def document_column(documents: Sequence[Any], ref: str) -> Column | None:
    """The values of documents at a path; None where they have no one type."""
    return column_of(ref, values_at(documents, ref))


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


def column_of(ref: str, values: list[Any]) -> Column | None:
    """A column of values of documents; None where equal texts would be one word."""
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
    if float in kinds:
        floats = {text for text in texts if type(text) is BinaryFloat}
        if any(text in floats for text in texts if type(text) is not BinaryFloat):
            return None
    absent = [value is not None and text is None for value, text in zip(values, texts, strict=True)]
    return replace(words_column(texts), absent=np.array(absent) if any(absent) else None)


def _text(ref: str, value: Any) -> str | None:
    """Without a text where there is none that can be read: the row is read by itself then."""
    try:
        return text_of(ref, value)
    except MalformedRecord:
        return None
