"""Who answers the scenario's questions: our regions, and two ways of the unmodified transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from transformers import DynamicCache

from bench.scenario import Scenario
from engine.engine import Engine, Work
from engine.model import LoadedModel
from regions.tape import Retention

_BLOCK = 16


class Reply(NamedTuple):
    """The greedy answer token, its logit, and how far that is above the second best."""

    token: int
    logit: float
    gap: float


class Contender(Protocol):
    """Reads bars as they come and answers questions about all it has read."""

    def ingest(self, records: Sequence[Sequence[int]]) -> None:
        """Read bars, given as token ids."""
        ...

    def ask(self, question: Sequence[int]) -> Reply:
        """One answer token; what was read stays as it was."""
        ...


class Regions:
    """Ours: a tape on the pool; a question is a fork that is dropped afterwards."""

    def __init__(self, loaded: LoadedModel, scenario: Scenario) -> None:
        tape_tokens = scenario.tokens - len(scenario.frozen)
        blocks = sum(
            -(-tokens // _BLOCK) + 1 for tokens in (len(scenario.frozen), tape_tokens, len(scenario.question))
        )
        self._engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
        self._tape = self._engine.open_tape("bench", scenario.frozen, Retention(tape_tokens))

    @torch.inference_mode()
    def ingest(self, records: Sequence[Sequence[int]]) -> None:
        """One STREAM pass and a commit, as the scheduler does it."""
        tokens = list(chain.from_iterable(records))
        self._tape.make_room(len(tokens), len(records))
        if not self._tape.acquire(len(tokens)):
            raise RuntimeError("the pool is too small for the scenario")
        self._engine.forward([Work(self._tape, tokens, sample=False)])
        self._tape.commit([len(record) for record in records])

    def ask(self, question: Sequence[int]) -> Reply:
        """Fork, one pass, release."""
        fork = self._tape.fork()
        try:
            if not fork.acquire(len(question)):
                raise RuntimeError("the pool is too small for a question")
            (choice,) = self._engine.forward([Work(fork, question)])
        finally:
            fork.release()
        assert choice is not None  # it was to be sampled
        return Reply(choice.token, choice.top1, choice.top1 - choice.top2)


class KeptCache:
    """The unmodified model with a `DynamicCache` that is kept and cropped back after each question."""

    def __init__(self, model: Any, scenario: Scenario) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self.ingest([scenario.frozen])

    def ingest(self, records: Sequence[Sequence[int]]) -> None:
        """One pass that extends the cache."""
        self._forward(list(chain.from_iterable(records)))

    def ask(self, question: Sequence[int]) -> Reply:
        """One pass, then crop."""
        reply = _reply(self._forward(question))
        self._cache.crop(-len(question))
        return reply

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        output = self._model(
            input_ids=torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[0, -1]  # type: ignore[no-any-return]  # transformers is untyped here


class Dense:
    """The unmodified model over everything read so far, for every question anew."""

    def __init__(self, model: Any, scenario: Scenario) -> None:
        self._model = model
        self._tokens = list(scenario.frozen)

    def ingest(self, records: Sequence[Sequence[int]]) -> None:
        """Remember the tokens; they are computed when a question comes."""
        self._tokens.extend(chain.from_iterable(records))

    @torch.inference_mode()
    def ask(self, question: Sequence[int]) -> Reply:
        """One pass over context and question."""
        ids = torch.tensor([[*self._tokens, *question]])
        return _reply(self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1])


def _reply(logits: torch.Tensor) -> Reply:
    (best, second), (token, _) = (part.tolist() for part in torch.topk(logits.float(), 2))
    return Reply(token, best, best - second)
