"""The waiting order of `lpm` and `klpm`: every k-th admission takes the oldest, the others the longest match.

This is *k-LPM* algorithm 1, kept up to date: waiting requests are in two sorted lists, by age and by match,
and each step moves only those whose match changed. The cost of a step depends on these and on how many it
admits, not on how many wait. k = 1 is FCFS. k = None is LPM, which never chooses by age; the paper's k =
infinity differs only in its first choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from sortedcontainers import SortedDict, SortedList

from regions.watch import PrefixWatch
from scheduler.bandit import SERVING, KBandit
from scheduler.policies import Ordering
from scheduler.request import Request

MOVES = 16
"""When more than one in so many moves, sorting again is cheaper."""


def takes_oldest(step: int, k: int | None) -> bool:
    """Whether choice number `step` (from 0) is made by age. Raises ValueError for k < 1."""
    if k is not None and k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")
    return k is not None and step % k == 0


class PrefixQueue:
    """Waiting requests in the order of algorithm 1.

    ``index`` gives match lengths. ``k`` is called at each walk. Ties of the match go
    to the oldest. A walk must end before the queue or the cache changes.
    """

    def __init__(self, index: PrefixWatch, k: Callable[[], int | None]) -> None:
        self._index = index
        self._k = k
        self._step = 0  # of algorithm 1: requests admitted so far
        self._requests: SortedDict[int, Request] = SortedDict()
        self._matches: dict[int, int] = {}
        self._by_match: SortedList[tuple[int, int]] = SortedList()  # (-match length, number)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Add a request, or update one whose prompt changed."""
        self.discard(request)
        number = request.id
        match = self._index.watch(number, request.prompt, request.spec.salt)
        self._requests[number] = request
        self._matches[number] = match
        self._by_match.add((-match, number))

    def admitted(self, request: Request) -> None:
        """Remove an admitted request and advance algorithm 1 by one step."""
        self._step += 1
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Remove a request. Idempotent."""
        number = request.id
        if self._requests.pop(number, None) is None:
            return
        self._index.forget(number)
        self._by_match.remove((-self._matches.pop(number), number))

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in order of admission, by their current matches."""
        self._apply(self._index.changes())
        return self._walk(self._k())

    def _walk(self, k: int | None) -> Iterator[Request]:
        oldest, longest = iter(self._requests), (number for _, number in self._by_match)
        taken: set[int] = set()
        for at in range(self._step, self._step + len(self)):
            # Each list has every request, so one that is not taken remains in it.
            source = oldest if takes_oldest(at, k) else longest
            number = next(number for number in source if number not in taken)
            taken.add(number)
            yield self._requests[number]

    def _apply(self, changes: Sequence[tuple[int, int]]) -> None:
        if len(changes) * MOVES > len(self):
            self._matches.update(changes)
            self._by_match = SortedList((-match, number) for number, match in self._matches.items())
            return
        for number, match in changes:
            self._by_match.remove((-self._matches[number], number))
            self._by_match.add((-match, number))
            self._matches[number] = match


def waiting_order(
    ordering: Ordering, index: PrefixWatch | None, rng: random.Random | None
) -> tuple[PrefixQueue | None, Callable[[int], None]]:
    """The waiting order of POOL requests, None where their keys are the order; and a callback for TTFTs (ns).

    Raises ValueError when the policy needs an index or a random source that is not given.
    """

    def ignore(ttft_ns: int) -> None: ...

    if not ordering.by_prefix:
        return None, ignore
    if index is None:
        raise ValueError(f"policy {ordering.name} needs an index of the prefix cache")
    if ordering.name != "klpm-adaptive":
        k = ordering.k if ordering.name == "klpm" else None
        return PrefixQueue(index, lambda: k), ignore
    if rng is None:
        raise ValueError(f"policy {ordering.name} needs a random source")
    bandit = KBandit(SERVING, rng=rng, first=SERVING.index(2))
    return PrefixQueue(index, lambda: bandit.k), bandit.observe
