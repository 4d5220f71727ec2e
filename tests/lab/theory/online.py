"""A query stream served online: who has arrived may be chosen, the machine never idles while one waits."""

import numpy as np
from numpy.typing import NDArray

from lab.theory.query_stream import QueryStream
from scheduler.prefix_queue import takes_oldest

Arrivals = NDArray[np.float64] | NDArray[np.int64]
FCFS, LPM = 1, None
"""Two values of k."""


def serve(
    stream: QueryStream,
    k: int | None,
    *,
    c_attn: float = 0.0,
    start: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[int, ...]:
    """The order in which algorithm 1 with `k` processes the stream under definition 2.

    `k` and `rng` are those of `choose`, `start` is when the machine begins. O(n) a query.
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


def choose(
    step: int,
    k: int | None,
    arrivals: Arrivals,
    matches: NDArray[np.int64],
    rng: np.random.Generator | None = None,
) -> int:
    """Index of the waiting request that goes next: one step of algorithm 1.

    Args:
        step: how many were chosen before, counted over the whole run.
        k: 1 is FCFS, None is LPM.
        arrivals: [waiting] time or sequence number, smaller is older.
        matches: [waiting] cached prefix of each, tokens.
        rng: breaks ties of the match uniformly (the paper's footnote 4); without it the oldest wins.

    Raises ValueError when nothing waits or k < 1.
    """
    if takes_oldest(step, k):
        return int(np.argmin(arrivals))
    longest = np.flatnonzero(matches == matches.max())
    if rng is not None:
        return int(rng.choice(longest))
    return int(longest[np.argmin(arrivals[longest])])
