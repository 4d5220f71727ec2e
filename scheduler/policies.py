"""Who goes first. A policy is a pure function from the live work to its order; nothing else knows the order.

Further policies (fcfs, lcas, mcps, lpm, k-lpm) are further functions of this type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.request import Work

Policy = Callable[[Iterable[Work]], list[Work]]


def by_class(work: Iterable[Work]) -> list[Work]:
    """Class first; within a class running answers before prefills, then submission order.

    Behind all others of its class comes what only prefills.

    The order is total because sequence numbers are unique, so equal inputs give equal decisions. A decode
    costs one token and its reader holds the most memory: finishing it first is both the fairest and the
    cheapest. It never lets a later request overtake the start of an earlier one (*Attention Once* section
    3.6).
    """
    return sorted(work, key=lambda item: (item.cls, item.prefill_only, not item.decoding, item.seq))
