"""Any other model as a reader of tapes: prompts as the daemon serves them on compact lines, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.model.prompt import PromptFormat
from flash.questions import EXACT_VALUE
from ingest.tokens import Tokeniser
from tapes.rules import RULES, Ints
from training.batches import Vocabulary
from training.sources import Drawn, Read, Setting
from training.tokenizer import NONE, QUESTIONS

_EXACT = len(QUESTIONS) - 1
_LEVEL_TOKENS = 4
"""Most tokens of a level of three digits, and of what may stand before it."""


@dataclass(frozen=True)
class Dense:
    """A transformers model and its tokenizer. It reads the last window alone, as an `exact` session does.

    The prefix and the bars are computed once for all questions at a bar.
    """

    model: Any
    prompt: PromptFormat
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Of the headers that sources draw."""
    cuts: int = 2

    @classmethod
    def load(cls, directory: Path) -> Dense:
        """Load a directory with the type that its file names."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        described = getattr(model.config, "foretick", None)
        return cls(model, PromptFormat.of(AutoTokenizer.from_pretrained(directory), described=described))

    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """See `Reader`. Numbered questions are all of them, in their order."""
        texts = [*(rule.text for rule in RULES), EXACT_VALUE.text]
        tokeniser, x = Tokeniser(self.prompt.encode), drawn.levels
        rows: dict[int, list[tuple[int, int, Any]]] = {question: [] for question in wanted.tolist()}
        for tape in range(len(x.close)):
            header = str(self.vocabulary.tokenizer.decode(drawn.header[tape]))
            frozen = self.prompt.frozen(header, texts if setting.numbered else ())
            fields = np.stack([x.open[tape], x.high[tape], x.low[tape], x.close[tape], x.volume[tape]], 1)
            lines = tokeniser.compact(fields)
            for bar in cuts.tolist():
                shown = lines[max(bar + 1 - setting.window, 0) : bar + 1]
                context = _Context(self.model, [*frozen, *(token for line in shown for token in line)])
                level = f"{x.close[tape, bar]:03d}"
                for question, found in rows.items():
                    asked = (
                        self.prompt.numbered(question + 1)
                        if setting.numbered
                        else self.prompt.question(texts[question])
                    )
                    found.append((tape, bar, self._answer(context, question, asked, level)))
        for question, found in rows.items():
            tape_of, bar_of = (np.array([row[i] for row in found]) for i in (0, 1))
            if question == _EXACT:
                right, gap = (np.array([row[2][i] for row in found]) for i in (0, 1))
                yield Read(question, tape_of, bar_of, np.zeros((len(found), 0)), right, gap)
            else:
                yield Read(question, tape_of, bar_of, np.array([row[2] for row in found], np.float64))

    def _answer(self, context: _Context, question: int, asked: list[int], level: str) -> Any:
        """Logits of the choices and NONE; of the number, whether it is ``level``, and the gap."""
        logits = context.ask(asked)
        if question < _EXACT:
            text = RULES[question].text
            choices = (*self.prompt.choices(text, RULES[question].choices), self.prompt.choice(NONE))
            return logits[list(choices)].tolist()
        best = logits.topk(2).values
        answer: list[int] = []
        while len(answer) < _LEVEL_TOKENS:
            token = int(logits.argmax())
            if token in self.prompt.stop_ids:
                break
            answer.append(token)
            logits = context.ask([*asked, *answer])
        said = self.prompt.decode(answer)
        return said.split()[:1] == [level], float(best[0] - best[1])


class _Context:
    """The KV of a prefix; a question is computed behind it and dropped."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self._model = model
        with torch.no_grad():
            self._cache = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values

    def ask(self, tokens: list[int]) -> torch.Tensor:
        """Logits [vocabulary] behind ``tokens``."""
        with torch.no_grad():
            out = self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        self._cache.crop(-len(tokens))
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits
