"""What comes in, and when: the one form of all workloads, synthetic or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from scheduler.simulation.tokens import Segments

Op = Literal["open", "append", "update"]


class Input(NamedTuple):
    """One piece of one request's prompt.

    `request` counts from 0 in order of opening. The first piece is an `open`; `append` adds tokens, `update`
    replaces all of them. `last` says that the prompt is complete with it: the end of the retrieval.
    """

    time_ns: int
    request: int
    op: Op
    tokens: Segments
    last: bool
    max_tokens: int = 1
    """Tokens of the answer; read at the `open`."""


def merged(requests: Iterable[Sequence[Input]]) -> Iterator[Input]:
    """All pieces in order of time, lazily: only requests under way are held.

    Each request's pieces are in order, and the requests are in the order of their first pieces.
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
