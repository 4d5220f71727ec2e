"""Hugging Face with a kept `DynamicCache`: append, ask, crop. Sessions and questions take turns."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from bench.engine.contenders import KeptCache, Reply, load_plain
from bench.peers.contestant import Clock
from bench.peers.protocol import Answered, Ask, Opening, Record


class Kept:
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

    def ask(self, ask: Ask) -> Answered:
        """One question after the other; of several, each only has one token."""
        clock, answers, leads = Clock(), list[list[int]](), list[float]()
        for session, question in ask.questions:
            answer = list[Reply]()
            for reply in self._caches[session].answer(question, ask.tokens):
                if not answer and len(answers) == len(ask.questions) - 1:
                    clock.first()
                answer.append(reply)
            answers.append([reply.token for reply in answer])
            leads.append(answer[0].gap)
        return clock.answered(answers, leads)
