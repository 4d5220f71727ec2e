"""A query stream from JSON lines: {"tokens": [1, 2], "arrival": 0} or {"text": "ab", "arrival": 0}."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from scheduler.theory.query_stream import QueryStream


class TraceError(ValueError):
    """A line cannot be used; the message names it."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    arrival: float
    tokens: tuple[int, ...] | None = None
    text: str | None = None


def read_trace(lines: Iterable[str | bytes]) -> QueryStream:
    """Query i is the i-th line that is not blank. A text's tokens are its characters.

    Raises TraceError when a line is not of this form, when some give text and others tokens (they would
    never match), or when there is none.
    """
    decoder = msgspec.json.Decoder(_Line)
    prompts: list[tuple[int, ...]] = []
    arrivals: list[float] = []
    kinds: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise TraceError(f"line {number}: {error}") from None
        if (found.tokens is None) == (found.text is None):
            raise TraceError(f"line {number}: needs either `tokens` or `text`")
        if not found.tokens and not found.text:
            raise TraceError(f"line {number}: the prompt is empty")
        if found.arrival < 0:
            raise TraceError(f"line {number}: `arrival` is {found.arrival:g}; time begins at 0")
        kinds.add("text" if found.tokens is None else "tokens")
        if len(kinds) > 1:
            raise TraceError(f"line {number}: a trace gives either `tokens` or `text` on all lines")
        prompts.append(found.tokens if found.tokens is not None else tuple(map(ord, found.text or "")))
        arrivals.append(found.arrival)
    if not prompts:
        raise TraceError("the trace holds no query")
    return QueryStream(tuple(prompts), tuple(arrivals))
