"""A tiny model's engine, one tape in it, and the history that the oracle computes from."""

import random
from collections.abc import Sequence

import torch

from engine.attention.base import Attention
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.kv_tensors import KVPool
from regions.tape import Retention, Tape
from tests.engine.oracle import VOCABULARY, History, Window, tiny
from tests.kit import tolerance


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


def assert_logits_over_regions(loaded: LoadedModel, given: Sequence[int], expected: torch.Tensor) -> None:
    """60 tokens ``given`` to a tape, one and then many in a pass, have the logits ``expected``."""
    engine = Engine(loaded, blocks=40, block_size=4)
    tape = engine.open_tape("a", given[:7], Retention(100))
    found = []
    for first, stop in ((7, 8), (8, 40), (40, 60)):
        tape.acquire(stop - first)
        found.append(engine.logits([Chunk(tape, given[first:stop])], range(stop - first)))
        tape.commit([stop - first])
    tolerance.assert_logits(loaded, torch.cat(found), expected[7:])


def ask(engine: Engine, fork: Fork, question: Sequence[int]) -> torch.Tensor:
    """Return the logits of a question's tokens."""
    assert fork.acquire(len(question))
    return engine.logits([Chunk(fork, question)])


def ask_together(engine: Engine, asked: Sequence[tuple[Fork, Sequence[int]]]) -> list[torch.Tensor]:
    """Return the logits of each fork's question, all asked in one pass."""
    assert all(fork.acquire(len(question)) for fork, question in asked)
    logits = engine.logits([Chunk(fork, question) for fork, question in asked])
    return list(logits.split([len(question) for _, question in asked]))


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
    """A tape, and the history that the oracle needs; ``records``, past evictions and frames, are appended."""

    def __init__(
        self,
        model: LoadedModel | str = "llama",
        *,
        blocks: int,
        frame_limit: int,
        retention: Retention = Retention(64),  # noqa: B008  # immutable
        frozen: int | Sequence[int] = 11,
        records: int = 0,
        seed: int = 5,
        attention: Attention | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.model = tiny(model, layers=2) if isinstance(model, str) else model
        self.engine = Engine(
            self.model, blocks=blocks, block_size=4, frame_limit=frame_limit, attention=attention
        )
        self.frozen = tokens(self.rng, frozen) if isinstance(frozen, int) else list(frozen)
        self.tape = self.engine.open_tape("t", self.frozen, retention)
        self.history, self.window = History.begin(self.frozen), Window(retention.tokens, retention.records)
        self.owners = 0
        for _ in range(records):
            self.append()
        assert not records or self.tape.evicted_tokens > 60

    @property
    def coord(self) -> int:
        return self.tape.evicted_tokens + self.tape.live_tokens

    def owner(self) -> int:
        """A new reader's name in the history."""
        self.owners += 1
        return self.owners

    def append(self, length: int | None = None, at: int = 0) -> torch.Tensor:
        """Commit a record; returns its logits."""
        record = tokens(self.rng, length or self.rng.randrange(4, 10))
        logits = append(self.engine, self.tape, record, at=at)
        self.history.add(record, self.coord - len(record), self.tape.evicted_tokens)
        return logits

    def append_together(self, *records: Sequence[int]) -> None:
        """Commit records in one pass. They see what they would see one by one."""
        coord, lengths = self.coord, list(map(len, records))
        parts = append(self.engine, self.tape, *records).split(lengths)
        for record, logits in zip(records, parts, strict=True):
            self.history.add(record, coord, self.window.add(len(record)), logits=logits)
            coord += len(record)
        assert (self.coord, self.tape.evicted_tokens) == (coord, self.window.evicted)
