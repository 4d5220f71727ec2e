"""A prompt that changes while it is being prefilled (*Stream2LLM* section 4.2).

Input arrives in pieces or is replaced as a whole. The longest common prefix of what is in KV and what is
wanted stays, by tokens; everything behind it is freed wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regions.block_pool import BlockPool
from regions.ephemeral import Fork
from regions.extents import Placement
from regions.frozen import Context, alias
from regions.offload.store import Store
from regions.radix import RadixCache, TokenArray, Tokens, common_length, token_array


class StreamingPrompt:
    """A stateless prompt whose tokens may be appended to and replaced.

    ``fork`` has its KV. It is another one after the prompt was cut back into, or extended by, a prefix of
    ``cache``.
    """

    version = 0
    """A prompt reads no session."""

    def __init__(self, pool: BlockPool, cache: RadixCache, *, frame_limit: int, salt: str = "") -> None:
        self.fork = Fork(pool, frame_limit=frame_limit)
        self.total_tokens_invalidated = 0
        """Tokens whose KV existed and was given up because the input changed."""
        self._pool = pool
        self._cache = cache
        self._frame_limit = frame_limit
        self._salt = salt
        self._tokens = token_array(())

    @property
    def tokens(self) -> TokenArray:
        """The prompt as it is wanted, int32 [tokens]; not to be written."""
        return self._tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens in KV that were found in the prefix cache or read from another prompt."""
        return self.fork.cached_tokens

    @property
    def length(self) -> int:
        """Tokens in KV: of the prompt, cached ones included, and of the answer."""
        return self.fork.cached_tokens + self.fork.length

    @property
    def blocks(self) -> int:
        """Private blocks in the pool."""
        return self.fork.blocks

    @property
    def swapped(self) -> bool:
        """Its private KV is on the host."""
        return self.fork.swapped

    @property
    def exclusive_tokens(self) -> int:
        """See `Fork.exclusive_tokens`."""
        return self.fork.exclusive_tokens

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before ``n`` more tokens fit."""
        return self.fork.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """Take blocks for ``n`` more tokens, swapping in what was swapped out; False without room."""
        return self.fork.acquire(n)

    @property
    def context_tokens(self) -> int:
        """What the next token sees."""
        return self.length

    def place(self, n: int) -> Placement:
        """Where the next ``n`` tokens go. Raises RuntimeError if their blocks were not acquired."""
        return self.fork.place(n)

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """The ``tokens`` of ``placement`` are in KV."""
        self.fork.wrote(placement, tokens)

    def swap_out(self, host: Store) -> bool:
        """Preemption by swapping: move the private tokens to ``host``; False without room there."""
        return self.fork.swap_out(host)

    def reset(self) -> None:
        """Preemption by recompute: drop all KV. The prefix cache gives back what it still has."""
        self.keep(0)

    @property
    def remaining(self) -> int:
        """Tokens of the prompt that are not in KV yet."""
        return max(0, len(self._tokens) - self.length)

    def next(self, n: int) -> list[int]:
        """The next ``n`` tokens to compute, or as many as remain."""
        piece: list[int] = self._tokens[self.length : self.length + n].tolist()
        return piece

    def append(self, tokens: Tokens) -> int:
        """Add ``tokens`` behind the prompt; returns how many tokens in KV, of an answer, were invalidated."""
        return self.update(np.concatenate((self._tokens, token_array(tokens))))

    def update(self, tokens: Tokens) -> int:
        """Replace the prompt; returns how many tokens in KV were invalidated."""
        wanted = token_array(tokens).copy()
        before = self.length
        kept = common_length(self._in_kv(), wanted)
        self.keep(kept)
        self._tokens = wanted
        self.total_tokens_invalidated += before - kept
        return before - kept

    def match(self) -> int:
        """Read from the cache what it has beyond the tokens in KV; returns how many tokens that gained.

        For the start, and after a change or a preemption. One token always remains to be computed: its row
        gives the answer's first token.
        """
        before = self.length
        if self._cache.match_length(self._tokens[:-1], self._salt) > before:
            cached = self._cache.match(self._tokens[:-1], self._salt)
            assert cached is not None
            self._restart(cached)
        return self.length - before

    def read_from(self, source: StreamingPrompt, n: int) -> None:
        """Read the first ``n`` tokens of ``source``, which begins with the same ones, instead of its own KV.

        Metadata only. Raises RuntimeError while the source is swapped out.
        """
        self._restart(alias(self._pool, source.fork.extents, n))

    def keep(self, tokens: int) -> None:
        """Only the first ``tokens`` tokens stay in KV, of the prompt and of an answer behind it."""
        own = tokens - self.fork.cached_tokens
        if own >= 0:
            self.fork.keep(own)
        else:
            self.fork.reset()  # first of all, for extents cannot be asked of a fork that is swapped out
            self._restart(alias(self._pool, self.fork.extents, tokens))

    def save(self) -> int:
        """Offer all tokens in KV to the cache; returns how many it took.

        Raises RuntimeError while the fork is swapped out.
        """
        return self._cache.save(self._in_kv(), self.fork, self._salt)

    def release(self) -> None:
        """Drop everything."""
        self.fork.release()

    def _in_kv(self) -> TokenArray:
        """The tokens in KV: of the prompt, and of an answer behind it."""
        answer = self.fork.tokens[len(self._tokens) - self.fork.cached_tokens :]
        return np.concatenate((self._tokens[: self.length], token_array(answer)))

    def _restart(self, context: Context) -> None:
        """Go on behind ``context``, taking over the caller's reference; all private KV goes."""
        old, self.fork = self.fork, Fork(self._pool, frame_limit=self._frame_limit, context=context)
        context.release()
        old.release()
