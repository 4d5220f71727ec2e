"""llama.cpp by llama-cpp-python: append, ask, forget. Sessions and questions take turns.

Runs in llama.cpp's environment: imports only that, numpy, gguf and the standard library.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bench.peers.contestant import OneByOne
from bench.peers.protocol import Opening, Record

_BATCH_TOKENS = 2048


class LlamaCpp(OneByOne):
    """A context for each session.

    Without flash attention, which is slower and less exact for a short question behind a long cache; it reads
    faster, but in float32 only.
    """

    def open(self, opening: Opening) -> str:
        """Convert the weights into the working directory, but for a file of its own format, whose KV is in
        float16, its default. The contexts share them by the page cache.
        """
        import llama_cpp

        from bench.peers.convert import write_gguf

        weights, kind = Path(opening.file), None
        if not opening.file:
            weights = Path("model.gguf")
            kind = write_gguf(Path(opening.model), opening.dtype, weights)
        self._contexts: list[Any] = [
            llama_cpp.Llama(
                str(weights),
                n_ctx=opening.tokens + opening.question,
                n_batch=_BATCH_TOKENS,
                n_threads=opening.threads,
                n_threads_batch=opening.threads,
                type_k=kind,
                type_v=kind,
                flash_attn=False,
                verbose=False,
            )
            for _ in range(opening.sessions)
        ]
        for context in self._contexts:
            context.eval(opening.frozen)
        return f"llama-cpp-python {llama_cpp.__version__}"

    def read(self, records: list[list[Record]]) -> bool:
        """Extend each context."""
        for context, own in zip(self._contexts, records, strict=True):
            context.eval(list(chain.from_iterable(own)))
        return True

    def answer(self, session: int, question: list[int], tokens: int) -> Iterator[tuple[int, float]]:
        """See `OneByOne`."""
        context, appended = self._contexts[session], question
        kept = context.n_tokens
        for _ in range(tokens):
            context.eval(appended)
            token, lead = _best(context)
            yield token, lead
            appended = [token]
        context.n_tokens = kept  # the next `eval` drops what lies behind


def _best(context: Any) -> tuple[int, float]:
    """The token with the largest logit of the last row, and its lead over the second."""
    import numpy as np

    logits = np.ctypeslib.as_array(context._ctx.get_logits_ith(-1), (context.n_vocab(),))
    second, first = np.argpartition(logits, -2)[-2:]
    return int(first), float(logits[first] - logits[second])
