"""A tiny model's engine, one tape in it, and the history that the oracle computes from."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine.engine import Engine
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.kv_tensors import KVPool
from regions.tape import Retention, Tape
from tests.engine.oracle import VOCABULARY, History, tiny


def tokens(rng: random.Random, n: int) -> list[int]:
    """Draw tokens, without the special ones."""
    return [rng.randrange(3, VOCABULARY) for _ in range(n)]


def append(engine: Engine, tape: Tape, *records: Sequence[int], at: int = 0) -> torch.Tensor:
    """Commit records in one pass; returns their logits. ``at``: their time."""
    flat, lengths = [token for record in records for token in record], list(map(len, records))
    tape.make_room(lengths, [at] * len(lengths))
    assert tape.acquire(len(flat))
    logits = engine.logits([Chunk(tape, flat)])
    tape.commit(lengths, [at] * len(lengths))
    return logits


def ask(engine: Engine, fork: Fork, question: Sequence[int]) -> torch.Tensor:
    """Return the logits of a question's tokens."""
    assert fork.acquire(len(question))
    return engine.logits([Chunk(fork, question)])


def prefill(engine: Engine, fork: Fork, window: Sequence[int], chunk: int) -> None:
    """Compute a window in chunks, as the scheduler does."""
    for start in range(0, len(window), chunk):
        part = window[start : start + chunk]
        assert fork.acquire(len(part))
        engine.execute([Chunk(fork, part, sample=False)])


def scribble(*pools: KVPool) -> None:
    """Overwrite every free block, as other readers would."""
    for pool in pools:
        free = torch.from_numpy(pool.blocks.references == 0).repeat_interleave(pool.block_size)
        for tensor in (*pool.keys, *pool.values):
            tensor[:, free] = 9.0


class TapeWithHistory:
    """A tape past evictions and position frames, and the history the oracle needs."""

    def __init__(self, architecture: str, *, blocks: int, frame_limit: int, records: int) -> None:
        self.rng = random.Random(5)
        self.model = tiny(architecture, layers=2)
        self.engine = Engine(self.model, blocks=blocks, block_size=4, frame_limit=frame_limit)
        self.frozen = tokens(self.rng, 11)
        self.tape = self.engine.open_tape("t", self.frozen, Retention(64))
        self.history = History.begin(self.frozen)
        for _ in range(records):
            self.append()
        assert self.tape.evicted_tokens > 60

    @property
    def coord(self) -> int:
        return self.tape.evicted_tokens + self.tape.live_tokens

    def append(self, length: int | None = None, at: int = 0) -> torch.Tensor:
        """Commit a record; returns its logits."""
        record = tokens(self.rng, length or self.rng.randrange(4, 10))
        logits = append(self.engine, self.tape, record, at=at)
        self.history.add(record, self.coord - len(record), self.tape.evicted_tokens)
        return logits
