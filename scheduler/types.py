"""What the scheduler needs from the packages below it: no tensor, no block table, no model.

The engine fulfils these protocols, the tests and the simulator fulfil them without a device. Every method is
called from the one thread that runs `Scheduler.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol, Self, get_args

from engine.step import Chunk, Target

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


class Reader(Target, Protocol):
    """An ephemeral fork (or a stateless prompt): private tokens after a shared, immutable context."""

    @property
    def version(self) -> int:
        """Data version this reader sees; 0 for a stateless prompt."""

    @property
    def cached_tokens(self) -> int:
        """Tokens it did not compute: the shared context, or a prompt's tokens found in the prefix cache."""

    @property
    def length(self) -> int:
        """Tokens of the request's own prompt and answer in KV; the executor advances it."""

    @property
    def blocks(self) -> int:
        """Private blocks in the pool, which preempting it would free; 0 while swapped."""

    @property
    def swapped(self) -> bool:
        """Its private KV is on the host; `acquire` brings it back."""

    def blocks_needed(self, n: int) -> int:
        """Blocks that appending `n` more private tokens takes beyond those it has. Changes nothing."""

    def acquire(self, n: int) -> bool:
        """Have blocks for `length + n` private tokens. False, with nothing changed, when the pool cannot."""

    def release(self) -> None:
        """Drop the private blocks and the references to the context. Idempotent."""

    def reset(self) -> None:
        """Preemption by recompute: drop private blocks and KV (`length` = 0), keep the context."""

    def keep(self, n: int) -> None:
        """Only the first `n` own tokens stay in KV: rejected drafts."""


class PromptReader(Reader, Protocol):
    """What a POOL request reads: no session, a prompt that may change, and a prefix cache behind it.

    `length` counts aliased tokens, too, and `cached_tokens` says how many of it they are.
    """

    def update(self, tokens: Sequence[int]) -> int:
        """The prompt is `tokens`; returns how many tokens in KV that invalidated (*Stream2LLM* 4.2)."""

    def match(self) -> int:
        """Read from the prefix cache what it holds beyond the tokens in KV; returns the tokens gained."""

    def read_from(self, source: Self, n: int) -> None:
        """Read the first `n` tokens of `source`, whose prompt begins with the same ones."""

    def save(self) -> object:
        """Offer the tokens in KV to the prefix cache."""


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


class Tape(Target, Protocol):
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

    @property
    def staleness_ns(self) -> int:
        """A record is to be committed within so long of being queued; 0 promises nothing."""

    @property
    def lost(self) -> bool:
        """Its stored KV cannot be read back: nothing can read or append to it before it is rebuilt."""

    def fork(self) -> Reader:
        """A reader of exactly the current version. O(extents), takes no block."""

    def blocks_needed(self, n: int) -> int:
        """Blocks that appending `n` more tokens takes beyond those it has. Changes nothing."""

    def make_room(self, n_tokens: int, n_records: int, newest_ns: int) -> int:
        """Evict whole records, oldest first, until retention holds after the append; returns evicted tokens.

        `newest_ns` is the append's newest event time. Idempotent: an append that is deferred calls it again.
        """

    def acquire(self, n: int) -> bool:
        """Take blocks for `n` tokens after the committed ones; those it has count. False: no change."""

    def commit(self, record_lengths: Sequence[int], times: Sequence[int]) -> int:
        """Make the tokens just executed visible as records of these event times (ns); the new version."""


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
