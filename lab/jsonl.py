"""Decodes JSON lines; errors give the line number."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

T = TypeVar("T")


class TraceError(ValueError):
    """A line of a trace is invalid; the message gives its number."""


def decoded(lines: Iterable[str | bytes], kind: type[T]) -> Iterator[tuple[int, T]]:
    """(number, object) of each line that is not blank. Raises TraceError for a line that is not a `kind`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, decoder.decode(line)
            except (msgspec.DecodeError, UnicodeError) as error:
                raise TraceError(f"line {number}: {error}") from None
