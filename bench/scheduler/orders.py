"""*k-LPM* algorithm 1 over all waiting requests at once, as a scheduler without maintained queues does it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scheduler.prefix_queue import takes_oldest

Arrivals = NDArray[np.float64] | NDArray[np.int64]


def rank(k: int | None, arrivals: Arrivals, matches: NDArray[np.int64], *, step: int = 0) -> Iterator[int]:
    """Indices of all waiting requests in the order of algorithm 1, if the matches did not change.

    The iterator is lazy after two sorts: a step whose batch is full after 100 requests pays for 100. Ties of
    the match go to the oldest, then to the lower index.

    Args:
        k: 1 is FCFS, None is LPM.
        arrivals: [waiting] time or sequence number, smaller is older.
        matches: [waiting] cached prefix of each, tokens.
        step: choices made before, counted over the whole run.

    Raises ValueError when k < 1.
    """
    takes_oldest(step, k)
    by_age = np.argsort(arrivals, kind="stable")  # a queue kept in order of arrival sorts in linear time
    if k == 1 or not len(by_age):
        return iter(by_age.tolist())
    # One key for match and age: keys differ, so the quicker unstable sort gives the stable order.
    shortfall = int(matches.max()) - matches[by_age]
    by_match = by_age[np.argsort(shortfall * len(by_age) + np.arange(len(by_age)))]
    if k is None:
        return iter(by_match.tolist())
    return _alternate(k, step, by_age, by_match)


def _alternate(k: int, step: int, by_age: NDArray[np.int64], by_match: NDArray[np.int64]) -> Iterator[int]:
    """Merge the two orders by algorithm 1, each request once."""
    taken = bytearray(len(by_age))
    oldest, longest = map(int, by_age), map(int, by_match)
    for at in range(step, step + len(by_age)):
        # Each list has every request, so one that is not taken remains in it.
        source = oldest if takes_oldest(at, k) else longest
        index = next(i for i in source if not taken[i])
        taken[index] = 1
        yield index
