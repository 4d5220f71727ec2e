"""Hugging Face with a kept `DynamicCache`: append, ask, crop. Sessions and questions take turns."""

from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from bench.engine.contenders import KeptCache, load_plain
from bench.peers.contestant import OneByOne
from bench.peers.protocol import Opening, Record


class Kept(OneByOne):
    """A cache for each session."""

    def open(self, opening: Opening) -> str:
        """Load the model and prefill the frozen tokens of each session."""
        torch.set_num_threads(opening.threads)
        model = load_plain(Path(opening.model), opening.dtype)
        self._caches = [KeptCache(model, opening.frozen) for _ in range(opening.sessions)]
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def read(self, records: list[list[Record]]) -> bool:
        """Extend each cache."""
        for cache, own in zip(self._caches, records, strict=True):
            cache.ingest(own)
        return True

    def answer(self, session: int, question: list[int], tokens: int) -> Iterator[tuple[int, float]]:
        """See `OneByOne`."""
        for reply in self._caches[session].answer(question, tokens):
            yield reply.token, reply.gap
