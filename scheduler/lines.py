"""From a policy's configuration to the line in which POOL requests wait, and what learns from their TTFT."""

from __future__ import annotations

import random
from collections.abc import Callable

from scheduler.bandit import SERVING, KBandit
from scheduler.book import WaitingLine
from scheduler.policies import Ordering
from scheduler.prefix_line import PrefixLine
from scheduler.types import PrefixIndex


def waiting_line(
    ordering: Ordering, index: PrefixIndex | None, rng: random.Random | None
) -> tuple[WaitingLine | None, Callable[[int], None]]:
    """The line, None where those that wait are in the order of their keys; and a listener to TTFT in ns.

    Raises ValueError when the policy needs an index or a source of chance that is not given.
    """
    if not ordering.by_prefix:
        return None, _ignore
    if index is None:
        raise ValueError(f"policy {ordering.name} needs an index of the prefix cache")
    if ordering.name != "klpm-adaptive":
        k = ordering.k if ordering.name == "klpm" else None
        return PrefixLine(index, lambda: k), _ignore
    if rng is None:
        raise ValueError(f"policy {ordering.name} needs a source of chance")
    bandit = KBandit(SERVING, rng=rng, first=SERVING.index(2))
    return PrefixLine(index, lambda: bandit.k), bandit.observe


def _ignore(ttft_ns: int) -> None:
    """Nobody learns from it."""
