"""A model as the daemon serves it, as a reader of tapes: prompts one by one, on lines of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daemon.engine.build import load_checked
from daemon.engine.example_turns import example_turns
from engine.engine import Engine
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptFormat
from engine.model.kv_type import KVType
from engine.model.loaded import Weights
from engine.model.terse import Lines
from engine.step import Chunk, OutOfMemory
from ingest.tokens import Tokeniser
from regions.tape import Retention
from tapes.rules import Ints
from training.batches import Vocabulary
from training.shown import Reading, shown
from training.sources import Asked, Drawn, Read, Setting
from training.tokenizer import NONE

_MORE_TOKENS = 3
"""That may stand before a number."""
_BLOCK, _MAX_TOKENS, _QUESTION = 16, 16_384, 256
"""Tokens of a block, of a context, and of a question. The pool has one context and all its questions."""


@dataclass(frozen=True)
class Served:
    """A model on our engine. It reads the last window alone, as an `exact` session does.

    The prefix and the bars are computed once for all questions at a bar, which are asked in one pass.
    """

    engine: Engine
    prompt: PromptFormat
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Of the headers that sources draw."""
    cuts: int = 2
    reading: Reading = field(default_factory=Reading)
    asked: Asked = field(default_factory=Asked)

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: str = "auto",
        lines: Lines | None = None,
        asked: Asked | None = None,
        adapter: Path | None = None,
        examples: int = 0,
        weights: Weights = "auto",
        kv: KVType = "auto",
    ) -> Served:
        """Load a directory as the daemon does; ``lines``: None for those that the model reads best.

        ``examples``: as `model.examples`.

        Raises ModelError where the daemon would refuse the model, and where it cannot answer ``asked``.
        """
        asked = asked or Asked()
        loaded = load_checked(directory, dtype, adapter=adapter, weights=weights, kv=kv)
        blocks = (min(loaded.max_positions, _MAX_TOKENS) + len(asked.names) * _QUESTION) // _BLOCK
        engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
        prompt = PromptFormat.of(loaded.tokenizer, described=loaded.described, end_ids=loaded.end_ids)
        if prompt.terse is not None and lines not in (None, "compact"):
            raise ModelError("this model reads compact lines only")
        read = lines or prompt.lines
        if examples:
            if read == "compact":
                raise ModelError("worked examples are not for compact lines")
            try:  # the same turns are shown before every tape
                prompt.frozen(turns=example_turns(prompt, examples, read))
            except ValueError as error:
                raise ModelError(str(error)) from error
        for rule in asked.rules:
            if rule.timed and read == "compact":
                raise ModelError(f"{rule.name}: its rule reads the time of day, and compact lines have none")
            try:
                prompt.question(rule.text)
                prompt.choices(rule.text, rule.choices)
            except ValueError as error:
                raise ModelError(f"{rule.name}: {error}") from error
        return cls(engine, prompt, reading=Reading(read, examples), asked=asked)

    @property
    def lines(self) -> str:
        """As a calibration names them."""
        return self.reading.name

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """Of all lines: making one encodes thousands of them, to compare its tables with the tokenizer."""
        return Tokeniser(self.prompt.encode)

    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """See `Reader`. Numbered questions are all of them, in their order."""
        exact = len(self.asked.rules)
        rows: dict[int, list[tuple[int, int, Any]]] = {question: [] for question in wanted.tolist()}
        rules = [question for question in rows if question != exact]
        asked = [self.tokens(question, setting.numbered) for question in rules]
        for tape, bar, context, close in self.contexts(drawn, setting, cuts):
            for question, logits in zip(rules, context.logits(asked), strict=True):
                rows[question].append((tape, bar, logits[self.choices(question)].tolist()))
            if exact in rows:
                said = self._says(context, self.tokens(exact, setting.numbered), close)
                rows[exact].append((tape, bar, said))
        for question, found in rows.items():
            tape_of, bar_of = (np.array([row[i] for row in found]) for i in (0, 1))
            if question == exact:
                right = np.array([row[2] for row in found])
                yield Read(question, tape_of, bar_of, np.zeros((len(found), 0)), right)
            else:
                yield Read(question, tape_of, bar_of, np.array([row[2] for row in found], np.float64))

    def contexts(self, drawn: Drawn, setting: Setting, cuts: Ints) -> Iterator[tuple[int, int, Context, str]]:
        """Each tape as read up to each of ``cuts``: tape, bar, what is in KV, and its close as written.

        Windows that begin with the same bar are one that grows.
        """
        x = drawn.levels
        listed = [self._text(n) for n in range(len(self.asked.names))] if setting.numbered else []
        for tape in range(len(x.close)):
            header = str(self.vocabulary.tokenizer.decode(drawn.header[tape]))
            frozen, lines, price = shown(self.prompt, self.tokeniser, self.reading, x, tape, header, listed)
            for begin, bars in groupby(cuts.tolist(), lambda bar: max(bar + 1 - setting.window, 0)):
                window = lines[begin : begin + setting.window]
                with closing(Context(self.engine, frozen, sum(map(len, window)))) as context:
                    read = begin
                    for bar in bars:
                        context.read(lines[read : bar + 1])
                        read = bar + 1
                        yield tape, bar, context, price(int(x.close[tape, bar]))

    def _text(self, question: int) -> str:
        """A question as the daemon asks it."""
        text = self.asked.texts[question]
        return text if self.asked.rule(question) else self.prompt.briefly(text)

    def tokens(self, question: int, numbered: bool) -> list[int]:
        """Those that ask a question."""
        if numbered:
            return self.prompt.numbered(question + 1)
        return self.prompt.question(self._text(question))

    def choices(self, question: int) -> list[int]:
        """The tokens of its choices, and of NONE."""
        rule = self.asked.rules[question]
        return [*self.prompt.choices(rule.text, rule.choices), self.prompt.choice(NONE)]

    def _says(self, context: Context, asked: list[int], level: str) -> bool:
        """Whether the answer is ``level``, as the lines write it."""
        answer = context.answer(asked, len(self.prompt.encode(level)) + _MORE_TOKENS)
        ends = (at for at, token in enumerate(answer) if token in self.prompt.stop_ids)
        return self.prompt.decode(answer[: next(ends, None)]).split()[:1] == [level]


class Context:
    """A prefix and at most ``tokens`` of bars in KV, in which questions are asked; none sees another."""

    def __init__(self, engine: Engine, frozen: Sequence[int], tokens: int) -> None:
        self._engine = engine
        self._tape = engine.open_tape("evaluated", frozen, Retention(tokens))

    def read(self, bars: Sequence[Sequence[int]]) -> None:
        """Append bars."""
        self._engine.append(self._tape, bars)

    def logits(self, questions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits [vocabulary] behind each question, of one pass."""
        if not questions:
            return []
        with ExitStack() as opened:
            batch = []
            for tokens in questions:
                fork = self._tape.fork()
                opened.callback(fork.release)
                if not fork.acquire(len(tokens)):
                    raise OutOfMemory(f"{len(questions)} questions do not fit")
                batch.append(Chunk(fork, tokens))
            return list(self._engine.logits(batch, [end - 1 for end in accumulate(map(len, questions))]))

    def answer(self, question: Sequence[int], max_tokens: int) -> list[int]:
        """The likeliest answer of at most ``max_tokens`` tokens."""
        return self._engine.answer(self._tape, question, max_tokens=max_tokens)

    def close(self) -> None:
        """Free its memory."""
        self._tape.release()
