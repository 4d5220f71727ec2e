"""Can a TTFT be met? Finds a schedule for the (1 - p) percentile, or proves that none meets it for all.

The guarantee is that of *k-LPM* theorem 4, but the procedure differs from the proof's. The proof splits the
stream by arrival into blocks, drops the latest queries of each, and claims that a schedule for all queries
remains one for the rest. That can fail: a dropped query may have warmed the cache, in idle time, for one that
remains, so a certificate from the rest could be wrong. The underlying step does hold: a query that is on time
is processed within T of its arrival, so a partial schedule may forget everything older. This search therefore
extends partial schedules query by query, and merges those that agree on the queries that may still be on time
and on the prompt in the cache. Each such class is the proof's pair of a cache state and a last query.

Every schedule that the proof's procedure can return (some queries on time, the others after them) is
searched, and a certificate is an exhausted search over the whole stream.

Complexity: O(n · 2**w · w**2) for the exact search, with w the queries that arrive within T, after O(n**2)
for the table of overlaps. Where every query costs at least one unit (c_attn = 0, none an exact prefix of
another), w > 2T is an overload, certified beforehand in O(n). So with T bounded the search is linear in n, as
the theorem says, and does not depend on p.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from lab.theory.query_stream import QueryStream, ttfts

# Pruning sums floats in another order than a TTFT does, so it must err towards keeping.
SLACK = 1e-9

EMPTY = -1  # nothing cached
Key = tuple[int, int]  # mask of the queries that may still be on time, the prompt in the cache
Layer = dict[Key, tuple[float, Key]]  # when the earliest such schedule ends, and what it extends


class TooWide(ValueError):
    """The exact search exceeds its limit of partial schedules; the answer is unknown."""


@dataclass(frozen=True)
class Feasibility:
    """The answer for one stream, whose queries are numbered from 0; times are in tokens.

    At least one of `order` and `none_meets_all` is set. `order` meets T for the (1 - p) percentile: at most
    `allowed_late` queries are late, `late` of them are. `none_meets_all` is the certificate: every order has
    a late query. Both together mean that some query must be late, and that few enough can be. Only the
    certificate means that no such order was found; the theorem leaves that case open.
    """

    queries: int
    ttft: float
    p: float
    none_meets_all: bool
    allowed_late: int
    late: int | None = None
    percentile_ttft: float | None = None
    order: tuple[int, ...] | None = None
    ttfts: tuple[float, ...] | None = None


def feasible(
    stream: QueryStream,
    ttft: float,
    p: float,
    *,
    c_attn: float = 0.0,
    states: int = 300_000,
    beam: int = 1_000,
) -> Feasibility:
    """Theorem 4: a schedule whose (1 - p) percentile TTFT is at most `ttft`, or a certificate.

    A schedule is found whenever one meets `ttft` for every query. `p` is the fraction that may be late, from
    0 up to but not including 1; `states` bounds the exact search (partial schedules in memory), `beam`
    the search for a schedule with late queries (partial schedules of one length).

    Raises ValueError for a ttft, p or c_attn out of range, and TooWide when the exact search does not end
    within `states` and no schedule turned up.
    """
    if not (math.isfinite(ttft) and ttft > 0):
        raise ValueError(f"the TTFT must be a time above 0, not {ttft}")
    if not 0 <= p < 1:
        raise ValueError(f"p is the fraction that may be late, 0 <= p < 1 (0.05 for P95), not {p}")
    if not (math.isfinite(c_attn) and c_attn >= 0):
        raise ValueError(f"c_attn must be 0 or more, not {c_attn}")
    # By the decimal that was written: 0.29 * 100 is 28.999… in floats.
    allowed = math.floor(Fraction(str(p)) * len(stream))
    search = _Search(stream, ttft, c_attn)
    proven, too_wide, order = search.overloaded(), None, None
    if not proven:
        try:
            order = search.best(0, states=states)
        except TooWide as error:
            too_wide = error
        proven = order is None and too_wide is None
    if order is None and allowed:
        order = search.best(allowed, beam=beam)
    if order is None and too_wide is not None:
        raise too_wide
    verdict = Feasibility(len(stream), ttft, p, proven, allowed)
    if order is None:
        return verdict
    times = ttfts(stream, order, c_attn=c_attn)
    late, percentile = sum(time > ttft for time in times), sorted(times)[len(stream) - allowed - 1]
    return replace(verdict, late=late, percentile_ttft=percentile, order=order, ttfts=times)


class _Search:
    """Partial schedules by length. Bit b of a mask is the b-th query by arrival."""

    def __init__(self, stream: QueryStream, ttft: float, c_attn: float) -> None:
        self.n, self.ttft = len(stream), ttft
        self.queries = sorted(range(self.n), key=stream.arrivals.__getitem__)
        self.arrivals = [stream.arrivals[query] for query in self.queries]
        self.first = [stream.cost(query, None, 0, c_attn) for query in self.queries]
        self.after: list[list[float]] = []  # [previous][query]
        for previous in self.queries:
            matches = stream.matches(previous).tolist()
            self.after.append([stream.cost(q, previous, matches[q], c_attn) for q in self.queries])
        self.cheapest = [
            min([self.first[b], *(self.after[a][b] for a in range(self.n) if a != b)]) for b in range(self.n)
        ]
        self.slack = SLACK * (1 + ttft + max(self.arrivals, default=0) + sum(self.first))
        # After a query's latest start it is late; masks of all such queries, by time.
        latest = sorted((self.arrivals[b] + ttft - self.cheapest[b] + self.slack, b) for b in range(self.n))
        self.latest = [time for time, _ in latest]
        self.expired = list(accumulate((1 << b for _, b in latest), int.__or__, initial=0))

    def overloaded(self) -> bool:
        """Whether some run of arrivals needs more work than fits between its first and its last + T."""
        work, least = 0.0, math.inf
        for arrival, cost in zip(self.arrivals, self.cheapest, strict=True):
            least = min(least, work - arrival)
            work += cost
            if work - arrival - least > self.ttft + self.slack:
                return True
        return False

    def best(
        self, allowed: int, *, states: float = math.inf, beam: int | None = None
    ) -> tuple[int, ...] | None:
        """An order with at most `allowed` late queries, all at its end; None when the search found none.

        Without a beam the search is exhaustive over on-time schedules followed by late queries, so None is
        a proof for `allowed` = 0. Raises TooWide beyond `states`.
        """
        everything = self._alive((1 << self.n) - 1, 0)
        root = (everything, EMPTY)
        layers: list[Layer] = [{root: (0.0, root)}]
        stored = 0
        while len(layers) <= self.n:
            layer: Layer = {}
            for key, (now, _) in layers[-1].items():
                for child, end in self._extensions(key, now, self.n - len(layers) - allowed):
                    # Schedules with equal keys have the same continuations, so the earliest is enough.
                    if child not in layer or end < layer[child][0]:
                        layer[child] = (end, key)
                if stored + len(layer) > states:
                    raise TooWide(
                        f"more than {states} partial schedules: too many queries arrive within the TTFT of "
                        f"each other for an exact answer"
                    )
            if not layer:
                break
            if beam is not None and len(layer) > beam:
                layer = dict(heapq.nsmallest(beam, layer.items(), key=lambda item: item[1][0]))
            stored += len(layer)
            layers.append(layer)
        if self.n - (len(layers) - 1) > allowed:
            return None
        return self._unwind(layers)

    def _extensions(self, key: Key, now: float, needed: int) -> Iterator[tuple[Key, float]]:
        """Extend by one query that is on time and leaves at least `needed` others that still can be."""
        alive, last = key
        costs = self.first if last == EMPTY else self.after[last]
        rest = alive
        while rest:
            bit = rest & -rest
            rest ^= bit
            query = bit.bit_length() - 1
            begin = max(now, self.arrivals[query])
            if self._alive(alive, begin).bit_count() - 1 < needed:
                return  # later arrivals begin no sooner
            end = begin + costs[query]
            if end - self.arrivals[query] > self.ttft:
                continue
            left = self._alive(alive ^ bit, end)
            if left.bit_count() >= needed:
                yield (left, query), end

    def _alive(self, mask: int, now: float) -> int:
        return mask & ~self.expired[bisect_left(self.latest, now)]

    def _unwind(self, layers: list[Layer]) -> tuple[int, ...]:
        """The earliest-ending schedule of the last layer, followed by the late queries by arrival."""
        key = min(layers[-1], key=lambda k: layers[-1][k][0])
        bits: list[int] = []
        for layer in reversed(layers[1:]):
            bits.append(key[1])
            key = layer[key][1]
        on_time = [self.queries[b] for b in reversed(bits)]
        return (*on_time, *(query for query in self.queries if query not in set(on_time)))
