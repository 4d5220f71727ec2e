"""KV that was swapped, spilled, restored, compacted or prefilled again gives the dense model's logits."""

import random
from pathlib import Path

import pytest
import torch

from engine.attention.cpu_kernel.backend import CpuKernelAttention
from engine.engine import Engine
from engine.model.canary import dense_logits
from regions.ephemeral import Fork
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import NotResident
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity, Restoring, Snapshot, SnapshotHeader, write_snapshot
from regions.tape import Retention, Tape, compact_one
from tests.engine.oracle import tiny
from tests.kit import tolerance
from tests.kit.engine import TapeWithHistory, append, ask, ask_together, prefill, scribble, tokens

IDENTITY_OF = {"model": "tiny", "tokenizer": "none"}


def rebuild(engine: Engine, tape: Tape) -> None:
    """Rebuild a lost session, as the scheduler does."""
    fresh = tape.fresh_window()
    prefill(engine, fresh, tape.window, 16)
    tape.adopt(fresh)


class AskedTape(TapeWithHistory):
    """Questions to it are checked against the oracle."""

    def __init__(self, model: str = "llama", blocks: int = 60) -> None:
        super().__init__(model, blocks=blocks, frame_limit=110, records=25)
        assert len({e.origin for e in self.tape.extents[1:]}) > 1  # several frames

    def ask(self) -> None:
        fork = self.tape.fork()
        self.answer(fork, self.owner(), self.coord, self.tape.evicted_tokens)
        fork.release()

    def answer(self, fork: Fork, owner: int, coord: int, evicted: int, n: int = 6) -> None:
        part = tokens(self.rng, n)
        self.history.add(part, coord, evicted, owner, ask(self.engine, fork, part))

    def verify(self) -> None:
        self.history.verify(self.model)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_swapped_tapes_and_forks_equal_the_oracle(architecture: str) -> None:
    """Both ways, in several frames, after evictions, to other slots, with readers of older versions."""
    world = AskedTape(architecture)
    host = HostTier(world.engine.pool, 60)
    for _ in range(4):
        reader, who = world.tape.fork(), world.owner()
        coord, evicted = world.coord, world.tape.evicted_tokens
        world.answer(reader, who, coord, evicted)
        world.append()
        assert reader.swap_out(host)
        old = world.tape.extents
        assert world.tape.swap_out(host)
        scribble(world.engine.pool)
        shift = world.engine.open_prompt()  # so that the window comes back to other slots
        assert shift.acquire(4 * world.rng.randrange(1, 9))
        world.ask()
        assert world.tape.extents != old
        shift.release()
        assert reader.swap_in()
        world.answer(reader, who, coord + 6, evicted, n=5)
        reader.release()
        world.append()
    world.verify()
    world.tape.release()
    assert host.pool.free_blocks == 60


def test_an_updated_swapped_prompt_equals_the_dense_model() -> None:
    """Cut back on the host, brought back, and continued otherwise: the logits of a fresh prefill."""
    rng = random.Random(2)
    model = tiny("llama", layers=2)
    engine = Engine(model, blocks=60, block_size=4)
    host = HostTier(engine.pool, 30)
    prompt = engine.open_prompt()
    text = tokens(rng, 30)
    ask(engine, prompt, text)
    for kept in (21, 16, 3):
        assert prompt.swap_out(host)
        prompt.keep(kept)
        scribble(engine.pool)
        text = text[:kept] + tokens(rng, 14)
        seen = ask(engine, prompt, text[kept:])
        tolerance.assert_logits(model, seen, dense_logits(model, text)[kept:])
    prompt.release()


def test_compacted_windows_equal_the_oracle() -> None:
    """A window in several runs and frames is copied to one run; readers of before keep the old blocks."""
    world = AskedTape(blocks=120)
    blocks = world.engine.pool.blocks
    for _ in range(3):
        while world.tape.runs < 3:
            last = world.tape.extents[-1]
            blocked = blocks.take(1, behind=-(-(last.slot + last.length) // 4))
            assert blocked is not None
            world.append()
            blocks.release(blocked)
        before, who = world.tape.fork(), world.owner()
        coord, evicted = world.coord, world.tape.evicted_tokens
        assert compact_one([world.tape])
        assert world.tape.runs == 1
        assert not compact_one([world.tape])
        world.ask()
        world.answer(before, who, coord, evicted)
        before.release()
        world.append()
    world.verify()
    world.tape.release()


@pytest.mark.parametrize("spoiled", [False, True])
def test_spilled_sessions_come_back_by_themselves(tmp_path: Path, spoiled: bool) -> None:
    """From disk they equal the oracle; with a spoiled file they are lost, and rebuilt."""
    world = AskedTape()
    engine, tape = world.engine, world.tape
    now = [0]
    residency = Residency(engine.pool, Idleness(100, lambda: tmp_path), lambda: now[0])
    residency.attach(tape, Identity.of(engine.pool, frozen=world.frozen, **IDENTITY_OF))
    now[0] = 100
    assert residency.spill_idle()
    assert not tape.resident
    (file,) = tmp_path.iterdir()
    if spoiled:
        raw = bytearray(file.read_bytes())
        raw[-100] ^= 1
        file.write_bytes(raw)
    scribble(engine.pool)
    if spoiled:
        with pytest.raises(NotResident, match="stored KV"):
            tape.fork()
        rebuild(engine, tape)
    fork = tape.fork()
    assert list(tmp_path.iterdir()) == []
    question = tokens(world.rng, 6)
    seen = ask(engine, fork, question)
    fork.release()
    if spoiled:
        assert (residency.restores["rebuilt"], residency.failures) == (1, 1)
        dense = dense_logits(world.model, [*world.frozen, *tape.window, *question])
        tolerance.assert_logits(world.model, seen, dense[-6:])
    else:
        world.history.add(question, world.coord, tape.evicted_tokens, world.owner(), seen)
        world.append()
        world.ask()
        world.verify()
        assert (residency.restores["disk"], residency.failures) == (1, 0)
    tape.release()


def test_a_session_goes_on_from_its_snapshot_in_another_engine(tmp_path: Path) -> None:
    """Records, frames, versions and logits continue as in the first engine."""
    world = AskedTape()
    identity = Identity.of(world.engine.pool, frozen=world.frozen, **IDENTITY_OF)
    file = tmp_path / "t.kv"
    header = SnapshotHeader("t", identity, 4, world.tape.state, 1)
    write_snapshot(file, header, world.engine.pool, world.tape.live_ranges)
    left = world.tape

    engine = Engine(world.model, blocks=70, block_size=16, frame_limit=110)  # other blocks, too
    free = engine.pool.free_blocks
    tape = engine.open_tape("t", world.frozen, Retention(64))
    snapshot = Snapshot.open(file)
    snapshot.expect(identity)
    tape.resume(snapshot.header.state, Restoring(engine.pool, snapshot))
    assert (tape.version, tape.evicted_tokens, tape.state.records) == (
        25,
        left.evicted_tokens,
        left.state.records,
    )
    left.release()
    world.engine, world.tape = engine, tape
    world.ask()
    for _ in range(12):
        world.append()
        world.ask()
    world.verify()
    tape.release()
    assert engine.pool.blocks.free_blocks + len(world.frozen) // 16 + 1 >= free


def test_a_restored_window_gives_the_bits_that_it_gave_in_many_runs_of_slots(tmp_path: Path) -> None:
    """Every other block was taken as the window grew; the engine that restores it has larger blocks, too."""
    world = TapeWithHistory(blocks=120, frame_limit=110)
    neighbours = [world.engine.open_prompt() for _ in range(world.engine.pool.free_blocks)]
    assert all(each.acquire(4) for each in neighbours)
    for each in neighbours[::2]:
        each.release()
    for _ in range(25):
        world.append()
    identity, file = Identity.of(world.engine.pool, frozen=world.frozen, **IDENTITY_OF), tmp_path / "t.kv"
    write_snapshot(
        file, SnapshotHeader("t", identity, 4, world.tape.state, 1), world.engine.pool, world.tape.live_ranges
    )
    engine = Engine(world.model, blocks=70, block_size=16, frame_limit=110)
    restored = engine.open_tape("t", world.frozen, Retention(64))
    restored.resume(world.tape.state, Restoring(engine.pool, Snapshot.open(file)))
    places = (world.engine, world.tape), (engine, restored)
    assert isinstance(engine.attention, CpuKernelAttention)
    for _ in range(4):
        asked = [tokens(world.rng, n) for n in (5, 5, 2)]
        record = tokens(world.rng, 7)
        found = []
        for place, tape in places:
            forks = [tape.fork() for _ in asked]
            logits = [ask(place, forks[0], record)]
            logits += ask_together(place, list(zip(forks, asked, strict=True)))
            for fork in forks:
                fork.release()
            found.append(torch.cat([*logits, append(place, tape, record)]))
        assert world.tape.runs > 5
        assert torch.equal(*found)
