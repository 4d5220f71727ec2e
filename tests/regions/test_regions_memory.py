"""Blocks and tapes against plain models of themselves, under random operations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.allocator import BlockAllocator, Run
from regions.fork import Fork
from regions.pool import KVPool, LayerShape
from regions.tape import Retention, Tape

FROZEN = 5


def pool(blocks: int = 40, block_size: int = 4) -> KVPool:
    return KVPool([LayerShape(1, 2, 2)], blocks, block_size=block_size)


def tape_of(memory: KVPool, retention: Retention, frame_limit: int = 64) -> Tape:
    prompt = Fork(memory, frame_limit=frame_limit)
    assert prompt.acquire(FROZEN)
    prompt.wrote(prompt.step(FROZEN), [0] * FROZEN)
    frozen = prompt.prefix()
    prompt.release()
    return Tape("t", memory, frozen, retention, frame_limit=frame_limit)


def append(tape: Tape, n: int) -> bool:
    tape.make_room(n, 1)
    if not tape.acquire(n):
        return False
    tape.wrote(tape.step(n), [0] * n)
    tape.commit([n])
    return True


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "grow", "share", "release"]), st.integers(0, 9)), max_size=60)
)
def test_blocks_are_conserved(operations: list[tuple[str, int]]) -> None:
    """Whatever is taken, shared and released, references add up and no block is handed out twice."""
    allocator = BlockAllocator(24)
    held: list[list[Run]] = []
    for name, n in operations:
        if name in ("take", "grow"):
            free = allocator.free_blocks
            runs = allocator.take(n, grows=name == "grow")
            assert (runs is None) == (n > free)
            if runs:
                assert sum(run.blocks for run in runs) == n
                held.append(runs)
        elif held and name == "share":
            allocator.share(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif held:
            allocator.release(held.pop(n % len(held)))
        allocator.check_integrity()
        blocks = {b for runs in held for run in runs for b in range(run.start, run.stop)}
        assert allocator.free_blocks == 24 - len(blocks)


def test_a_tape_continues_behind_its_last_block() -> None:
    """Two growing tapes keep their extents contiguous although they grow in turns."""
    memory = pool(blocks=400)
    tapes = [tape_of(memory, Retention(400), 1000) for _ in range(2)]
    for _ in range(50):
        assert all(append(tape, 6) for tape in tapes)
    assert [len(tape.extents) for tape in tapes] == [2, 2]  # frozen and one run


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 12)),
            st.tuples(st.just("fork"), st.integers(1, 9)),
            st.tuples(st.just("drop"), st.integers(0, 9)),
            st.tuples(st.just("reset"), st.integers(0, 9)),
        ),
        max_size=80,
    ),
    st.integers(0, 5),
)
def test_tape_and_forks_keep_their_promises(operations: list[tuple[str, int]], max_records: int) -> None:
    """Retention, whole-record eviction, frames, snapshot isolation of extents, and no leaked block."""
    memory = pool()
    tape = tape_of(memory, Retention(30, max_records))
    records: list[int] = []
    coord = 0
    forks: list[tuple[Fork, tuple[object, ...]]] = []
    for name, n in operations:
        if name == "append":
            if not append(tape, n):
                continue
            records.append(n)
            coord += n
            while sum(records) > 30 or (max_records and len(records) > max_records):
                records.pop(0)
            assert (tape.live_tokens, tape.live_records) == (sum(records), len(records))
            assert tape.max_position < 64
            sliding = tape.extents[1:]
            assert sum(e.length for e in sliding) == sum(records)
            assert not sliding or sliding[0].coord == coord - sum(records)
            frozen = tape.extents[0]
            assert frozen.coord + frozen.length == coord - sum(records)  # anchored right before the tape
        elif name == "fork":
            fork = tape.fork()
            if fork.acquire(n):
                fork.wrote(fork.step(n), [0] * n)
            forks.append((fork, fork.extents))
            assert fork.past_tokens == FROZEN + sum(records)
        elif forks and name == "drop":
            forks.pop(n % len(forks))[0].release()
        elif forks:
            fork, _ = forks[n % len(forks)]
            fork.reset()
            forks[n % len(forks)] = (fork, fork.extents)
        for fork, extents in forks:
            assert fork.extents == extents
        memory.check_integrity()
    for fork, _ in forks:
        fork.release()
        fork.release()
    tape.release()
    assert memory.free_blocks == memory.total_blocks
    memory.check_integrity()


def test_slots_of_a_live_fork_are_never_reused() -> None:
    """While a fork lives, the tape evicts and grows without touching a slot the fork can see."""
    memory = pool(blocks=30)
    tape = tape_of(memory, Retention(24))
    for _ in range(4):
        append(tape, 6)
    fork = tape.fork()
    seen = {slot for e in fork.extents for slot in range(e.slot, e.slot + e.length)}
    for _ in range(6):
        tape.make_room(6, 1)
        assert tape.acquire(6)
        step = tape.step(6)
        written = {slot for first, count in step.slots for slot in range(first, first + count)}
        assert not written & seen
        tape.wrote(step, [0] * 6)
        tape.commit([6])
    fork.release()


def test_impossible_sizes_are_refused() -> None:
    memory = pool()
    with pytest.raises(ValueError, match="no room for a question"):
        tape_of(memory, Retention(60))
    tape = tape_of(memory, Retention(30))
    with pytest.raises(ValueError, match="31 tokens exceed the retention of 30"):
        tape.make_room(31, 1)
    with pytest.raises(RuntimeError, match="were not acquired"):
        tape.step(9)
    with pytest.raises(ValueError, match="at least one block"):
        BlockAllocator(0)
