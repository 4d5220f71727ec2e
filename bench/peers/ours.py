"""Our engine over regions: one pass for the updates of all sessions, one for all questions."""

from pathlib import Path

import torch

from bench.engine.contenders import answer_together, engine_for, read_together
from bench.peers.contestant import Clock
from bench.peers.protocol import Answered, Ask, Opening, Record
from engine.model.loaded import Weights
from engine.model.loading import load_model
from regions.tape import Retention


class Ours:
    """Tapes of one engine; a question is a fork that is dropped afterwards."""

    def open(self, opening: Opening) -> str:
        """Load the model and open a tape for each session."""
        torch.set_num_threads(opening.threads)
        # a directory that was made of a file holds its codes, too: they count where the peer reads them
        weights: Weights = "auto" if opening.file else "float"
        loaded = load_model(Path(opening.model), dtype=opening.dtype, device="cpu", weights=weights)
        held = opening.tokens - len(opening.frozen)
        tokens = len(opening.frozen) + opening.sessions * held
        self._engine = engine_for(loaded, tokens, readers=opening.questions)
        retention = Retention(held)
        names = (str(session) for session in range(opening.sessions))
        self._tapes = [self._engine.open_tape(name, opening.frozen, retention) for name in names]
        return f"torch {torch.__version__}, {loaded.layers_run}, {type(self._engine.attention).__name__}"

    def read(self, records: list[list[Record]]) -> bool:
        """One pass for all sessions."""
        read_together(self._engine, self._tapes, records)
        return True

    def ask(self, ask: Ask) -> Answered:
        """One pass for all questions, and one for each further token of all answers."""
        clock, passes = Clock(), []
        tapes = [self._tapes[session] for session, _ in ask.questions]
        questions = [question for _, question in ask.questions]
        for replies in answer_together(self._engine, tapes, questions, ask.tokens):
            clock.first()
            passes.append(replies)
        answers = [[reply.token for reply in answer] for answer in zip(*passes, strict=True)]
        return clock.answered(answers, [reply.gap for reply in passes[0]])
