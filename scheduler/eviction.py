"""How a victim leaves the pool: swapped to the host, or dropped and computed again (*Stream2LLM* 4.3).

Both costs are the *victim's*: recomputing what it has in KV, or moving its blocks out and in again. A
prompt that is still changing may not keep what was saved: what an update usually leaves of its KV is what
swapping is worth.
"""

from __future__ import annotations

from scheduler.request import Request
from scheduler.types import Costs, Eviction


def prefers_swap(victim: Request, eviction: Eviction, costs: Costs | None) -> bool:
    """Whether to try the host tier first; it may still have no room. Without costs `cost` never swaps."""
    if eviction != "cost":
        return eviction == "swap"
    if costs is None:
        return False
    saved = costs.recompute_ns(victim.private) * (1.0 if victim.complete else victim.survival)
    return costs.swap_ns(victim.blocks) < saved
