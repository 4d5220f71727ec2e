"""Blocks and tapes against plain models of themselves, under random operations."""

import os
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.allocator import BlockAllocator, Run
from regions.ephemeral import Fork
from regions.extents import Extent
from regions.frozen import Context, SharedBlocks
from regions.kv_tensors import KVPool, LayerShape
from regions.tape import Retention
from tests.regions.numbered import (
    FROZEN,
    append,
    fresh_window,
    grow,
    pool,
    prompt_of,
    read,
    slots_of,
    tape_of,
    write,
)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "grow", "share", "release", "resize"]), st.integers(0, 23)),
        max_size=60,
    )
)
def test_blocks_are_conserved(operations: list[tuple[str, int]]) -> None:
    """In any order of taking, sharing, releasing and resizing, references add up and no block has two users.

    Nothing above the limit is taken, what is in use there stays, and what becomes free there is retired once.
    """
    allocator, limit = BlockAllocator(24), 24
    kept: list[list[Run]] = []
    retired = set[int]()
    for name, n in operations:
        used = {b for runs in kept for run in runs for b in range(run.start, run.stop)}
        if name in ("take", "grow"):
            free, n = allocator.free_blocks, n % 10
            runs = allocator.take(n, grows=name == "grow")
            assert (runs is None) == (n > free)
            if runs:
                assert sum(run.blocks for run in runs) == n
                assert all(run.stop <= limit for run in runs)
                kept.append(runs)
        elif name == "resize":
            before, limit = limit, n + 1
            allocator.resize(limit)
            retired |= set(range(limit, before)) - used
        elif kept and name == "share":
            allocator.share(kept[n % len(kept)])
            kept.append(list(kept[n % len(kept)]))
        elif kept:
            allocator.release(kept.pop(n % len(kept)))
        allocator.check_integrity()
        blocks = {b for runs in kept for run in runs for b in range(run.start, run.stop)}
        retired |= {b for b in used - blocks if b >= limit}
        found = [b for run in allocator.retired for b in range(run.start, run.stop)]
        allocator.retired.clear()
        assert sorted(found) == sorted(retired)
        retired.clear()
        assert allocator.free_blocks == limit - len({b for b in blocks if b < limit})
        assert allocator.total_blocks == allocator.free_blocks + len(blocks)


@pytest.mark.parametrize("limit", [0, 25, -1])
def test_a_limit_is_within_the_pool(limit: int) -> None:
    with pytest.raises(ValueError, match="at most 24"):
        BlockAllocator(24).resize(limit)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_above_a_lower_limit_is_given_back_and_reads_as_zero() -> None:
    """At the next `trim`, where it was in use as the limit was lowered."""
    memory = KVPool([LayerShape(2, 64, 64)] * 2, 8192, dtype=torch.float32)  # 256 MiB
    tensors = (*memory.keys, *memory.values)
    before = resident_bytes()
    taken = memory.take(8192)
    assert taken
    for tensor in tensors:
        tensor.fill_(1.0)
    full = resident_bytes()
    assert full - before > 0.9 * memory.bytes
    memory.resize(1024)
    assert resident_bytes() > full - 2**20  # all is in use
    memory.blocks.release([Run(512, 8192)])
    memory.trim()
    assert resident_bytes() - before < 0.2 * memory.bytes
    assert (memory.total_blocks, memory.free_blocks, memory.capacity) == (1024, 512, 8192)
    edge = 1024 * memory.block_size
    for tensor in tensors:
        assert bool((tensor[:, :edge] == 1.0).all())
        assert not bool(tensor[:, edge:].any())
    memory.resize(8192)
    assert memory.free_blocks == 8192 - 512
    memory.blocks.release([Run(0, 512)])
    memory.check_integrity()


def test_a_tape_continues_behind_its_last_block() -> None:
    """Two tapes that grow in turn keep their extents contiguous."""
    memory = pool(blocks=400)
    tapes = [tape_of(memory, Retention(400), 1000) for _ in range(2)]
    for _ in range(50):
        assert all(append(memory, tape, [0] * 6) for tape in tapes)
    assert [len(tape.extents) for tape in tapes] == [2, 2]  # frozen and one run


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "fork", "drop", "reset"]), st.integers(0, 11)),
        min_size=20,
        max_size=80,
    ),
    st.integers(0, 5),
)
def test_tape_and_forks_keep_their_promises(operations: list[tuple[str, int]], max_records: int) -> None:
    """Retention, whole-record eviction, frames, snapshot isolation, and no leaked block.

    While a fork lives, its extents stay, and no slot of them is written.
    """
    memory = pool()
    tape = tape_of(memory, Retention(30, max_records))
    records: list[int] = []
    coord = version = 0
    forks: list[tuple[Fork, tuple[Extent, ...], list[int]]] = []
    for name, n in operations:
        if name == "append":
            # room is made first, and stays where the pool has no block left; forks see it at a commit
            while sum(records) + n + 1 > 30 or (max_records and len(records) >= max_records):
                records.pop(0)
            if not append(memory, tape, range(coord, coord + n + 1)):
                assert (tape.live_tokens, tape.live_records) == (sum(records), len(records))
                continue
            records.append(n + 1)
            coord += n + 1
            version = sum(records)
            assert (tape.live_tokens, tape.live_records) == (sum(records), len(records))
            assert all(each.max_position < 64 for each in tape.state.stretches)
            frozen, *sliding = tape.extents
            assert sum(e.length for e in sliding) == sum(records)
            assert sliding[0].coord == coord - sum(records)
            assert frozen.coord + frozen.length == coord - sum(records)  # anchored right before the tape
        elif name == "fork":
            fork = tape.fork()
            assert fork.cached_tokens == FROZEN + version
            if fork.acquire(n):
                write(memory, fork, range(n))
            forks.append((fork, fork.extents, read(memory, fork.extents)))
        elif forks and name == "drop":
            forks.pop(n % len(forks))[0].release()
        elif forks and name == "reset":
            fork, _, seen = forks[n % len(forks)]
            fork.reset()
            forks[n % len(forks)] = (fork, fork.extents, seen[: fork.cached_tokens])
        for fork, extents, seen in forks:
            assert fork.extents == extents
            assert read(memory, extents) == seen
        memory.check_integrity()
    for fork, _, _ in forks:
        fork.release()
        fork.release()
    tape.release()
    assert memory.free_blocks == memory.total_blocks
    memory.check_integrity()


def test_impossible_sizes_are_refused() -> None:
    memory = pool()
    with pytest.raises(ValueError, match="no room"):
        tape_of(memory, Retention(60))
    tape = tape_of(memory, Retention(30))
    with pytest.raises(ValueError, match="retention of 30"):
        tape.make_room([31])
    with pytest.raises(RuntimeError, match="were not acquired"):
        tape.next_slots(9)
    with pytest.raises(ValueError, match="one block"):
        BlockAllocator(0)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["write", "keep", "share", "reset"]), st.integers(0, 13)), max_size=40)
)
def test_a_cut_back_prompt_never_overwrites_what_others_read(operations: list[tuple[str, int]]) -> None:
    """Aliased prefixes keep their slots, whatever the prompt they came from does next."""
    memory = pool(60)
    prompt = Fork(memory, frame_limit=1000)
    expected: list[int] = []
    shared: list[tuple[Context, list[int]]] = []
    for name, n in operations:
        if name == "write" and n and prompt.acquire(n):
            written = write(memory, prompt, range(n))
            assert not any(set(written) & set(slots) for _, slots in shared)
            expected += range(n)
        elif name == "keep":
            prompt.keep(min(n, prompt.length))
            del expected[n:]
        elif name == "share" and prompt.length:
            shared.append((prompt.as_context(), slots_of(prompt.extents)))
        elif name == "reset":
            prompt.reset()
            expected = []
        assert prompt.tokens == expected
        slots = slots_of(prompt.extents)
        assert len(slots) == len(set(slots)) == prompt.length
        assert [e.coord for e in prompt.extents] == [
            sum(e.length for e in prompt.extents[:i]) for i in range(len(prompt.extents))
        ]
        memory.check_integrity()
    prompt.release()
    for context, _ in shared:
        context.release()
    assert memory.free_blocks == memory.total_blocks


def test_cutting_back_gives_blocks_back() -> None:
    memory = pool(20)
    prompt = prompt_of(memory, range(33))
    assert memory.free_blocks == 20 - 9
    prompt.keep(5)
    assert memory.free_blocks == 20 - 2
    with pytest.raises(ValueError, match="6 tokens"):
        prompt.keep(6)


def test_forking_does_not_touch_the_blocks_of_the_context() -> None:
    """A fork changes no block's reference count: the version is one shared object."""
    memory = pool(60)
    tape = tape_of(memory, Retention(40))
    append(memory, tape, range(30))
    before = memory.blocks.references.copy()
    forks = [tape.fork() for _ in range(5)]
    assert (memory.blocks.references == before).all()
    grow(memory, forks[0], [1, 2, 3])
    assert [reader.context_tokens for reader in (tape, *forks[:2])] == [30, FROZEN + 33, FROZEN + 30]
    context = prompt_of(memory, [1]).as_context()
    context.release()
    with pytest.raises(RuntimeError, match="already released"):
        context.release()


def test_a_fresh_window_replaces_the_carried_one() -> None:
    """Readers see it from the next commit on, without records evicted meanwhile."""
    memory = pool(120)
    tape = tape_of(memory, Retention(30), frame_limit=200)
    for _ in range(6):
        append(memory, tape, [0] * 7)
    fresh = fresh_window(memory, tape)
    append(memory, tape, [1] * 6)
    with pytest.raises(ValueError, match="live window"):
        tape.adopt(fresh)
    grow(memory, fresh, tape.window[-6:])
    before = tape.fork()
    tape.adopt(fresh)
    memory.check_integrity()
    still = tape.fork()
    assert still.extents == before.extents
    assert append(memory, tape, [0] * 3)
    after = tape.fork()
    assert not {e.slot for e in after.extents[1:]} & {e.slot for e in before.extents[1:]}
    assert after.cached_tokens == FROZEN + tape.live_tokens
    for reader in (before, still, after, tape):
        reader.release()
    assert memory.free_blocks == memory.total_blocks


APPENDS = st.tuples(
    st.lists(st.tuples(st.integers(1, 6), st.integers(-1, 1)), min_size=1, max_size=3), st.integers(-2, 40)
)


@settings(max_examples=150)
@given(st.lists(APPENDS, min_size=1, max_size=40), st.sampled_from([0, 7, 50]))
def test_records_are_evicted_by_tokens_and_event_time(
    appends: list[tuple[list[tuple[int, int]], int]], span: int
) -> None:
    """As from a plain list: event times with gaps, repeats and steps back; by whichever is stricter."""
    memory = pool()
    tape = tape_of(memory, Retention(40, span_ns=span))
    now, number = 1000, 0
    plain: list[tuple[list[int], int]] = []
    for records, gap in appends:
        now += gap
        times = [now + step for _, step in records]
        numbers = []
        for n, _ in records:
            numbers.append(list(range(number, number + n)))
            number += n
        while plain and sum(len(record) for record, _ in plain) + sum(map(len, numbers)) > 40:
            plain.pop(0)
        while span and plain and plain[0][1] < max(times) - span:
            plain.pop(0)
        assert append(memory, tape, *numbers, times=times)
        plain += zip(numbers, times, strict=True)
        assert [(list(r.tokens), r.ts_event) for r in tape.state.records] == plain
        assert tape.window == list(chain.from_iterable(record for record, _ in plain))


def test_a_commit_of_the_wrong_shape_changes_nothing() -> None:
    memory = pool()
    tape = tape_of(memory, Retention(20, span_ns=5))
    grow(memory, tape, range(6))
    for lengths, times in (([3, 4], [1, 2]), ([3, 3], [1])):
        with pytest.raises(RuntimeError, match="add up"):
            tape.commit(lengths, times)
    assert tape.live_records == 0
    assert tape.commit([3, 3], [1, 2]) == 1
    assert tape.window == list(range(6))


def test_a_lost_block_is_found() -> None:
    """The check names a block whose references outnumber its owners, and the reverse."""
    memory = pool()
    runs = memory.take(2)
    assert runs is not None
    with pytest.raises(AssertionError, match="1 references and 0"):
        memory.check_integrity()
    kept = SharedBlocks(memory, runs)
    memory.blocks.release(runs)
    memory.check_integrity()
    memory.blocks.share(runs)
    with pytest.raises(AssertionError, match="2 references and 1"):
        memory.check_integrity()
    memory.blocks.release(runs)
    kept.release()


def test_a_pool_takes_memory_as_it_is_written() -> None:
    """A daemon of a group has a pool for all sessions, and windows of its own ones."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    pool = KVPool([LayerShape(2, 64, 64)] * 4, 8192, dtype=torch.bfloat16)
    assert pool.bytes == 1 << 28
    assert resident() - before < pool.bytes // 4
    for kept in (*pool.keys, *pool.values):
        assert kept.data_ptr() % 64 == 0
        assert kept[:, -1].count_nonzero() == 0
