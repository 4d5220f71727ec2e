"""A prompt that changes while it is being prefilled (*Stream2LLM* section 4.2).

Input arrives in pieces or is replaced as a whole. The longest common prefix of what is in KV and what is
wanted stays, by tokens; everything behind it is freed wherever it lies.
"""

from __future__ import annotations

import numpy as np

from regions.block_pool import BlockPool
from regions.ephemeral import Fork
from regions.frozen import alias
from regions.radix import RadixCache, TokenArray, Tokens, common_length, token_array


class StreamingPrompt(Fork):
    """A stateless prompt, ``wanted``, which may be appended to and replaced.

    Its context is what it found in ``cache`` or reads from another prompt; `reset` drops that, too.
    """

    def __init__(self, pool: BlockPool, cache: RadixCache, *, frame_limit: int, salt: str = "") -> None:
        super().__init__(pool, frame_limit=frame_limit)
        self.wanted = token_array(())
        """The prompt as it is wanted, int32 [tokens]; not to be written."""
        self.total_tokens_invalidated = 0
        """Tokens whose KV existed and was given up because the input changed."""
        self._cache = cache
        self._salt = salt

    @property
    def length(self) -> int:
        """Tokens in KV: of the prompt, cached ones included, and of the answer."""
        return self.context_tokens

    @property
    def remaining(self) -> int:
        """Tokens of the prompt that are not in KV yet."""
        return max(0, len(self.wanted) - self.length)

    def next(self, n: int) -> list[int]:
        """The next ``n`` tokens to compute, or as many as remain."""
        piece: list[int] = self.wanted[self.length : self.length + n].tolist()
        return piece

    def append(self, tokens: Tokens) -> int:
        """Add ``tokens`` behind the prompt; returns how many tokens in KV, of an answer, were invalidated."""
        return self.update(np.concatenate((self.wanted, token_array(tokens))))

    def update(self, tokens: Tokens) -> int:
        """Replace the prompt; returns how many tokens in KV were invalidated."""
        wanted = token_array(tokens).copy()
        before = self.length
        kept = common_length(self._in_kv(), wanted)
        self.keep(kept)
        self.wanted = wanted
        self.total_tokens_invalidated += before - kept
        return before - kept

    def match(self) -> int:
        """Read from the cache what it has beyond the tokens in KV; returns how many tokens that gained.

        One token always remains to be computed: its row gives the answer's first token.
        """
        before = self.length
        if self._cache.match_length(self.wanted[:-1], self._salt) > before:
            cached = self._cache.match(self.wanted[:-1], self._salt)
            assert cached is not None
            self._rebase(cached)
        return self.length - before

    def read_from(self, source: StreamingPrompt, n: int) -> None:
        """Read the first ``n`` tokens of ``source``, which are the same; it must not be swapped."""
        self._rebase(alias(self._pool, source.extents, n))

    def keep(self, n: int) -> None:
        """Only the first ``n`` tokens stay in KV, of the prompt and of an answer behind it."""
        super().keep(max(0, n - self.cached_tokens))
        if n < self.cached_tokens:
            self._rebase(alias(self._pool, self.extents, n))

    def save(self) -> int:
        """Offer all tokens in KV to the cache; returns how many it took. RuntimeError while swapped out."""
        return self._cache.save(self._in_kv(), self, self._salt)

    def _in_kv(self) -> TokenArray:
        """The tokens in KV: of the prompt, and of an answer behind it."""
        answer = self.tokens[len(self.wanted) - self.cached_tokens :]
        return np.concatenate((self.wanted[: self.length], token_array(answer)))
