"""A query stream served online: who has arrived may be chosen, the machine never idles while one waits."""

from __future__ import annotations

import numpy as np

from scheduler.theory.orders import choose
from scheduler.theory.query_stream import QueryStream


def serve(
    stream: QueryStream,
    k: int | None,
    *,
    c_attn: float = 0.0,
    start: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[int, ...]:
    """The order in which algorithm 1 with `k` processes the stream under definition 2.

    `k` and `rng` are those of `orders.choose`, `start` is when the machine begins. O(n) a query.
    """
    arrivals = np.array(stream.arrivals, np.float64)
    waiting = np.ones(len(stream), bool)
    order: list[int] = []
    now, previous = start, None
    for step in range(len(stream)):
        now = max(now, float(arrivals[waiting].min()))
        here = np.flatnonzero(waiting & (arrivals <= now))
        matches = stream.matches(previous)
        query = int(here[choose(step, k, arrivals[here], matches[here], rng)])
        now += stream.cost(query, previous, int(matches[query]), c_attn)
        waiting[query] = False
        order.append(query)
        previous = query
    return tuple(order)
