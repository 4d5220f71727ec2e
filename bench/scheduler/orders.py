"""*k-LPM* algorithm 1 over all waiting requests at once, as a scheduler without maintained queues does it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scheduler.prefix_queue import takes_oldest


def rank(
    k: int | None,
    arrivals: NDArray[np.float64] | NDArray[np.int64],
    matches: NDArray[np.int64],
    step: int = 0,
) -> Iterator[int]:
    """Indices of all waiting requests in the order of algorithm 1, if the matches did not change; lazy.

    ``arrivals`` and ``matches`` [waiting]: smaller is older; tokens. Ties go to the oldest. ``k``: 1 is FCFS,
    None is LPM; ``step``: choices made before. Raises ValueError when k < 1.
    """
    by_age = np.argsort(arrivals, kind="stable")
    by_match = by_age[np.argsort(-matches[by_age], kind="stable")]
    oldest, longest, taken = iter(by_age.tolist()), iter(by_match.tolist()), set[int]()
    for at in range(step, step + len(by_age)):
        # each list has every request, so one that is not taken remains in it
        index = next(i for i in (oldest if takes_oldest(at, k) else longest) if i not in taken)
        taken.add(index)
        yield index
