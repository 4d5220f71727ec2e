"""The query stream, its computation time (*k-LPM* definitions 1 and 2), and a stream from JSON lines.

Time is counted in tokens: one unit is the cost of one token without attention. The machine processes one
query at a time without interruption, and caches only the previous prompt.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.jsonl import TraceError, decoded

Lengths = NDArray[np.int64]
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class QueryStream:
    """Definition 1: n prompts and their arrival times; query i is position i of both.

    Raises ValueError when the two differ in number, a prompt is empty, or an arrival is negative or not
    finite.
    """

    prompts: tuple[Prompt, ...]
    arrivals: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.arrivals):
            raise ValueError(f"{len(self.prompts)} prompts but {len(self.arrivals)} arrival times")
        for query, (prompt, arrival) in enumerate(zip(self.prompts, self.arrivals, strict=True)):
            if not prompt:
                raise ValueError(f"query {query} has an empty prompt")
            if not (math.isfinite(arrival) and arrival >= 0):
                raise ValueError(f"query {query} arrives at {arrival}, which must be finite and at least 0")

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def _sorted(self) -> tuple[Lengths, Lengths]:
        """Each query's rank among the sorted prompts, and the overlap of neighbours there."""
        ranking = sorted(range(len(self)), key=self.prompts.__getitem__)
        ranks = np.empty(len(self), np.int64)
        ranks[ranking] = np.arange(len(self))
        neighbours = [overlap(self.prompts[a], self.prompts[b]) for a, b in pairwise(ranking)]
        return ranks, np.array(neighbours, np.int64)

    def matches(self, previous: int | None) -> Lengths:
        """Overlap of every query with the previous one, [n] tokens; zeros for an empty cache.

        The overlap of two prompts is the least overlap of neighbours between them in sorted order, so a row
        costs O(n), however long the prompts.
        """
        if previous is None:
            return np.zeros(len(self), np.int64)
        ranks, neighbours = self._sorted
        at = int(ranks[previous])
        below = np.minimum.accumulate(neighbours[:at][::-1])[::-1]
        above = np.minimum.accumulate(neighbours[at:])
        own = np.array([len(self.prompts[previous])], np.int64)
        row: Lengths = np.concatenate([below, own, above])[ranks]
        return row

    def cost(self, query: int, previous: int | None, match: int, c_attn: float) -> float:
        """Definition 2: time to process `query` when `match` of its tokens are cached.

        The first query (`previous` is None) costs its length: the paper gives it no attention term.
        """
        length = len(self.prompts[query])
        if previous is None:
            return length
        # The factor 1 stays an integer, so that whole costs stay whole.
        return (1 + c_attn * length if c_attn else 1) * (length - match)


def overlap(x: Sequence[int], y: Sequence[int]) -> int:
    """Overlap(x, y): length of the longest common prefix, tokens."""
    return next((at for at, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def completions(
    stream: QueryStream, order: Sequence[int], *, c_attn: float = 0.0, start: float = 0.0
) -> tuple[float, ...]:
    """Definition 2: R, the completion time of each query (by query, not by position in `order`).

    The paper has R(j1) = |x|: its clock begins with the first query. Here the first query also waits for
    `start` and for its own arrival, R(j1) = max(start, t) + |x|, which equals the paper's value if it arrives
    at time 0. Otherwise an order could begin with a later query and answer it before it arrives. `start` is
    the T of theorem 2.

    Raises ValueError when `order` does not hold each query once.
    """
    if sorted(order) != list(range(len(stream))):
        raise ValueError(f"the order must have each of the {len(stream)} queries once")
    done = [0.0] * len(stream)
    now, previous = start, None
    for query in order:
        # The rows of `matches` cost O(n) each; for one pair the prompts themselves are quicker.
        match = 0 if previous is None else overlap(stream.prompts[query], stream.prompts[previous])
        now = max(now, stream.arrivals[query]) + stream.cost(query, previous, match, c_attn)
        done[query], previous = now, query
    return tuple(done)


def ttfts(
    stream: QueryStream, order: Sequence[int], *, c_attn: float = 0.0, start: float = 0.0
) -> tuple[float, ...]:
    """Completion minus arrival of each query; arguments and errors as for `completions`."""
    done = completions(stream, order, c_attn=c_attn, start=start)
    return tuple(end - arrival for end, arrival in zip(done, stream.arrivals, strict=True))


class _QueryLine(msgspec.Struct, forbid_unknown_fields=True):
    arrival: float
    tokens: tuple[int, ...] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.text is None):
            raise ValueError("needs either `tokens` or `text`")
        if not self.tokens and not self.text:
            raise ValueError("the prompt is empty")
        if self.arrival < 0:
            raise ValueError(f"`arrival` is {self.arrival:g}, but must be at least 0")


def read_trace(lines: Iterable[str | bytes]) -> QueryStream:
    """Query i is the i-th line that is not blank: {"tokens": [1, 2], "arrival": 0} or {"text": "ab", ...}.

    A text's tokens are its characters.

    Raises TraceError when a line is not of this form, when some give text and others tokens (they would
    never match), or when there is none.
    """
    found: list[_QueryLine] = []
    for number, line in decoded(lines, _QueryLine):
        found.append(line)
        if (line.text is None) != (found[0].text is None):
            raise TraceError(f"line {number}: a trace gives either `tokens` or `text` on all lines")
    if not found:
        raise TraceError("the trace has no query")
    prompts = (line.tokens or tuple(map(ord, line.text or "")) for line in found)
    return QueryStream(tuple(prompts), tuple(line.arrival for line in found))
