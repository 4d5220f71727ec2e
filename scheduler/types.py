"""Priority classes, limits, and what the scheduler asks of its work, of the host tier and of the costs.

Every method is called from the one thread that runs `Scheduler.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol, get_args

from engine.step import Chunk

Eviction = Literal["recompute", "swap", "cost"]
"""How a victim leaves the pool; `cost` takes the cheaper way for each (*Stream2LLM* section 4.3)."""


class PriorityClass(IntEnum):
    """Who goes first; a lower value is a higher priority (*Attention Once* section 3.6, equation 8)."""

    FLASH = 0
    SESSION = 1
    POOL = 2
    STREAM = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one batch and of one request (*Attention Once* section 3.7), in tokens unless named.

    Raises ValueError, naming the field, when a value makes no sense.
    """

    max_batch_tokens: int = 2048
    max_batch_requests: int = 64
    """Rows of one batch: requests and tapes together."""
    chunk_min: int = 128
    chunk_max: int = 1024
    cell_budget_fraction: float = 0.5
    """Part of the pool that the sum of prompt + max_tokens over admitted requests may claim."""
    high_water: float = 0.95
    """Pool occupancy above which prefill chunks wait, so that running answers can still grow."""
    max_prompt_tokens: int = 8192
    max_new_tokens: int = 1024
    eviction: Eviction = "cost"
    grouping: bool = True
    """Equal beginnings of POOL prompts are computed once (section 3.7, prefix-aware grouped prefill)."""
    max_drafts: int = 4
    """Most guessed tokens verified with one generated token; 0 turns speculation off (section 3.7)."""
    max_draft_rows: int = 64
    """Most guessed tokens in one batch: the more answers run, the fewer each has."""
    stream_timeout_ns: int = 60_000_000_000
    """An unfinished prompt without input for so long is given up; 0 waits for ever."""

    def __post_init__(self) -> None:
        for name in ("max_drafts", "max_draft_rows", "stream_timeout_ns"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, is {getattr(self, name)}")
        if self.eviction not in get_args(Eviction):
            raise ValueError(f"eviction must be recompute, swap or cost, not {self.eviction!r}")
        at_least_1 = "max_batch_tokens max_batch_requests max_prompt_tokens max_new_tokens chunk_min"
        for name in at_least_1.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_max < self.chunk_min:
            raise ValueError(f"chunk_max {self.chunk_max} is below chunk_min {self.chunk_min}")
        for name in ("cell_budget_fraction", "high_water"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], not {getattr(self, name)}")


class Tier(Protocol):
    """Where KV goes that leaves the pool and is to come back."""

    def swap_out(self, reader: Any) -> bool:
        """Move the private KV of a reader of its pool out; False, and nothing changed, without room."""


class Costs(Protocol):
    """What the device takes for things, predicted in ns (*Stream2LLM* section 4.3)."""

    def recompute_ns(self, tokens: int) -> int:
        """Prefilling so many tokens."""

    def swap_ns(self, blocks: int) -> int:
        """Moving so many blocks out and in again."""

    def batch_ns(self, spans: Sequence[tuple[int, int]]) -> int:
        """One pass over rows of (tokens in KV, tokens to compute)."""


class Work(Protocol):
    """What the planner, the allocation and the executor need of a prompt, or of the appends to a tape.

    Work advances in units: tokens of a prompt, whole records of a tape.
    """

    @property
    def cls(self) -> PriorityClass:
        """Who goes first."""

    @property
    def seq(self) -> int:
        """Order of arrival."""

    @property
    def session(self) -> str:
        """What it is called in messages."""

    @property
    def background(self) -> bool:
        """It runs in what other work leaves of a batch."""

    @property
    def complete(self) -> bool:
        """No more input is needed for it to end."""

    @property
    def decoding(self) -> bool:
        """The next pass computes just the token sampled last."""

    @property
    def lost(self) -> bool:
        """It cannot run before a session's lost KV is rebuilt."""

    @property
    def remaining(self) -> int:
        """Units to be computed."""

    def tokens_of(self, n: int) -> int:
        """Tokens of the next `n` units."""

    def units_within(self, tokens: int, most: int) -> int:
        """How many of the next `most` units have at most so many tokens."""

    def blocks_needed(self, n: int, block_size: int) -> int:
        """Blocks that the next `n` units take beyond those it has. Changes nothing."""

    def open(self, n: int) -> int:
        """Make its target ready to take blocks for `n` units; returns tokens evicted for them."""

    def allocate(self, n: int) -> bool:
        """Take the blocks of the next `n` units. False, with nothing changed, when the pool cannot."""

    def defer(self) -> None:
        """It got no blocks in this step: give back what is not needed until the next."""

    def chunk(self, n: int, drafts: tuple[int, ...] = ()) -> Chunk:
        """The next `n` units, and drafts behind them, as the executor takes them."""
