"""The input of a simulation, from a synthetic workload or a trace.

A trace has one JSON object per line, in order of time:

    {"time_ns": 0, "request": 0, "op": "open", "segments": [[0, 512]], "last": false}

`segments` are runs of consecutive token ids, [first, count]; `tokens`, a list of ids, may be given instead.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import msgspec

from lab.jsonl import TraceError, decoded
from lab.simulation.tokens import MAX_ID, Segments
from scheduler.fair_queue import check_weight

Op = Literal["open", "append", "update"]


class Input(NamedTuple):
    """One piece of one request's prompt.

    `request` counts from 0 in order of opening. The first piece is an `open`; `append` adds tokens, `update`
    replaces all of them. `last` marks the piece that completes the prompt: the end of the retrieval.
    """

    time_ns: int
    request: int
    op: Op
    tokens: Segments
    last: bool
    max_tokens: int = 1
    """Tokens of the answer; read at the `open`, as ``tenant`` and ``weight``."""
    tenant: str = ""
    weight: float = 1.0


def merged(requests: Iterable[Sequence[Input]]) -> Iterator[Input]:
    """Merge the pieces of all requests in order of time, lazily: only open requests are in memory.

    Each request's pieces must be in order, and the requests in the order of their first pieces.
    """
    heap: list[tuple[int, int, int, Input]] = []
    for pieces in requests:
        first = pieces[0]
        while heap and heap[0][0] <= first.time_ns:
            yield heappop(heap)[-1]
        yield first
        for number, piece in enumerate(pieces[1:]):
            heappush(heap, (piece.time_ns, piece.request, number, piece))
    while heap:
        yield heappop(heap)[-1]


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    time_ns: int
    request: int
    op: Op
    segments: list[tuple[int, int]] | None = None
    tokens: list[int] | None = None
    last: bool = False
    max_tokens: int = 1
    tenant: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.time_ns < 0 or self.max_tokens < 1:
            raise ValueError("`time_ns` must be at least 0 and `max_tokens` at least 1")
        check_weight(self.weight)
        if (self.segments is None) == (self.tokens is None):
            raise ValueError("needs either `segments` or `tokens`")
        if any(first < 0 or n < 1 or first + n - 1 > MAX_ID for first, n in self.runs):
            raise ValueError(f"a segment is [first id, count of at least 1], with ids from 0 to {MAX_ID}")

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        return self.segments if self.segments is not None else [(token, 1) for token in self.tokens or ()]


def read_trace(lines: Iterable[str | bytes]) -> Iterator[Input]:
    """Read the inputs of a trace, lazily; requests are numbered from 0 in order of opening.

    Raises TraceError, with the line's number, for a malformed line, for times that run backwards, and for a
    piece of a request that is not open; at the end also for requests left unfinished.
    """
    live: dict[int, int] = {}
    lengths: dict[int, int] = {}
    opened = newest = number = 0
    for number, found in decoded(lines, _Line):
        if found.time_ns < newest:
            raise TraceError(f"line {number}: time runs backwards, {found.time_ns} after {newest}")
        newest = found.time_ns
        if (found.op == "open") == (found.request in live):
            state = "is open already" if found.op == "open" else "is not open"
            raise TraceError(f"line {number}: request {found.request} {state}")
        if found.op == "open":
            live[found.request] = opened
            opened += 1
        prompt = Segments(range(first, first + n) for first, n in found.runs)
        kept = lengths.get(found.request, 0) if found.op == "append" else 0
        lengths[found.request] = kept + len(prompt)
        if found.last and not lengths.pop(found.request):
            raise TraceError(f"line {number}: request {found.request} is finished without a token")
        yield Input(
            found.time_ns,
            live[found.request],
            found.op,
            prompt,
            found.last,
            found.max_tokens,
            found.tenant,
            found.weight,
        )
        if found.last:
            del live[found.request]
    if live:
        raise TraceError(f"line {number}: the trace ends with unfinished requests: {sorted(live)[:5]}")
    if not opened:
        raise TraceError("the trace has no request")


def write_trace(inputs: Iterable[Input]) -> Iterator[bytes]:
    """Encode a trace: its lines, each with a line feed."""
    encoder = msgspec.json.Encoder()
    for piece in inputs:
        runs = [(run.start, len(run)) for run in piece.tokens.ranges]
        line = _Line(
            piece.time_ns,
            piece.request,
            piece.op,
            runs,
            last=piece.last,
            max_tokens=piece.max_tokens,
            tenant=piece.tenant,
            weight=piece.weight,
        )
        yield encoder.encode(line) + b"\n"
