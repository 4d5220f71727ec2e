"""A model as the daemon serves it, as a reader of tapes: prompts one by one, on lines of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daemon.engine.build import checked
from engine.engine import Engine
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptFormat
from engine.model.loading import load_model
from engine.step import Chunk, OutOfMemory
from flash.question import EXACT_VALUE
from regions.tape import Retention
from tapes.rules import RULES, Ints
from training.batches import Vocabulary
from training.shown import Lines, shown
from training.sources import Drawn, Read, Setting
from training.tokenizer import NONE, QUESTIONS

_EXACT = len(QUESTIONS) - 1
_MORE_TOKENS = 3
"""That may stand before a number."""
_BLOCK, _MAX_TOKENS = 16, 16_384
"""Tokens of a block, and of the pool: one context at a time, and its questions."""


@dataclass(frozen=True)
class Served:
    """A model on our engine. It reads the last window alone, as an `exact` session does.

    The prefix and the bars are computed once for all questions at a bar.
    """

    engine: Engine
    prompt: PromptFormat
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Of the headers that sources draw."""
    cuts: int = 2
    lines: Lines = "compact"

    @classmethod
    def load(cls, directory: Path, dtype: str = "auto", lines: Lines | None = None) -> Served:
        """Load a directory as the daemon does; ``lines``: None for those that the model reads best.

        Raises ModelError where the daemon would refuse the model.
        """
        loaded = checked(load_model(directory, dtype=dtype, device="auto"))
        blocks = min(loaded.max_positions, _MAX_TOKENS) // _BLOCK
        engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
        prompt = PromptFormat.of(loaded.tokenizer, described=loaded.described, end_ids=loaded.end_ids)
        if prompt.terse is not None and lines not in (None, "compact"):
            raise ModelError("this model reads compact lines only")
        return cls(engine, prompt, lines=lines or prompt.lines)

    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """See `Reader`. Numbered questions are all of them, in their order."""
        texts = [*(rule.text for rule in RULES), EXACT_VALUE.text]
        x = drawn.levels
        rows: dict[int, list[tuple[int, int, Any]]] = {question: [] for question in wanted.tolist()}
        for tape in range(len(x.close)):
            header = str(self.vocabulary.tokenizer.decode(drawn.header[tape]))
            listed = texts if setting.numbered else []
            frozen, lines, price = shown(self.prompt, self.lines, x, tape, header, listed)
            for bar in cuts.tolist():
                window = lines[max(bar + 1 - setting.window, 0) : bar + 1]
                level = price(int(x.close[tape, bar]))
                with closing(_Context(self.engine, frozen, window)) as context:
                    for question, found in rows.items():
                        by_text = self.prompt.question(texts[question])
                        asked = self.prompt.numbered(question + 1) if setting.numbered else by_text
                        found.append((tape, bar, self._answer(context, question, asked, level)))
        for question, found in rows.items():
            tape_of, bar_of = (np.array([row[i] for row in found]) for i in (0, 1))
            if question == _EXACT:
                right = np.array([row[2] for row in found])
                yield Read(question, tape_of, bar_of, np.zeros((len(found), 0)), right)
            else:
                yield Read(question, tape_of, bar_of, np.array([row[2] for row in found], np.float64))

    def _answer(self, context: _Context, question: int, asked: list[int], level: str) -> Any:
        """Logits of the choices and NONE; of the number, whether it is ``level``, as the lines write it."""
        logits = context.ask(asked)
        if question < _EXACT:
            text = RULES[question].text
            choices = (*self.prompt.choices(text, RULES[question].choices), self.prompt.choice(NONE))
            return logits[list(choices)].tolist()
        answer: list[int] = []
        while len(answer) < len(self.prompt.encode(level)) + _MORE_TOKENS:
            token = int(logits.argmax())
            if token in self.prompt.stop_ids:
                break
            answer.append(token)
            logits = context.ask([*asked, *answer])
        return self.prompt.decode(answer).split()[:1] == [level]


class _Context:
    """A prefix and bars in KV. A question is a fork, dropped when it is answered."""

    def __init__(self, engine: Engine, frozen: Sequence[int], bars: Sequence[Sequence[int]]) -> None:
        tokens = list(chain.from_iterable(bars))
        self._engine = engine
        self._tape = engine.open_tape("evaluated", frozen, Retention(len(tokens)))
        if not self._tape.acquire(len(tokens)):
            raise OutOfMemory(f"{len(bars)} bars of {len(tokens)} tokens do not fit")
        engine.execute([Chunk(self._tape, tokens, sample=False)])
        self._tape.commit([len(bar) for bar in bars])

    def ask(self, tokens: list[int]) -> torch.Tensor:
        """Logits [vocabulary] behind ``tokens``."""
        fork = self._tape.fork()
        try:
            if not fork.acquire(len(tokens)):
                raise OutOfMemory(f"a question of {len(tokens)} tokens does not fit")
            return self._engine.logits([Chunk(fork, tokens)], [len(tokens) - 1])[0]
        finally:
            fork.release()

    def close(self) -> None:
        """Free its memory."""
        self._tape.release()
