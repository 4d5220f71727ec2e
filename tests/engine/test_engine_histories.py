"""Any history of a sliding session gives the oracle's logits, wherever its KV was moved meanwhile."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model.loaded import LoadedModel
from engine.step import Chunk
from regions.allocator import Run
from regions.ephemeral import Fork
from regions.frozen import SharedBlocks
from regions.offload.host_tier import HostTier
from regions.offload.snapshot_format import Identity, Restoring, Snapshot, SnapshotHeader, write_snapshot
from regions.tape import Retention
from tests.engine.oracle import tiny
from tests.kit.engine import TapeWithHistory, scribble, tokens

OPERATIONS = [
    *("append_some", "fork", "grow", "cut", "preempt", "drop"),
    *("out", "in", "swap", "return", "compact", "snapshot"),
]
RETENTION = Retention(40)


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


class Session(TapeWithHistory):
    """One session in a small pool."""

    def __init__(self, loaded: LoadedModel, seed: int, directory: Path) -> None:
        rng = random.Random(seed)
        super().__init__(
            loaded,
            blocks=80,
            frame_limit=rng.choice([70, 100, 400]),
            retention=RETENTION,
            frozen=rng.randrange(1, 12),
            seed=seed,
        )
        self.directory, self.readers = directory, list[Reader]()
        pool = self.engine.pool
        taken = pool.take(pool.free_blocks)
        assert taken is not None
        # others' blocks all over the pool: nothing long comes back in one piece
        free = [block for run in taken for block in range(run.start, run.stop)]
        self.others = SharedBlocks(pool, [Run(block, block + 1) for block in free[::7]])
        pool.blocks.release(taken)
        self.host = HostTier(pool, 40)

    def append_some(self) -> None:
        """Records together; readers give way to them."""
        records = [tokens(self.rng, self.rng.randrange(2, 9)) for _ in range(self.rng.randrange(1, 5))]
        if self.tape.blocks_needed(sum(map(len, records))) > self.engine.pool.free_blocks:
            self.drop_readers()
        self.append_together(*records)

    def drop_readers(self) -> None:
        for reader in self.readers:
            reader.fork.release()
        self.readers.clear()

    def fork(self) -> None:
        if len(self.readers) < 3 and self.tape.acquire(0):
            self.readers.append(Reader(self.tape.fork(), self.owner(), self.coord, self.tape.evicted_tokens))

    def grow(self, reader: Reader) -> None:
        part = tokens(self.rng, self.rng.randrange(1, 7))
        if reader.fork.acquire(len(part)):
            coord = reader.coord + reader.fork.length
            logits = self.engine.logits([Chunk(reader.fork, part)])
            self.history.add(part, coord, reader.evicted, reader.owner, logits)

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
        self.drop_readers()
        pool = self.engine.pool
        identity = Identity.of(pool, model="m", tokenizer="t", frozen=self.frozen)
        file = self.directory / "t.kv"
        header = SnapshotHeader("t", identity, pool.block_size, self.tape.state, 1)
        write_snapshot(file, header, pool, self.tape.live_ranges)
        self.tape.release()
        self.tape = self.engine.open_tape("t", self.frozen, RETENTION)
        snapshot = Snapshot.open(file)
        self.tape.resume(snapshot.header.state, Restoring(pool, snapshot))
        assert self.tape.swap_in()

    def apply(self, operation: str) -> None:
        reader = self.rng.choice(self.readers) if self.readers else None
        if operation in ("append_some", "fork", "snapshot"):
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
        self.drop_readers()
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
    world = Session(model(architecture), seed, tmp_path)
    world.append_some()
    for operation in operations:
        world.apply(operation)
    world.fork()
    for reader in world.readers:
        world.grow(reader)
    world.history.verify(world.model)
    world.close()
