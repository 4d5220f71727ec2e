"""Any history of a sliding session gives the oracle's logits, wherever its KV was moved meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.model.loaded import LoadedModel
from engine.step import Chunk
from regions.allocator import Run
from regions.ephemeral import Fork
from regions.frozen import SharedBlocks
from regions.offload.host_tier import HostTier
from regions.offload.snapshot_format import Identity, Restoring, Snapshot, SnapshotHeader, write_snapshot
from regions.tape import Retention, Tape
from tests.engine.oracle import History, Window, oracle_logits, tiny
from tests.kit import tolerance
from tests.kit.engine import scribble, tokens

OPERATIONS = [
    *("append", "fork", "grow", "cut", "preempt", "drop"),
    *("out", "in", "swap", "return", "compact", "snapshot"),
]
RETENTION = 40


@cache
def model(architecture: str) -> LoadedModel:
    return tiny(architecture, layers=2)


@dataclass
class Reader:
    """A fork and its position in the stream. ``owner``: its name in the history."""

    fork: Fork
    owner: int
    coord: int
    evicted: int


@dataclass
class Session:
    """One session in a small pool, with the history the oracle computes from."""

    architecture: str
    rng: random.Random
    directory: Path
    engine: Engine = field(init=False)
    readers: list[Reader] = field(default_factory=list)
    checks: list[tuple[slice, torch.Tensor]] = field(default_factory=list)
    owners: int = 0

    def __post_init__(self) -> None:
        frame_limit = self.rng.choice([70, 100, 400])
        self.engine = Engine(model(self.architecture), blocks=80, block_size=4, frame_limit=frame_limit)
        pool = self.engine.pool
        taken = pool.take(pool.total_blocks)
        assert taken is not None
        # others' blocks all over the pool: nothing long comes back in one piece
        self.others = SharedBlocks(pool, [Run(block, block + 1) for block in range(0, pool.total_blocks, 7)])
        pool.blocks.release(taken)
        self.host = HostTier(self.engine.pool, 40)
        self.frozen = tokens(self.rng, self.rng.randrange(1, 12))
        self.tape = self.open()
        self.history = History.begin(self.frozen)
        self.window = Window(RETENTION)

    def open(self) -> Tape:
        return self.engine.open_tape("t", self.frozen, Retention(RETENTION))

    def owner(self) -> int:
        self.owners += 1
        return self.owners

    @property
    def written(self) -> int:
        return self.tape.evicted_tokens + self.tape.live_tokens

    def append(self) -> None:
        """Records together, which see what they would see one by one."""
        records = [tokens(self.rng, self.rng.randrange(2, 9)) for _ in range(self.rng.randrange(1, 5))]
        flat = [token for record in records for token in record]
        coord = self.written
        self.tape.make_room(list(map(len, records)))
        if not self.tape.acquire(len(flat)):
            for reader in self.readers:
                reader.fork.release()
            self.readers.clear()
            assert self.tape.acquire(len(flat))
        places = []
        for record in records:
            places.append(self.history.add(record, coord, self.window.add(len(record))))
            coord += len(record)
        assert self.tape.evicted_tokens == self.window.evicted
        where = slice(places[0].start, places[-1].stop)
        self.checks.append((where, self.engine.logits([Chunk(self.tape, flat)])))
        self.tape.commit([len(record) for record in records])

    def fork(self) -> None:
        if len(self.readers) < 3 and self.tape.acquire(0):
            self.readers.append(
                Reader(self.tape.fork(), self.owner(), self.written, self.tape.evicted_tokens)
            )

    def grow(self, reader: Reader) -> None:
        part = tokens(self.rng, self.rng.randrange(1, 7))
        if reader.fork.acquire(len(part)):
            where = self.history.add(part, reader.coord + reader.fork.length, reader.evicted, reader.owner)
            self.checks.append((where, self.engine.logits([Chunk(reader.fork, part)])))

    def cut(self, reader: Reader, n: int) -> None:
        """The kept tokens get a new owner in the history, because the oracle never drops an owner's token."""
        kept = reader.fork.tokens[:n]
        reader.fork.keep(n)
        reader.owner = self.owner()
        if kept:
            self.history.add(kept, reader.coord, reader.evicted, reader.owner)

    def snapshot(self) -> None:
        """End the session and resume it from its file."""
        if not self.tape.movable:
            return
        for reader in self.readers:
            reader.fork.release()
        self.readers.clear()
        pool = self.engine.pool
        identity = Identity.of(pool, model="m", tokenizer="t", frozen=self.frozen)
        file = self.directory / "t.kv"
        header = SnapshotHeader("t", identity, pool.block_size, self.tape.state, 1)
        write_snapshot(file, header, pool, self.tape.live_ranges)
        self.tape.release()
        self.tape = self.open()
        snapshot = Snapshot.open(file)
        self.tape.resume(snapshot.header.state, Restoring(pool, snapshot))
        assert self.tape.swap_in()

    def apply(self, operation: str) -> None:
        reader = self.rng.choice(self.readers) if self.readers else None
        if operation in ("append", "fork", "snapshot"):
            getattr(self, operation)()
        elif operation == "swap":
            self.tape.swap_out(self.host)
        elif operation == "return":
            self.tape.swap_in()
        elif operation == "compact":
            self.tape.compact()
        elif reader is not None:
            self.to_reader(operation, reader)
        self.engine.pool.check_integrity()
        self.host.pool.check_integrity()
        scribble(self.engine.pool, self.host.pool)

    def to_reader(self, operation: str, reader: Reader) -> None:
        if operation == "grow":
            self.grow(reader)
        elif operation == "cut":
            self.cut(reader, self.rng.randrange(reader.fork.length + 1))
        elif operation == "preempt":
            reader.fork.reset()
            reader.owner = self.owner()
        elif operation == "out":
            reader.fork.swap_out(self.host)
        elif operation == "in":
            reader.fork.swap_in()
        else:
            reader.fork.release()
            self.readers.remove(reader)

    def close(self) -> None:
        for reader in self.readers:
            reader.fork.release()
        self.tape.release()
        self.others.release()
        self.host.poll()
        self.engine.cache.clear()
        for pool in (self.engine.pool, self.host.pool):
            assert pool.blocks.free_blocks == pool.total_blocks


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from(["llama", "mistral"]),
    st.integers(0, 10**9),
    st.lists(st.sampled_from(OPERATIONS), min_size=20, max_size=60),
)
def test_any_history_of_a_session_gives_the_oracles_logits(
    tmp_path: Path, architecture: str, seed: int, operations: list[str]
) -> None:
    """Appends that evict, forks that grow, are cut, preempted and swapped, swaps, compaction, snapshots."""
    world = Session(architecture, random.Random(seed), tmp_path)
    world.append()
    for operation in operations:
        world.apply(operation)
    world.fork()
    for reader in world.readers:
        world.grow(reader)
    expected = oracle_logits(model(architecture), world.history)
    for where, actual in world.checks:
        tolerance.assert_logits(model(architecture), actual, expected[where])
    world.close()
