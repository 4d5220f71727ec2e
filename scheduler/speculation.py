"""N-gram speculation: answers often repeat earlier text (*Attention Once* section 3.7).

The drafts are the tokens that followed an earlier occurrence of the last tokens. The pass that computes the
next token verifies them, in rows of their own. Under a grammar a draft ends where the grammar refuses it, and
goes on where the grammar forces what follows. Drafts use only tokens that the plan left and free blocks
above the high-water mark: a draft never preempts a request or shrinks a prompt's chunk.
"""

from collections.abc import Iterable, Sequence

from regions.pool_metadata import BlockPool
from scheduler.interfaces import Costs, Limits
from scheduler.planner import Entry, reserve
from scheduler.request import Request

LENGTHS = (3, 2)
"""Lengths of the n-grams to look up, the longer first."""
HISTORY = 4096
"""Newest tokens of a prompt to index; bounds the memory of a request."""
BEGIN, BEGIN_GRAMMAR = 0.5, 1.0
"""Acceptance rate of an answer before its first drafts: of free text, and under a grammar."""
FORGET = 0.1
"""Weight of the newest verification in the acceptance rate."""


class NgramProposer:
    """Proposes drafts from one request's tokens. Adding a token and proposing take constant time."""

    def __init__(self, prompt: Sequence[int], acceptance: float = BEGIN) -> None:
        self.acceptance = acceptance
        """Share of accepted drafts, an exponential average."""
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """N-gram to the index after its newest occurrence."""
        self._prompt = max(0, len(prompt) - HISTORY)
        self.extend(prompt[self._prompt :])

    def __len__(self) -> int:
        """Number of known tokens, of prompt and answer."""
        return self._prompt + len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens."""
        known, start = self._tokens, len(self._tokens)
        known.extend(tokens)
        for n in LENGTHS:
            ends = range(max(n, start), len(known))
            columns = (known[first : first + len(ends)] for first in range(ends.start - n, ends.start))
            self._after.update(zip(zip(*columns, strict=True), ends, strict=True))

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the newest earlier occurrence of the last 3 tokens, else of 2."""
        for n in LENGTHS:
            at = self._after.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if at is not None:
                return self._tokens[at : at + most]
        return []

    def verified(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rate."""
        self.acceptance += FORGET * (accepted / drafted - self.acceptance)


class Speculation:
    """Adds drafts to running answers; keeps each request's tokens and acceptance rate.

    Without ``costs`` a draft is taken to be free.
    """

    def __init__(self, limits: Limits, memory: BlockPool, costs: Costs | None = None) -> None:
        self._limits, self._memory, self._costs = limits, memory, costs
        self._reserve = reserve(memory, limits)
        self._proposers: dict[int, NgramProposer] = {}

    def draft(self, entries: Sequence[Entry]) -> list[Entry]:
        """Add drafts to the entries of running answers, where there are any and blocks for them."""
        if not self._limits.max_drafts:
            return list(entries)
        decoders = sum(entry.work.decoding for entry in entries)
        if not decoders:
            return list(entries)
        tokens = sum(entry.tokens for entry in entries)
        left, price = self._limits.max_batch_tokens - tokens, self._price(tokens, decoders)
        out: list[Entry] = []
        for entry in entries:
            request = entry.work
            if left > 0 and request.decoding and isinstance(request, Request):
                drafts = self._propose(request, left, decoders, price)
                if drafts and self._allocate(request, 1 + len(drafts)):
                    left -= len(drafts)
                    entry = entry._replace(drafts=tuple(drafts))
            out.append(entry)
        return out

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Update a request's acceptance rate."""
        self._proposers[request.id].verified(drafted, accepted)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that ended."""
        self._proposers.pop(request.id, None)

    def _price(self, tokens: int, decoders: int) -> float:
        """What one more draft of each answer adds to a pass over ``tokens``, over the pass's own time."""
        most = self._limits.max_drafts
        if self._costs is None or not (alone := self._costs.recompute_ns(tokens)):
            return 0.0
        return max(self._costs.recompute_ns(tokens + most * decoders) / alone - 1, 0.0) / most

    def _propose(self, request: Request, left: int, decoders: int, price: float) -> list[int]:
        limits, proposer, generated = self._limits, self._proposers.get(request.id), len(request.output)
        begin = BEGIN if request.spec.grammar is None else BEGIN_GRAMMAR
        acceptance = begin if proposer is None else proposer.acceptance
        cap = draft_cap(limits, decoders, acceptance, generated, price)
        # the last token of an answer needs no drafts after it
        most = min(left, cap, request.spec.max_tokens - generated - 1)
        if most <= 0:
            return []
        if proposer is None:
            proposer = self._proposers[request.id] = NgramProposer(request.prompt, begin)
        proposer.extend(request.output[len(proposer) - len(request.prompt) :])
        return permitted(request, proposer.propose(most), most)

    def _allocate(self, request: Request, n: int) -> bool:
        needed = request.blocks_needed(n, self._memory.block_size)
        return needed <= max(0, self._memory.free_blocks - self._reserve) and request.allocate(n)


def permitted(request: Request, guesses: Sequence[int], most: int) -> list[int]:
    """``guesses`` up to the first that cannot follow, then text that its grammar forces; at most ``most``.

    No draft is a stop token: the row before it samples the end of the answer anyway.
    """
    spec, drafts = request.spec, list[int]()
    while len(drafts) < most:
        token = guesses[len(drafts)] if len(drafts) < len(guesses) else None
        if spec.grammar is not None:
            allowed = request.choices_after(drafts) or ()
            if token not in allowed:
                guesses = ()
                forced = spec.forced and spec.forced([*request.output, *drafts])
                token = allowed[0] if len(allowed) == 1 else forced
        if token is None or token in spec.stop_ids:
            break
        drafts.append(token)
    return drafts


def draft_cap(limits: Limits, decoders: int, acceptance: float, generated: int, price: float = 0.0) -> int:
    """Most drafts for one request: `max_drafts`, or fewer with many answers, low acceptance or a high price.

    The expected gain falls geometrically along a draft, so its length follows the acceptance rate. Where that
    is below `draft_give_up`, or no draft is worth its ``price`` (`worthwhile`), one draft is tried every
    `draft_retry` tokens (``generated`` so far), to notice a change.
    """
    share = min(limits.max_drafts, limits.max_draft_rows // max(1, decoders))
    most = min(share, max(1, round(limits.max_drafts * acceptance)))
    worth = worthwhile(most, acceptance, price)
    if acceptance < limits.draft_give_up or not worth:
        return min(share, 1) if generated % limits.draft_retry == 0 else 0
    return worth


def worthwhile(most: int, acceptance: float, price: float) -> int:
    """The number of drafts, at most ``most``, with the most tokens for the time of a pass.

    The k-th draft is accepted with ``acceptance`` to the k, and each adds ``price`` to a pass that takes 1.
    """
    best, best_rate, tokens = 0, 1.0, 1.0
    for drafts in range(1, most + 1):
        tokens += acceptance**drafts
        if (rate := tokens / (1 + price * drafts)) >= best_rate:
            best, best_rate = drafts, rate
    return best
