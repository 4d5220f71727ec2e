"""One forward pass as plain data: what goes in, what comes out, and who runs it.

The scheduler plans `Chunk`s, the engine executes them, and both name the same types. No torch here: the
simulator and the scheduler's tests execute chunks without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.seeding import Sampling
from regions.extents import Placement


class Target(Protocol):
    """What a pass appends tokens to: a tape, a fork of one, or a prompt."""

    @property
    def context_tokens(self) -> int:
        """Tokens in KV that its next token sees, a tape's frozen prefix left out."""

    def place(self, n: int) -> Placement:
        """Where its next `n` tokens go and what they see. Their blocks have been acquired."""

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """The `tokens` of `placement` are in KV."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one target in one forward pass. A target occurs at most once in a batch.

    Raises ValueError when it samples and has no token before its drafts.
    """

    target: Target
    tokens: Sequence[int]
    sample: bool = True
    """Choose the token that follows the last of `tokens`."""
    choices: tuple[int, ...] | None = None
    """Token ids the choice is restricted to; None means the whole vocabulary."""
    sampling: Sampling | None = None
    """How the token is drawn, that behind the first draft if there are any; None takes the best."""
    drafts: int = 0
    """The last so many of `tokens` are guesses, to be verified in the same pass."""

    def __post_init__(self) -> None:
        if self.sample and not 0 <= self.drafts < len(self.tokens):
            raise ValueError(f"{self.drafts} drafts need a token before them, got {len(self.tokens)} tokens")

    @property
    def sampled_rows(self) -> int:
        """How many of its last rows choose a token."""
        return self.drafts + 1 if self.sample else 0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token and the two highest logits of the set it was chosen from."""

    token: int
    """Out of the chunk's choices, or of the vocabulary where it has none: the best, or the drawn one."""
    top1: float
    """Largest logit of that set, whichever token was drawn."""
    top2: float
    """Second largest logit of that set."""
    error: str | None = None
    """Why the logits cannot be used (NaN); the other fields then mean nothing."""
    accepted: tuple[SampledToken, ...] = ()
    """The tokens that confirmed drafts before this one, oldest first."""

    @property
    def gap(self) -> float:
        """Logit gap, the confidence measure (*Attention Once* section 3.9.2)."""
        return self.top1 - self.top2


class OutOfMemory(RuntimeError):
    """A forward pass found no memory. Nothing of it counts, and it may be tried again with less."""


class Executor(Protocol):
    """The device, one forward pass at a time."""

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """Run one forward pass; results in batch order, None where `sample` is False.

        On return the tokens are in KV and every target has advanced, over wrong drafts too: the caller drops
        those (`Reader.keep`). An exception means that nothing of the batch may be relied upon. `OutOfMemory`
        also means that every target is as it was before.
        """
