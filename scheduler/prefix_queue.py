"""The waiting order of `lpm` and `klpm`: every k-th admission takes the oldest, the others the longest match.

This is *k-LPM* algorithm 1, kept up to date: waiting requests are in two sorted lists, by age and by match,
and each step moves only those whose match changed. The cost of a step depends on these and on how many it
admits, not on how many wait. k = 1 is FCFS. k = None is LPM, which never chooses by age; the paper's k =
infinity differs only in its first choice. Several tenants take turns by their weights
(`scheduler.fair_queue`), and each has an order of its own.

What two prompts share by chance, the first words of two histories, is a few tokens. It saves next to nothing,
and would put a new prompt before an older one. So `klpm` counts a match in whole blocks, and equal ones go to
the oldest; `lpm` counts tokens, as SGLang does, on which the paper measured it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from sortedcontainers import SortedDict, SortedList

from regions.prefix_index import PrefixIndex
from scheduler.bandit import SERVING, KBandit
from scheduler.fair_queue import Shares
from scheduler.policies import Ordering
from scheduler.request import Request

MOVES = 16
"""When more than one in this many moves, sorting again is cheaper."""


def takes_oldest(step: int, k: int | None) -> bool:
    """Whether choice number `step` (from 0) is made by age. Raises ValueError for k < 1."""
    if k is not None and k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")
    return k is not None and step % k == 0


class _Line:
    """The waiting requests of one tenant."""

    def __init__(self) -> None:
        self.step = 0  # of algorithm 1: requests admitted so far
        self.requests: SortedDict[int, Request] = SortedDict()
        self.by_match: SortedList[tuple[int, int]] = SortedList()  # (-match, number)

    def sort(self, matches: Mapping[int, int]) -> None:
        """Sort by the match of each request."""
        self.by_match = SortedList((-match, number) for number, match in matches.items())

    def walk(self, k: int | None) -> Iterator[Request]:
        """In order of admission."""
        oldest, longest = iter(self.requests), (number for _, number in self.by_match)
        taken: set[int] = set()
        for at in range(self.step, self.step + len(self.requests)):
            # Each list has every request, so one that is not taken remains in it.
            source = oldest if takes_oldest(at, k) else longest
            number = next(number for number in source if number not in taken)
            taken.add(number)
            yield self.requests[number]


class PrefixQueue:
    """Waiting requests in the order of algorithm 1, for each tenant on its own.

    ``index`` gives match lengths; they count in whole ``unit``s of tokens. ``k`` is called at each walk. Ties
    of the match go to the oldest. A walk must end before the queue or the cache changes.
    """

    def __init__(self, index: PrefixIndex, k: Callable[[], int | None], unit: int = 1) -> None:
        self._index = index
        self._k, self._unit = k, unit
        self._lines: dict[str, _Line] = {}
        self._shares = Shares()
        self._waiting: dict[int, tuple[_Line, int]] = {}  # with the match, in units

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Add a request, or update one whose prompt changed."""
        self.discard(request)
        number, tenant = request.id, request.spec.tenant
        match = self._index.watch(number, request.prompt, request.spec.salt) // self._unit
        line = self._lines.setdefault(tenant, _Line())
        self._waiting[number] = line, match
        line.requests[number] = request
        line.by_match.add((-match, number))

    def admitted(self, request: Request) -> None:
        """Remove an admitted request, advance algorithm 1 by one step, and charge its tenant."""
        tenant, takes = request.spec.tenant, request.takes
        self._lines[tenant].step += 1
        self._shares.admit(tenant, self._shares.arrive(tenant, takes), takes)
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Remove a request. Idempotent."""
        number = request.id
        line, match = self._waiting.pop(number, (None, 0))
        if line is None:
            return
        self._index.forget(number)
        del line.requests[number]
        line.by_match.remove((-match, number))

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in order of admission, by their current matches."""
        self._apply([(number, match // self._unit) for number, match in self._index.changes()])
        k = self._k()
        lines = {tenant: line for tenant, line in self._lines.items() if line.requests}
        if len(lines) == 1:
            (line,) = lines.values()
            return line.walk(k)
        return self._shares.merged(
            {tenant: (line.walk(k), lambda each: each.takes) for tenant, line in lines.items()}
        )

    def _apply(self, changes: Sequence[tuple[int, int]]) -> None:
        if len(changes) * MOVES > len(self):
            self._waiting.update((number, (self._waiting[number][0], match)) for number, match in changes)
            for line in self._lines.values():
                line.sort({number: self._waiting[number][1] for number in line.requests})
            return
        for number, match in changes:
            line, before = self._waiting[number]
            line.by_match.remove((-before, number))
            line.by_match.add((-match, number))
            self._waiting[number] = line, match


def waiting_order(
    ordering: Ordering, index: PrefixIndex | None, rng: random.Random | None, block_size: int = 1
) -> tuple[PrefixQueue | None, Callable[[int], None]]:
    """The waiting order of POOL requests, None where their keys are the order; and a callback for TTFTs (ns).

    ``block_size``: of the prefix cache, in tokens. Raises ValueError when the policy needs an index or a
    random source that is not given.
    """

    def ignore(ttft_ns: int) -> None: ...

    if not ordering.by_prefix:
        return None, ignore
    if index is None:
        raise ValueError(f"policy {ordering.name} needs an index of the prefix cache")
    if ordering.name == "lpm":
        return PrefixQueue(index, lambda: None), ignore
    if ordering.name == "klpm":
        return PrefixQueue(index, lambda: ordering.k, block_size), ignore
    if rng is None:
        raise ValueError(f"policy {ordering.name} needs a random source")
    bandit = KBandit(SERVING, rng=rng, first=SERVING.index(2))
    return PrefixQueue(index, lambda: bandit.k, block_size), bandit.observe
