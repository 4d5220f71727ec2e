"""The order within a class: scheduling keys of one request, by policy.

A policy gives a request a key; smaller goes first, and the last request in that order is the first victim.
The key ends in the request's number, so no two are equal and equal inputs give equal decisions. Requests
that generate come first under any policy: a decode costs one token and its reader occupies the most memory,
so finishing it first is both fair and cheap, and it never lets a later request start before an earlier one.

The classes FLASH, SESSION and STREAM are always in order of submission (*Attention Once* section 3.6). POOL
requests are ordered as configured: `vllm`, `fcfs`, `lcas` and `mcps` are those of *Stream2LLM* section 4.4,
`lcas-fair` is `lcas` without its starvation, `lpm`, `klpm` and `klpm-adaptive` are those of the k-LPM paper.
These last order what waits by the prefix cache (`PrefixQueue`), and the rest as `vllm` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from scheduler.request import Request, State

Key = tuple[int, ...]
Policy = Callable[[Request], Key]
PolicyName = Literal["vllm", "fcfs", "lcas", "lcas-fair", "mcps", "lpm", "klpm", "klpm-adaptive"]
NAMES: tuple[str, ...] = get_args(PolicyName)


def vllm(request: Request) -> Key:
    """As vLLM does: running ones as they were admitted, then the preempted, the latest first, then FIFO.

    Stream2LLM section 4.4.1: it knows nothing of chunks, and the victim is who was admitted last.
    """
    if request.state is State.RUNNING:
        return 0, request.admitted
    return (1, -request.preempted) if request.preempted else (2, request.id)


def fcfs(request: Request) -> Key:
    """Finished prompts before those still coming in, each by arrival (section 4.4.2)."""
    return int(not request.complete), request.id


def mcps(request: Request) -> Key:
    """Most computed tokens first (section 4.4.3)."""
    return -request.computed, request.id


def lcas(request: Request) -> Key:
    """Finished prompts before partial ones, in both the most recent chunk first (section 4.4.4).

    A steady arrival of newer requests starves an older one, as the section says.
    """
    return int(not request.complete), -request.last_chunk_ns, request.id


def lcas_fair(request: Request) -> Key:
    """As `lcas`, but of the finished prompts the oldest last chunk first, so that none of them starves."""
    if request.complete:
        return 0, request.last_chunk_ns, request.id
    return lcas(request)


KEYS: dict[str, Policy] = {
    "vllm": vllm,
    "fcfs": fcfs,
    "mcps": mcps,
    "lcas": lcas,
    "lcas-fair": lcas_fair,
}


@dataclass(frozen=True, slots=True)
class Ordering:
    """A policy as configured. ``k`` is read by `klpm` alone.

    Raises ValueError for an unknown name, with all that are known, and for k below 1.
    """

    name: str = "fcfs"
    k: int = 2

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"there is no policy {self.name!r}; known are {', '.join(NAMES)}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")

    @property
    def key(self) -> Policy:
        """Key of a POOL request."""
        return KEYS.get(self.name, vllm)

    @property
    def by_prefix(self) -> bool:
        """Those that wait are ordered by what the prefix cache holds of them."""
        return self.name not in KEYS
