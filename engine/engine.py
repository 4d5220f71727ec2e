"""The engine: one pool, one model, forward passes over mixed batches of tapes and forks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.attention import Attention
from engine.attention_cpu import CpuAttention
from engine.attention_reference import ReferenceAttention
from engine.batch import BatchPlan, Packed
from engine.model import LoadedModel, ModelError, Pass
from engine.sampling import Choice, choose
from regions.fork import Fork
from regions.held import Past
from regions.pool import KVPool
from regions.tape import Retention, Tape

FREEZE_CHUNK = 1024
"""Tokens of one pass while a frozen prefix is prefilled."""


@dataclass(frozen=True)
class Work:
    """Tokens to append to one target; ``sample``: choose the token that follows the last of them.

    ``choices``: token ids the choice is restricted to; None means the whole vocabulary.
    """

    target: Tape | Fork
    tokens: Sequence[int]
    sample: bool = True
    choices: tuple[int, ...] | None = None


class Engine:
    """Runs a loaded model over regions of one pool. Not thread-safe: one worker thread owns it."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        blocks: int,
        block_size: int = 16,
        frame_limit: int = 8192,
        attention: Attention | None = None,
    ) -> None:
        self.model = model
        self.frame_limit = min(frame_limit, model.max_positions)
        self.pool = KVPool(
            list(model.layers), blocks, block_size=block_size, dtype=model.dtype, device=model.device
        )
        self._attention = attention or (
            CpuAttention() if model.device.type == "cpu" else ReferenceAttention()
        )
        self._frozen: dict[tuple[int, ...], Past] = {}

    def open_tape(self, name: str, frozen: Sequence[int], retention: Retention) -> Tape:
        """A new session. Its frozen prefix is prefilled once and shared with sessions of the same tokens.

        Raises ValueError when prefix and retention leave no room below the frame limit, ModelError when
        the pool cannot hold the prefix.
        """
        key = tuple(frozen)
        if key not in self._frozen:
            self._frozen[key] = self._freeze(key)
        return Tape(name, self.pool, self._frozen[key].retain(), retention, frame_limit=self.frame_limit)

    def open_prompt(self) -> Fork:
        """A stateless prompt: a fork of nothing."""
        return Fork(self.pool, frame_limit=self.frame_limit)

    def forward(self, batch: Sequence[Work]) -> list[Choice | None]:
        """One forward pass over a mixed batch; afterwards every target's tokens are in KV.

        The targets' blocks must have been acquired. Results are in batch order, None where nothing was to
        be sampled. Work of the same session should lie side by side: shared extents are then read as one.
        """
        sampled = [i for i, work in enumerate(batch) if work.sample]
        ends = list(accumulate(len(work.tokens) for work in batch))
        # the model wants at least one row; a pass that only appends computes one nobody reads
        logits = self._run(batch, [ends[i] - 1 for i in sampled] or [ends[-1] - 1])
        chosen = choose(logits, [batch[i].choices for i in sampled]) if sampled else []
        results: list[Choice | None] = [None] * len(batch)
        for index, choice in zip(sampled, chosen, strict=True):
            results[index] = choice
        return results

    def logits(self, batch: Sequence[Work]) -> torch.Tensor:
        """The logits of every row of the batch, fp32 [rows, vocabulary]; otherwise as `forward`."""
        return self._run(batch, range(sum(len(work.tokens) for work in batch)))

    def _run(self, batch: Sequence[Work], keep: Sequence[int]) -> torch.Tensor:
        device = self.model.device
        packed: list[Packed] = []
        for work in batch:
            start = packed[-1].stop if packed else 0
            packed.append(Packed(start, start + len(work.tokens), work.target.step(len(work.tokens))))
        tokens = torch.tensor([token for work in batch for token in work.tokens], device=device)
        ranges = [slot for part in packed for slot in part.step.slots]
        slots: torch.Tensor | slice
        if len(ranges) == 1:
            slots = slice(ranges[0][0], sum(ranges[0]))
        else:
            slots = torch.cat([torch.arange(slot, slot + count) for slot, count in ranges]).to(device)
        pass_ = Pass(BatchPlan(packed, device), self.pool, slots, self._attention, self.model.turner)
        logits = self.model.forward(pass_, tokens, torch.tensor(keep, device=device))
        for work, part in zip(batch, packed, strict=True):
            work.target.wrote(part.step, work.tokens)
        return logits

    def _freeze(self, tokens: tuple[int, ...]) -> Past:
        prompt = self.open_prompt()
        if not prompt.acquire(len(tokens)):
            raise ModelError(
                f"a pool of {self.pool.total_blocks} blocks cannot hold {len(tokens)} frozen tokens"
            )
        for start in range(0, len(tokens), FREEZE_CHUNK):
            self.forward([Work(prompt, tokens[start : start + FREEZE_CHUNK], sample=False)])
        frozen = prompt.prefix()
        prompt.release()
        return frozen
