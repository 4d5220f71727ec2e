"""Priority classes, limits, and the scheduler's interfaces to the host tier and the costs.

Every method is called from the one thread that runs `Scheduler.step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol, get_args

Eviction = Literal["recompute", "swap", "cost"]
"""How victims are preempted; `cost` takes the cheaper way for each (*Stream2LLM* section 4.3)."""


AT_LEAST_1 = (
    "max_batch_tokens", "max_batch_requests", "max_prompt_tokens", "max_new_tokens", "chunk_min",
    "draft_retry",
)  # fmt: skip
"""Fields of `Limits` that cannot be 0."""


class PriorityClass(IntEnum):
    """Priority of work; lower values go first (*Attention Once* section 3.6, equation 8)."""

    FLASH = 0
    SESSION = 1
    POOL = 2
    STREAM = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a batch and of a request (*Attention Once* section 3.7), in tokens unless noted.

    Raises ValueError with the field's name when a value makes no sense.
    """

    max_batch_tokens: int = 2048
    max_batch_requests: int = 64
    """Rows of one batch: requests and tapes together."""
    chunk_min: int = 128
    chunk_max: int = 1024
    cell_budget_fraction: float = 0.5
    """Part of the pool that admitted requests may use, by the sum of prompt + max_tokens."""
    high_water: float = 0.95
    """Pool occupancy above which prefill chunks wait, so that running answers can grow."""
    max_prompt_tokens: int = 8192
    max_new_tokens: int = 1024
    eviction: Eviction = "cost"
    grouping: bool = True
    """Compute equal beginnings of POOL prompts once (section 3.7, prefix-aware grouped prefill)."""
    max_drafts: int = 4
    """Most draft tokens per generated token; 0 turns speculation off (section 3.7)."""
    stream_share: float = 0.25
    """Part of a batch's tokens and rows that requests leave to waiting tapes, however many requests wait.
    In a batch with questions it is at most `chunk_min` tokens."""
    max_draft_rows: int = 64
    """Most draft tokens in one batch, shared by all running answers."""
    draft_give_up: float = 0.1
    """Acceptance rate of an answer below which it has a draft only every `draft_retry` tokens."""
    draft_retry: int = 16
    stream_timeout_ns: int = 60_000_000_000
    """An unfinished prompt without input for so long is ended; 0 waits indefinitely."""

    def __post_init__(self) -> None:
        for name in ("max_drafts", "max_draft_rows", "stream_timeout_ns"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.eviction not in get_args(Eviction):
            raise ValueError(f"eviction must be recompute, swap or cost, not {self.eviction!r}")
        for name in AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_max < self.chunk_min:
            raise ValueError(f"chunk_max {self.chunk_max} is below chunk_min {self.chunk_min}")
        if not 0.0 <= self.stream_share < 1.0:
            raise ValueError(f"stream_share must lie in [0, 1), not {self.stream_share}")
        if not 0.0 <= self.draft_give_up <= 1.0:
            raise ValueError(f"draft_give_up must lie in [0, 1], not {self.draft_give_up}")
        for name in ("cell_budget_fraction", "high_water"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], not {getattr(self, name)}")


class OffloadTier(Protocol):
    """Where KV that leaves the pool is kept until it returns."""

    def swap_out(self, reader: Any) -> bool:
        """Move a reader's private KV out of the pool; False, with nothing changed, without room."""


class Costs(Protocol):
    """Predicted times of the device, ns (*Stream2LLM* section 4.3)."""

    def recompute_ns(self, tokens: int) -> int:
        """Prefilling ``tokens`` tokens."""

    def swap_ns(self, blocks: int) -> int:
        """Moving ``blocks`` blocks out and back in."""

    def batch_ns(self, spans: Sequence[tuple[int, int]]) -> int:
        """One pass over rows of (tokens in KV, tokens to compute)."""
