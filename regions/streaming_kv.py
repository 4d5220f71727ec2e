"""A prompt that changes while it is prefilled (*Stream2LLM* section 4.2).

Input extends the prompt or replaces it. The longest common prefix of the tokens in KV and the new prompt
stays; everything after it is freed, in the pool or on the host.
"""

from __future__ import annotations

import numpy as np

from regions.cache_priority import ORDINARY, PrefixRetention
from regions.ephemeral import Fork
from regions.frozen import alias
from regions.pool_metadata import BlockPool
from regions.radix import RadixCache, TokenArray, Tokens, common_length, token_array


class StreamingPrompt(Fork):
    """A stateless prompt, ``wanted``, which may change.

    Its context is what it found in ``cache`` or reads from another prompt; `reset` drops that, too.
    """

    def __init__(self, pool: BlockPool, cache: RadixCache, *, frame_limit: int, salt: str = "") -> None:
        super().__init__(pool, frame_limit=frame_limit)
        self.wanted = token_array(())
        """The current prompt, int32 [tokens]; read-only."""
        self._cache = cache
        self._salt = salt

    @property
    def length(self) -> int:
        """Tokens in KV: of the prompt, including cached ones, and of the answer."""
        return self.context_tokens

    def update(self, tokens: Tokens) -> int:
        """Replace the prompt; returns the number of invalidated tokens in KV."""
        wanted = token_array(tokens).copy()
        before = self.length
        kept = common_length(self._in_kv(), wanted)
        self.keep(kept)
        self.wanted = wanted
        return before - kept

    def match(self) -> int:
        """Read more of the prompt from the cache; returns the tokens gained.

        One token always remains to be computed: its row yields the answer's first token.
        """
        before = self.length
        if self._cache.match_length(self.wanted[:-1], self._salt) > before:
            cached = self._cache.match(self.wanted[:-1], self._salt)
            assert cached is not None
            self._rebase(cached)
        return self.length - before

    def read_from(self, source: StreamingPrompt, n: int) -> None:
        """Read the first ``n`` tokens of ``source``, which are equal; it must not be swapped."""
        self._rebase(alias(self._pool, source.extents, n))

    def keep(self, n: int) -> None:
        """Keep only the first ``n`` tokens in KV, of the prompt and the answer after it."""
        super().keep(max(0, n - self.cached_tokens))
        if n < self.cached_tokens:
            self._rebase(alias(self._pool, self.extents, n))

    def save(self, most: int | None = None, retention: PrefixRetention = ORDINARY) -> int:
        """Offer the tokens in KV, the first ``most`` of them, to the cache; returns how many it added.

        Raises RuntimeError while swapped out.
        """
        return self._cache.save(self._in_kv()[:most], self, self._salt, retention)

    def _in_kv(self) -> TokenArray:
        """The tokens in KV: of the prompt, and of the answer after it."""
        answer = self.tokens[len(self.wanted) - self.cached_tokens :]
        return np.concatenate((self.wanted[: self.length], token_array(answer)))
