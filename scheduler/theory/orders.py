"""FCFS, LPM and k-LPM as pure functions (*k-LPM* algorithm 1).

All three are one rule with one parameter: every k-th choice is the oldest waiting request, all others are the
longest prefix match. k = 1 is FCFS. k = None is LPM, which never chooses by age; the paper's k = infinity
differs only in its first choice.

`rank` orders all waiting requests by match lengths taken once, like a scheduler that reads its cache at the
start of each step. It does not depend on where the lengths come from.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

FCFS = 1
LPM = None

Arrivals = NDArray[np.float64] | NDArray[np.int64]


def takes_oldest(step: int, k: int | None) -> bool:
    """Whether choice number `step` (from 0) is made by age. Raises ValueError for k < 1."""
    if k is not None and k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")
    return k is not None and step % k == 0


def rank(k: int | None, arrivals: Arrivals, matches: NDArray[np.int64], *, step: int = 0) -> Iterator[int]:
    """Indices of all waiting requests in the order of algorithm 1, if the matches did not change.

    The iterator is lazy after two sorts: a step whose batch is full after 100 requests pays for 100. Ties of
    the match go to the oldest, then to the lower index.

    Args:
        k: see the module; None is LPM.
        arrivals: [waiting] time or sequence number, smaller is older.
        matches: [waiting] cached prefix of each, tokens.
        step: choices made before, counted over the whole run.

    Raises ValueError when k < 1.
    """
    takes_oldest(step, k)
    by_age = np.argsort(arrivals, kind="stable")  # a queue kept in order of arrival sorts in linear time
    if k == FCFS or not len(by_age):
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
