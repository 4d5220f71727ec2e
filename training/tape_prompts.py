"""Generated tapes as the daemon's prompts in words, with the right answers: what a language model learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.model.chat_format import PromptFormat
from engine.model.terse import Lines
from ingest.tokens import Tokeniser
from tapes.rules import RULES, UNDEFINED, Floats, Ints, Levels
from training.batches import Measures, Vocabulary, auxiliary, measure
from training.prompt_pack import Branch, Pack, pack
from training.shown import Reading, shown
from training.sources import Asked, Drawn


class Query(NamedTuple):
    """A branch's question, its bar, and the label: index of the right choice; 0 of `exact_value`."""

    question: int
    bar: int
    label: int


class Prompts(NamedTuple):
    """One tape with its questions. ``bars``: rows of the bars' last tokens; ``measures`` [1, bars, ...]."""

    pack: Pack
    queries: list[Query]
    bars: Ints
    measures: Measures


@dataclass(frozen=True)
class TapePrompts:
    """Writes tapes as ``prompt`` does. ``end``: the token that ends an answer."""

    prompt: PromptFormat
    lines: Lines
    asked: Asked
    end: int

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Of the headers that sources draw."""
        return Vocabulary()

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """Of all lines."""
        return Tokeniser(self.prompt.encode)

    @cached_property
    def questions(self) -> list[list[int]]:
        """The tokens that ask each question."""
        briefly = self.prompt.briefly(self.asked.texts[-1])
        texts = [*(rule.text for rule in self.asked.rules), *([briefly] if self.asked.exact else [])]
        return [self.prompt.question(text) for text in texts]

    @cached_property
    def answers(self) -> list[list[list[int]]]:
        """The tokens of each choice of each question, the end among them."""
        return [[self._answer(choice) for choice in rule.choices] for rule in self.asked.rules]

    def _answer(self, text: str) -> list[int]:
        return [*self.prompt.encode(self.prompt.answer_prefix + text), self.end]

    def of(self, drawn: Drawn, tape: int, cuts: Sequence[int], wanted: Sequence[int]) -> Prompts:
        """One of the drawn tapes, asked the questions ``wanted`` behind each of the bars ``cuts``.

        What is undefined at a bar is not asked there.
        """
        x = _alone(drawn.levels, tape)
        header = str(self.vocabulary.tokenizer.decode(drawn.header[tape]))
        frozen, lines, price = shown(self.prompt, self.tokeniser, Reading(self.lines), x, 0, header, [])
        ends = np.array(list(accumulate(map(len, lines), initial=len(frozen))))[1:]
        labels = [rule.label(x).value[0] for rule in self.asked.rules]
        branches, queries = [], []
        for bar in cuts:
            for question in wanted:
                if question == len(labels):
                    label, answer = 0, self._answer(price(int(x.close[0, bar])))
                else:
                    label = int(labels[question][bar])
                    if label == UNDEFINED:
                        continue
                    answer = self.answers[question][label]
                branches.append(Branch(int(ends[bar]), self.questions[question], answer))
                queries.append(Query(question, bar, label))
        tokens = [*frozen, *(token for line in lines for token in line)]
        measures = measure(x, [rule.label(x) for rule in RULES], auxiliary(x))
        return Prompts(pack(tokens, branches), queries, ends - 1, measures)


def _alone(x: Levels, tape: int) -> Levels:
    """One of the tapes."""
    columns = {
        name: getattr(x, name)[[tape]] for name in ("open", "high", "low", "close", "volume", "percent")
    }
    return replace(x, **columns)


class Balance:
    """Gives every answer of a question the same say: a running mean of how frequent each is."""

    def __init__(self, questions: int, choices: int = 3) -> None:
        self.frequency: Floats = np.full((questions, choices), 1 / choices)

    def weights(self, queries: Sequence[Query]) -> npt.NDArray[np.float32]:
        """The weight of each; its question's answers have a mean of about 1."""
        for question in {each.question for each in queries}:
            labels = [each.label for each in queries if each.question == question]
            counts = np.bincount(labels, minlength=self.frequency.shape[1]) / len(labels)
            self.frequency[question] = 0.98 * self.frequency[question] + 0.02 * counts
        kinds = np.maximum((self.frequency > 0.02).sum(1), 1)
        own = np.array([self.frequency[each.question, each.label] for each in queries])
        shares = np.clip(own, 0.05, 1.0) * kinds[[each.question for each in queries]]
        found: npt.NDArray[np.float32] = (1 / shares).astype(np.float32)
        return found
