"""What the scheduler needs from the floors below, and the plain data it exchanges with them.

The scheduler never sees a tensor, a block table or a model: it plans over `Reader`s (ephemeral forks),
`Tape`s (a session's frozen and sliding regions), a `Memory` it may count, and one `Executor` call per batch.
The engine fulfils these protocols; the tests and the simulator fulfil them with exact fakes, and the
scheduling code is the same.

Every method here is called from the one thread that runs `Scheduler.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from engine.seeding import Sampling


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

    def __post_init__(self) -> None:
        for name in (
            "max_batch_tokens",
            "max_batch_requests",
            "max_prompt_tokens",
            "max_new_tokens",
            "chunk_min",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_max < self.chunk_min:
            raise ValueError(f"chunk_max {self.chunk_max} is below chunk_min {self.chunk_min}")
        for name in ("cell_budget_fraction", "high_water"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], not {getattr(self, name)}")


class Reader(Protocol):
    """An ephemeral fork (or a stateless prompt): private tokens after a shared, immutable past."""

    @property
    def version(self) -> int:
        """Data version this reader sees; 0 for a stateless prompt."""

    @property
    def past_tokens(self) -> int:
        """Tokens of the shared past (frozen and sliding regions)."""

    @property
    def length(self) -> int:
        """Private tokens whose KV is committed; the executor advances it."""

    def blocks_needed(self, n: int) -> int:
        """Blocks that appending `n` more private tokens takes beyond those already held. Changes nothing."""

    def acquire(self, n: int) -> bool:
        """Hold blocks for `length + n` private tokens. False, with nothing changed, when the pool cannot."""

    def release(self) -> None:
        """Drop the private blocks and the references to the past. Idempotent."""

    def reset(self) -> None:
        """Preemption by recompute: drop private blocks and KV (`length` = 0), keep the past."""


class Tape(Protocol):
    """A session's frozen and sliding regions, as a writer sees them."""

    @property
    def name(self) -> str:
        """The session's name."""

    @property
    def version(self) -> int:
        """Data version: one more after every commit."""

    @property
    def live_tokens(self) -> int:
        """Tokens in the sliding region."""

    @property
    def live_records(self) -> int:
        """Records in the sliding region."""

    @property
    def append_tokens(self) -> int:
        """Most tokens of one append: what the retention keeps."""

    @property
    def append_records(self) -> int:
        """Most records of one append."""

    @property
    def append_span_ns(self) -> int:
        """Most event time between the records of one append; 0 for any."""

    def fork(self) -> Reader:
        """A reader of exactly the current version. O(extents), takes no block."""

    def blocks_needed(self, n: int) -> int:
        """Blocks that appending `n` more tokens takes beyond those already held. Changes nothing."""

    def make_room(self, n_tokens: int, n_records: int, newest_ns: int) -> int:
        """Evict whole records, oldest first, until retention holds after the append; returns evicted tokens.

        `newest_ns` is the newest event time of the append.

        Idempotent for the same arguments: an append that is deferred or retried calls it again.
        """

    def acquire(self, n: int) -> bool:
        """Hold blocks for `n` tokens after the committed ones; those already held count. False: no change."""

    def commit(self, record_lengths: Sequence[int], times: Sequence[int]) -> int:
        """The tokens just executed, cut into records of these event times (ns), become visible.

        Returns the new data version.
        """


class Memory(Protocol):
    """The KV pool, to be counted only."""

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds."""

    @property
    def total_blocks(self) -> int:
        """Blocks of the whole pool."""

    @property
    def block_size(self) -> int:
        """Tokens of one block."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one target in one forward pass. A target occurs at most once in a batch."""

    target: Reader | Tape
    tokens: Sequence[int]
    sample: bool
    """Return a `Row` for the last of `tokens`."""
    choices: tuple[int, ...] | None = None
    """Token ids the row is restricted to; None means the whole vocabulary."""
    sampling: Sampling | None = None
    """How the row's token is drawn; None takes the best."""


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one sampled position."""

    token: int
    """Out of the chunk's choices, or of the vocabulary where it has none: the best, or the drawn one."""
    top1: float
    """Largest logit of that same set, whichever token was drawn."""
    top2: float
    """Second largest logit of that same set."""
    error: str | None = None
    """A sentence when the logits are unusable (NaN); the other fields then mean nothing."""

    @property
    def gap(self) -> float:
        """Logit gap, the confidence measure (*Attention Once* section 3.9.2)."""
        return self.top1 - self.top2


class OutOfMemory(Exception):
    """A forward pass found no memory. Nothing of its batch counts; a smaller one may be tried."""


class Executor(Protocol):
    """The device, one forward pass at a time."""

    def execute(self, batch: Sequence[Chunk]) -> list[Row | None]:
        """Run one forward pass; rows in batch order, None where `sample` is False.

        On return the tokens are in KV and every reader's `length` has advanced. An exception means that
        nothing of the batch may be relied upon; `OutOfMemory` that besides every target is as it was before.
        """
