"""Ten million tokens through one tape: the last window is the oracle's, and no memory grew on the way."""

from __future__ import annotations

import gc
import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.step import Chunk
from regions.tape import Retention, Tape
from tests.engine.oracle import VOCABULARY, History, Window, oracle_logits, tiny
from tests.kit import tolerance

TOKENS = 10_000_000
COMPUTED = 100_000  # at the beginning and at the end
LAYERS = 2
RETENTION = 800
FRAME_LIMIT = 8192
RECORDS = 9  # of an append, 56 to 83 tokens each
FROZEN = list(range(3, 40))


@dataclass(frozen=True)
class Appended:
    """One record, for the oracle."""

    tokens: list[int]
    coord: int
    evicted: int


@dataclass(frozen=True)
class Size:
    """Sizes that must not grow: blocks in use, runs and extents of the window, bytes of Python containers."""

    blocks: int
    runs: int
    extents: int
    records: int
    host_bytes: int

    @classmethod
    def of(cls, engine: Engine, tape: Tape) -> Size:
        gc.collect()
        return cls(
            engine.pool.total_blocks - engine.pool.free_blocks,
            tape.runs,
            len(tape.extents),
            tape.live_records,
            sum(map(sys.getsizeof, gc.get_objects())),
        )


class Stream:
    """A tape that is fed random records, and the last windows of its history."""

    def __init__(self) -> None:
        model = tiny(
            "llama",
            layers=LAYERS,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=2 * FRAME_LIMIT,
        )
        self.engine = Engine(model, blocks=320, block_size=16, frame_limit=FRAME_LIMIT)
        self.tape = self.engine.open_tape("t", FROZEN, Retention(RETENTION))
        self.rng = np.random.default_rng(0)
        self.appended: deque[Appended] = deque()
        self.window = Window(RETENTION)
        self.highest = self.frames = self.most_blocks = 0
        self._origin: int | None = None

    @property
    def written(self) -> int:
        return self.tape.evicted_tokens + self.tape.live_tokens

    def append(self) -> Chunk:
        """Prepare the next append; `commit` follows the forward pass."""
        tape = self.tape
        self.lengths = self.rng.integers(56, 84, RECORDS).tolist()
        tokens = self.rng.integers(3, VOCABULARY, sum(self.lengths)).tolist()
        tape.make_room(self.lengths)
        assert tape.acquire(len(tokens))
        coord, start = self.written, 0
        for length in self.lengths:
            record = tokens[start : start + length]
            self.appended.append(Appended(record, coord, self.window.add(length)))
            start, coord = start + length, coord + length
        # a row sees its own window, a window back for each layer; older appends are of no use any more
        while self.appended[0].coord + len(self.appended[0].tokens) < self.written - (LAYERS + 1) * RETENTION:
            self.appended.popleft()
        return Chunk(tape, tokens, sample=False)

    def commit(self) -> None:
        self.tape.commit(self.lengths)
        self.highest = max(self.highest, *(each.max_position for each in self.tape.state.stretches))
        self.most_blocks = max(self.most_blocks, self.engine.pool.total_blocks - self.engine.pool.free_blocks)
        origin = self.tape.extents[-1].origin
        self.frames += origin != self._origin
        self._origin = origin

    def run(self, tokens: int, *, computed: bool = True) -> None:
        """Feed until so many tokens are written; ``computed``: by the model, else as it would say."""
        while self.written < tokens:
            chunk = self.append()
            if computed:
                self.engine.execute([chunk])
            else:
                self.tape.wrote(self.tape.next_slots(len(chunk.tokens)), chunk.tokens)
            self.commit()


@pytest.mark.slow
def test_ten_million_tokens_leave_the_oracle_s_window_and_no_trace() -> None:
    """Real frames, two layers, evictions at every append. The model computes the first and the last appends:
    the oracle sees the last windows only, which is all that any row of the last one depends on; its positions
    are those of the stream, in double precision.
    """
    stream = Stream()
    engine, tape = stream.engine, stream.tape
    stream.run(COMPUTED)
    early, most_blocks = Size.of(engine, tape), stream.most_blocks
    stream.run(TOKENS - COMPUTED, computed=False)
    stream.run(TOKENS)
    late = Size.of(engine, tape)

    checks: list[tuple[Appended, torch.Tensor]] = []
    while sum(len(appended.tokens) for appended, _ in checks) < RETENTION:
        logits = engine.logits([stream.append()])
        stream.commit()
        checks += zip(islice(stream.appended, len(stream.appended) - RECORDS, None),
                      logits.split(stream.lengths), strict=True)  # fmt: skip
    fork, question = tape.fork(), list(range(50, 70))
    assert fork.acquire(len(question))
    answer = engine.logits([Chunk(fork, question)])
    fork.release()

    history = History.begin(FROZEN)
    where = [history.add(each.tokens, each.coord, each.evicted) for each in stream.appended]
    asked = history.add(question, stream.written, tape.evicted_tokens, owner=1)
    expected = oracle_logits(engine.model, history)
    places = dict(zip([each.coord for each in stream.appended], where, strict=True))
    for appended, logits in checks:
        tolerance.assert_logits(engine.model, logits, expected[places[appended.coord]])
    tolerance.assert_logits(engine.model, answer, expected[asked])

    assert tape.evicted_tokens > TOKENS - RETENTION
    assert stream.frames > TOKENS / FRAME_LIMIT
    assert RETENTION + len(FROZEN) < stream.highest < FRAME_LIMIT
    assert stream.most_blocks == most_blocks
    assert (late.runs, late.extents) <= (early.runs + 1, early.extents + 1)
    assert abs(late.records - early.records) <= 2
    assert late.blocks <= most_blocks
    assert late.host_bytes < early.host_bytes + 100_000
    tape.release()
