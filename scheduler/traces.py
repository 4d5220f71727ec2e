"""Lines of JSON as objects; a line that cannot be used is named by its number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

T = TypeVar("T")


class TraceError(ValueError):
    """A line cannot be used; the message names it."""


def decoded(lines: Iterable[str | bytes], kind: type[T]) -> Iterator[tuple[int, T]]:
    """(number, object) of every line that is not blank. Raises TraceError for one that is no `kind`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, decoder.decode(line)
            except (msgspec.DecodeError, UnicodeError) as error:
                raise TraceError(f"line {number}: {error}") from None
