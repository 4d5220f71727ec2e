"""Hugging Face with a kept `DynamicCache`: append, ask, crop. Sessions and questions take turns."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
import transformers

from bench.engine.contenders import KeptCache, Reply, load_plain
from bench.peers.contestant import Clock
from bench.peers.protocol import Answered, Ask, Opening, Record


class Kept:
    """A session that has more bars than it keeps is prefilled again when an update comes: exact."""

    def open(self, opening: Opening) -> str:
        """Load the model and prefill the frozen tokens of each session."""
        torch.set_num_threads(opening.threads)
        self._model = load_plain(Path(opening.model), opening.dtype)
        self._frozen, self._keep = opening.frozen, opening.records
        self._windows: list[deque[Record]] = [deque() for _ in range(opening.sessions)]
        self._caches = [KeptCache(self._model, opening.frozen) for _ in range(opening.sessions)]
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def read(self, records: list[list[Record]]) -> bool:
        """Extend each cache."""
        for session, own in enumerate(records):
            self._windows[session] += own
            if self._keep is not None and len(self._windows[session]) > self._keep:
                self._slide(session, own)
            else:
                self._caches[session].ingest(own)
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

    def _slide(self, session: int, own: list[Record]) -> None:
        self._oldest(session)
        self._caches[session] = KeptCache(self._model, self._frozen)
        self._caches[session].ingest(self._windows[session])

    def _oldest(self, session: int) -> int:
        """Drop the bars that a session no longer keeps; returns their tokens."""
        window, dropped = self._windows[session], 0
        while self._keep is not None and len(window) > self._keep:
            dropped += len(window.popleft())
        return dropped


class Cut(Kept):
    """The oldest bars are cut out of the cache, and the frozen tokens moved up to the rest, as in ours.

    Approximate, because what stays has read what is cut. Each bar reads the window that it would read alone:
    in ours in one pass, here one bar after the other.
    """

    def _slide(self, session: int, own: list[Record]) -> None:
        cache, window = self._caches[session], self._windows[session]
        for _ in own:
            window.pop()
        for record in own:
            window.append(record)
            cache.cut(len(self._frozen), self._oldest(session))
            cache.ingest([record])
