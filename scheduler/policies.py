"""The order within a class: the scheduling key of a request, by policy.

Smaller keys go first, and the last request of the order is the first victim. A key ends in the request's
number, so no two keys are equal and equal inputs give equal decisions. Under every policy, requests that
generate come first: a decode costs one token and its reader uses the most memory, so finishing it first is
fair and cheap, and no later request starts before an earlier one because of it.

FLASH, SESSION and STREAM are ordered by submission (*Attention Once* section 3.6). POOL is ordered by the
configured policy: `vllm`, `fcfs`, `lcas` and `mcps` are those of *Stream2LLM* section 4.4, `lcas-fair` is
`lcas` without its starvation, and `lpm`, `klpm` and `klpm-adaptive` are those of the k-LPM paper. The last
three order waiting requests by the prefix cache (`PrefixQueue`) and all others as `vllm` does.

Where tenants share a class by weight (`scheduler.fair_queue`), a request's place by arrival is its start in
virtual time; of one tenant alone that is the order of arrival. `lcas`, `lcas-fair` and `mcps` know no
tenants.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from scheduler.request import Request, State

Key = tuple[int, ...]
Policy = Callable[[Request], Key]
PolicyName = Literal["vllm", "fcfs", "lcas", "lcas-fair", "mcps", "lpm", "klpm", "klpm-adaptive"]
NAMES: tuple[str, ...] = get_args(PolicyName)


def vllm(request: Request) -> Key:
    """vLLM's order: running ones by admission, then preempted ones, the latest first, then FIFO.

    Stream2LLM section 4.4.1: it ignores chunks, and the victim is the latest admitted.
    """
    if request.state is State.RUNNING:
        return 0, request.admitted
    return (1, -request.preempted) if request.preempted else (2, request.start, request.id)


def fcfs(request: Request) -> Key:
    """Finished prompts before unfinished ones, each by arrival (section 4.4.2)."""
    return int(not request.complete), request.start, request.id


def mcps(request: Request) -> Key:
    """Most computed tokens first (section 4.4.3)."""
    return -request.computed, request.id


def lcas(request: Request) -> Key:
    """Finished prompts before unfinished ones, each by the most recent chunk first (section 4.4.4).

    The section notes that a steady arrival of newer requests starves an older one.
    """
    return int(not request.complete), -request.last_chunk_ns, request.id


def lcas_fair(request: Request) -> Key:
    """As `lcas`, but finished prompts by the oldest last chunk first, so that none starves."""
    if request.complete:
        return 0, request.last_chunk_ns, request.id
    return lcas(request)


KEYS: dict[str, Policy] = {"vllm": vllm, "fcfs": fcfs, "mcps": mcps, "lcas": lcas, "lcas-fair": lcas_fair}


@dataclass(frozen=True, slots=True)
class Ordering:
    """The configured policy; only `klpm` uses ``k``.

    Raises ValueError for an unknown name and for k below 1.
    """

    name: str = "fcfs"
    k: int = 2

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"there is no policy {self.name!r}; choose one of {', '.join(NAMES)}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")

    @property
    def key(self) -> Policy:
        """Key of a POOL request."""
        return KEYS.get(self.name, vllm)

    @property
    def by_prefix(self) -> bool:
        """Waiting requests are ordered by their match in the prefix cache."""
        return self.name not in KEYS
