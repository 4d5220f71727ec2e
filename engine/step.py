"""One forward pass as plain data: its input, its output, and the executor that runs it.

The scheduler plans `Chunk`s and the engine executes them. No torch here: the simulator and the scheduler's
tests execute chunks without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.seeding import Sampling
from regions.extents import Placement


class Target(Protocol):
    """Gets tokens appended by a pass: a tape, a fork of one, or a prompt."""

    @property
    def context_tokens(self) -> int:
        """Tokens in KV that its next token sees, without a tape's frozen prefix."""

    def next_slots(self, n: int) -> Placement:
        """The placement of its next `n` tokens, whose blocks have been acquired."""

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """Record that the `tokens` of `placement` are in KV."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one target in one forward pass. A target occurs at most once in a batch.

    Raises ValueError when it samples without a token before its drafts.
    """

    target: Target
    tokens: Sequence[int]
    sample: bool = True
    """Sample the token after the last of `tokens`."""
    choices: tuple[int, ...] | None = None
    """Token ids to choose from; None: the whole vocabulary."""
    sampling: Sampling | None = None
    """How to draw the token (with drafts, the one at the first draft); None takes the best."""
    drafts: int = 0
    """How many of the last `tokens` are drafts, to be verified in the same pass."""
    top_logprobs: int | None = None
    """Give the token's log probability, and that many of the likeliest tokens with theirs; None: neither."""
    draft_choices: tuple[tuple[int, ...] | None, ...] = ()
    """Token ids to choose from after each of the drafts; empty: `choices` after each."""

    def __post_init__(self) -> None:
        if len(self.draft_choices) not in (0, self.drafts):
            raise ValueError(f"{self.drafts} drafts have {len(self.draft_choices)} sets of choices")
        if self.sample and not 0 <= self.drafts < len(self.tokens):
            raise ValueError(f"{self.drafts} drafts need a token before them, got {len(self.tokens)} tokens")

    @property
    def sampled_rows(self) -> int:
        """How many of its last rows sample a token."""
        return self.drafts + 1 if self.sample else 0

    @property
    def row_choices(self) -> list[tuple[int, ...] | None]:
        """The choices of each row that samples a token."""
        after = self.draft_choices or (self.choices,) * self.drafts
        return [self.choices, *after] if self.sample else []


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, and the two highest logits of the set it was chosen from."""

    token: int
    """The best or the drawn one of the chunk's choices, or of the vocabulary without choices."""
    top1: float
    """Highest logit of the set, whichever token was drawn."""
    top2: float
    """Second highest logit of the set."""
    error: str | None = None
    """Why the logits are invalid (NaN); the other fields are then meaningless."""
    accepted: tuple[SampledToken, ...] = ()
    """The tokens before this one that confirmed drafts, oldest first."""
    logits: tuple[float, ...] = ()
    """The logits of the chunk's choices, in their order."""
    logprob: float | None = None
    """Its natural log probability over the whole vocabulary, at temperature 1; None where it was not asked
    for.
    """
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, the likeliest first."""

    @property
    def gap(self) -> float:
        """Logit gap, the confidence measure (*Attention Once* section 3.9.2)."""
        return self.top1 - self.top2


class OutOfMemory(RuntimeError):
    """A forward pass ran out of memory. It had no effect and may be retried with less."""


class Executor(Protocol):
    """Runs forward passes, one at a time."""

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """Run one forward pass; results in batch order, None where `sample` is False.

        On return the tokens are in KV and every target has advanced, also over wrong drafts, which the caller
        drops (`Fork.keep`). After an exception no result of the batch is valid; after `OutOfMemory` every
        target is also unchanged.
        """


@runtime_checkable
class Timed(Executor, Protocol):
    """An executor whose device times its passes."""

    @property
    def took_ns(self) -> int | None:
        """The device's time of the newest pass, ns; None where only its callers can time it."""


def pass_timer(executor: Executor) -> Callable[[int], int]:
    """Gives the time of the pass that has just ended: its device's, or else what its caller saw, ns."""
    timed = executor if isinstance(executor, Timed) else None

    def took(elapsed_ns: int) -> int:
        own = None if timed is None else timed.took_ns
        return elapsed_ns if own is None else own

    return took
