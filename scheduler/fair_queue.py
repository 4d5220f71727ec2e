"""Shares of tenants in a class by weight: start-time fair queueing (Goyal, Vin and Cheng, 1996, section 2).

A request's cost is its cells, what it reserves of the cell budget. Of a tenant's requests, each starts where
the one before it ends in virtual time, its cost over the tenant's weight later, and none before the virtual
time of its arrival, which is the start of the newest admitted request. The earliest start is admitted first.

While two tenants have requests waiting, what each was admitted with, over its weight, differs by at most
the longest request of the one and of the other, each over its weight (theorem 1). A tenant alone gets
everything, owes nothing for it, and keeps its own order. Virtual time is a whole number, so that equal inputs
give equal orders.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

UNIT = 1 << 20
"""Virtual time of one cell at weight 1."""
LEAST, MOST = 1e-6, 1e6
"""Bounds of a weight: within them every cell takes some virtual time, and all fit in a float."""
Item = TypeVar("Item")


def virtual(cells: int, weight: float) -> int:
    """How long ``cells`` cells take a tenant in virtual time."""
    return int(cells * UNIT / weight)


def check_weight(weight: float) -> None:
    """Raise ValueError for a weight out of range."""
    if not LEAST <= weight <= MOST:
        raise ValueError(f"a tenant's weight must be from {LEAST:g} to {MOST:g}, not {weight}")


@dataclass(slots=True)
class _Account:
    """Of one tenant, in virtual time."""

    waiting: int = 0
    """Requests that were never admitted."""
    ends: int = 0
    """End of the last of them, where the next one starts."""
    paid: int = 0
    """End of the last admitted one."""

    def arrive(self, start: int, takes: int) -> None:
        """One more waits."""
        self.waiting += 1
        self.ends = start + takes

    def leave(self, admitted_end: int = 0) -> None:
        """One waits no longer; with the last one, what was not admitted is free again."""
        self.waiting -= 1
        self.paid = max(self.paid, admitted_end)
        if not self.waiting:
            self.ends = self.paid


class Shares:
    """The virtual time of one class."""

    def __init__(self) -> None:
        self.now = 0
        """Start of the newest admitted request."""
        self._accounts: dict[str, _Account] = {}

    def start(self, tenant: str) -> int:
        """Where a tenant's next request starts."""
        account = self._accounts.get(tenant)
        return self.now if account is None else max(self.now, account.ends)

    def arrive(self, tenant: str, takes: int) -> int:
        """A request that ``takes`` so long in virtual time; returns where it starts."""
        start = self.start(tenant)
        self._accounts.setdefault(tenant, _Account()).arrive(start, takes)
        return start

    def admit(self, tenant: str, start: int, takes: int) -> None:
        """A request that arrived is admitted for the first time."""
        self.now = max(self.now, start)
        self._left(tenant, start + takes)

    def leave(self, tenant: str) -> None:
        """A request that arrived ended before it was admitted.

        With the last one that waited, what they all reserved is free again.
        """
        self._left(tenant)

    def grow(self, tenant: str, takes: int, *, admitted: bool) -> None:
        """A request that arrived became longer."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.ends += takes
            account.paid += takes * admitted

    def merged(self, lines: Mapping[str, tuple[Iterator[Item], Callable[[Item], int]]]) -> Iterator[Item]:
        """The items of all tenants in the order of their starts, as if all were admitted.

        ``lines``: of each tenant its items in order, and how long an item takes.

        Of equal starts, the tenant that comes first in ``lines``. Changes nothing.
        """
        heap = [(self.start(tenant), at, tenant) for at, tenant in enumerate(lines)]
        heapq.heapify(heap)
        while heap:
            start, at, tenant = heap[0]
            items, takes = lines[tenant]
            item = next(items, None)
            if item is None:
                heapq.heappop(heap)
                continue
            yield item
            heapq.heapreplace(heap, (start + takes(item), at, tenant))

    def _left(self, tenant: str, admitted_end: int = 0) -> None:
        account = self._accounts[tenant]
        account.leave(admitted_end)
        if not account.waiting and account.paid <= self.now:
            del self._accounts[tenant]
