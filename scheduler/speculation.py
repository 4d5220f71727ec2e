"""N-gram speculation: an answer often repeats what was said (*Attention Once* section 3.7).

Drafts are what followed the last tokens when they occurred before; the pass that computes the next token
verifies them, in rows of their own. They take only tokens that the plan left and free blocks above the
high-water mark: nobody is preempted, and no prompt gets a smaller chunk, for a draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regions.block_pool import BlockPool
from scheduler.planner import Entry, reserve
from scheduler.request import Request
from scheduler.types import Limits

LENGTHS = (3, 2)
"""Tokens that must have occurred before, the longer first."""
HISTORY = 4096
"""Tokens of a prompt that are looked through, the newest: it bounds what a request remembers."""
FORGET = 0.2
"""Weight of the newest verification in the acceptance."""
GIVE_UP = 0.1
"""Acceptance below which only every few tokens one draft is tried."""
RETRY = 16
"""So many tokens apart."""


class NgramProposer:
    """One request's tokens as a source of drafts. Adding a token and proposing take constant time."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.acceptance = 1.0
        """Share of drafts that proved right, the newest weighing most."""
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Where the newest occurrence of these tokens goes on."""
        self._prompt = max(0, len(prompt) - HISTORY)
        self.extend(prompt[self._prompt :])

    def __len__(self) -> int:
        """Tokens of prompt and answer it knows."""
        return self._prompt + len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text went on."""
        known, start = self._tokens, len(self._tokens)
        known.extend(tokens)
        for n in LENGTHS:
            ends = range(max(n, start), len(known))
            columns = (known[first : first + len(ends)] for first in range(ends.start - n, ends.start))
            self._after.update(zip(zip(*columns, strict=True), ends, strict=True))

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that followed the newest earlier occurrence of the last 3 tokens, else 2."""
        for n in LENGTHS:
            at = self._after.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if at is not None:
                return self._tokens[at : at + most]
        return []

    def verified(self, drafted: int, accepted: int) -> None:
        """So many of the drafts were right."""
        self.acceptance += FORGET * (accepted / drafted - self.acceptance)


class Speculation:
    """Gives running answers drafts, and remembers each request's tokens and how its drafts fared."""

    def __init__(self, limits: Limits, memory: BlockPool) -> None:
        self._limits, self._memory = limits, memory
        self._reserve = reserve(memory, limits)
        self._proposers: dict[int, NgramProposer] = {}

    def draft(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries, those of running answers with drafts where there are any, and blocks for them."""
        if not self._limits.max_drafts:
            return list(entries)
        decoders = sum(entry.work.decoding for entry in entries)
        left = self._limits.max_batch_tokens - sum(entry.tokens for entry in entries)
        out: list[Entry] = []
        for entry in entries:
            request = entry.work
            if left > 0 and request.decoding and isinstance(request, Request):
                drafts = self._propose(request, left, decoders)
                if drafts and self._allocate(request, 1 + len(drafts)):
                    left -= len(drafts)
                    entry = entry._replace(drafts=tuple(drafts))
            out.append(entry)
        return out

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """So many of a request's drafts were right."""
        self._proposers[request.id].verified(drafted, accepted)

    def forget(self, request: Request) -> None:
        """It ended."""
        self._proposers.pop(request.id, None)

    def _propose(self, request: Request, left: int, decoders: int) -> list[int]:
        limits, proposer, generated = self._limits, self._proposers.get(request.id), len(request.output)
        acceptance = 1.0 if proposer is None else proposer.acceptance
        cap = draft_cap(limits.max_drafts, limits.max_draft_rows, decoders, acceptance, generated)
        # the last token of an answer needs no drafts behind it
        most = min(left, cap, request.spec.max_tokens - generated - 1)
        if most <= 0:
            return []
        if proposer is None:
            proposer = self._proposers[request.id] = NgramProposer(request.prompt)
        proposer.extend(request.output[len(proposer) - len(request.prompt) :])
        return proposer.propose(most)

    def _allocate(self, request: Request, n: int) -> bool:
        needed = request.blocks_needed(n, self._memory.block_size)
        return needed <= max(0, self._memory.free_blocks - self._reserve) and request.allocate(n)


def draft_cap(most: int, rows: int, decoders: int, acceptance: float, generated: int) -> int:
    """Drafts for one request: `most`, less as more answers share `rows` and as fewer drafts prove right.

    Expected gain falls geometrically along a draft, so its length follows the acceptance; where hardly any
    proves right one is tried every `RETRY` tokens (``generated`` of the answer so far), to notice a change.
    """
    share = min(most, rows // max(1, decoders))
    if acceptance < GIVE_UP:
        return min(share, 1) if generated % RETRY == 0 else 0
    return min(share, max(1, round(most * acceptance)))
