"""Blocks and tapes against plain models of themselves, under random operations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.allocator import BlockAllocator, Run
from regions.ephemeral import Fork
from regions.frozen import Context, SharedBlocks
from regions.kv_tensors import KVPool, LayerShape
from regions.tape import Retention, Tape

FROZEN = 5


def pool(blocks: int = 40, block_size: int = 4) -> KVPool:
    return KVPool([LayerShape(1, 2, 2)], blocks, block_size=block_size)


def tape_of(memory: KVPool, retention: Retention, frame_limit: int = 64) -> Tape:
    prompt = Fork(memory, frame_limit=frame_limit)
    assert prompt.acquire(FROZEN)
    prompt.wrote(prompt.next_slots(FROZEN), [0] * FROZEN)
    frozen = prompt.as_context()
    prompt.release()
    return Tape("t", memory, frozen, retention, frame_limit=frame_limit)


def append(tape: Tape, n: int) -> bool:
    tape.make_room([n])
    if not tape.acquire(n):
        return False
    tape.wrote(tape.next_slots(n), [0] * n)
    tape.commit([n])
    return True


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "grow", "share", "release"]), st.integers(0, 9)), max_size=60)
)
def test_blocks_are_conserved(operations: list[tuple[str, int]]) -> None:
    """In any order of taking, sharing and releasing, references add up and no block has two users."""
    allocator = BlockAllocator(24)
    kept: list[list[Run]] = []
    for name, n in operations:
        if name in ("take", "grow"):
            free = allocator.free_blocks
            runs = allocator.take(n, grows=name == "grow")
            assert (runs is None) == (n > free)
            if runs:
                assert sum(run.blocks for run in runs) == n
                kept.append(runs)
        elif kept and name == "share":
            allocator.share(kept[n % len(kept)])
            kept.append(list(kept[n % len(kept)]))
        elif kept:
            allocator.release(kept.pop(n % len(kept)))
        allocator.check_integrity()
        blocks = {b for runs in kept for run in runs for b in range(run.start, run.stop)}
        assert allocator.free_blocks == 24 - len(blocks)


def test_a_tape_continues_behind_its_last_block() -> None:
    """Two tapes that grow in turn keep their extents contiguous."""
    memory = pool(blocks=400)
    tapes = [tape_of(memory, Retention(400), 1000) for _ in range(2)]
    for _ in range(50):
        assert all(append(tape, 6) for tape in tapes)
    assert [len(tape.extents) for tape in tapes] == [2, 2]  # frozen and one run


@settings(max_examples=150)
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
            assert max((each.max_position for each in tape.state.stretches), default=0) < 64
            sliding = tape.extents[1:]
            assert sum(e.length for e in sliding) == sum(records)
            assert not sliding or sliding[0].coord == coord - sum(records)
            frozen = tape.extents[0]
            assert frozen.coord + frozen.length == coord - sum(records)  # anchored right before the tape
        elif name == "fork":
            fork = tape.fork()
            if fork.acquire(n):
                fork.wrote(fork.next_slots(n), [0] * n)
            forks.append((fork, fork.extents))
            assert fork.cached_tokens == FROZEN + sum(records)
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
        tape.make_room([6])
        assert tape.acquire(6)
        step = tape.next_slots(6)
        written = {slot for first, count in step.slots for slot in range(first, first + count)}
        assert not written & seen
        tape.wrote(step, [0] * 6)
        tape.commit([6])
    fork.release()


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


def prompt_of(memory: KVPool, tokens: list[int], context: Context | None = None) -> Fork:
    prompt = Fork(memory, frame_limit=64, context=context)
    assert prompt.acquire(len(tokens))
    prompt.wrote(prompt.next_slots(len(tokens)), tokens)
    return prompt


def slots_of(fork: Fork) -> list[int]:
    return [slot for e in fork.extents for slot in range(e.slot, e.slot + e.length)]


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
            step = prompt.next_slots(n)
            written = {slot for first, count in step.slots for slot in range(first, first + count)}
            assert not any(written & set(slots) for _, slots in shared)
            prompt.wrote(step, list(range(n)))
            expected += range(n)
        elif name == "keep":
            prompt.keep(min(n, prompt.length))
            del expected[n:]
        elif name == "share" and prompt.length:
            shared.append((prompt.as_context(), slots_of(prompt)))
        elif name == "reset":
            prompt.reset()
            expected = []
        assert prompt.tokens == expected
        assert len(slots_of(prompt)) == len(set(slots_of(prompt))) == prompt.length
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
    prompt = prompt_of(memory, list(range(33)))
    assert memory.free_blocks == 20 - 9
    prompt.keep(5)
    assert memory.free_blocks == 20 - 2
    with pytest.raises(ValueError, match="6 tokens"):
        prompt.keep(6)
    prompt.release()


def test_forking_does_not_touch_the_blocks_of_the_context() -> None:
    """A fork changes no block's reference count: the version is one shared object."""
    memory = pool(60)
    tape = tape_of(memory, Retention(40))
    append(tape, 30)
    before = memory.blocks.references.copy()
    forks = [tape.fork() for _ in range(5)]
    assert (memory.blocks.references == before).all()
    for fork in forks:
        fork.release()
    prompt = prompt_of(memory, [1])
    context = prompt.as_context()
    prompt.release()
    context.release()
    with pytest.raises(RuntimeError, match="already released"):
        context.release()
    tape.release()


def test_a_fresh_window_replaces_the_carried_one() -> None:
    """Readers see it from the next commit on, without records evicted meanwhile."""
    memory = pool(120)
    tape = tape_of(memory, Retention(30), frame_limit=200)
    for _ in range(6):
        append(tape, 7)
    fresh = tape.fresh_window()
    window = tape.window
    assert fresh.acquire(len(window))
    fresh.wrote(fresh.next_slots(len(window)), window)
    append(tape, 6)
    with pytest.raises(ValueError, match="live window"):
        tape.adopt(fresh)
    missing = tape.window[-6:]
    assert fresh.acquire(6)
    fresh.wrote(fresh.next_slots(6), missing)
    before = tape.fork()
    tape.adopt(fresh)
    memory.check_integrity()
    still = tape.fork()
    assert still.extents == before.extents
    assert append(tape, 3)
    after = tape.fork()
    assert not {e.slot for e in after.extents[1:]} & {e.slot for e in before.extents[1:]}
    assert after.cached_tokens == FROZEN + tape.live_tokens
    for fork in (before, still, after):
        fork.release()
    tape.release()
    assert memory.free_blocks == memory.total_blocks


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=40))
def test_records_are_evicted_by_event_time(records: list[tuple[int, int]]) -> None:
    """Nothing older than the span before the newest record stays, and nothing younger goes."""
    memory = pool()
    tape = tape_of(memory, Retention(40, span_ns=50))
    now, kept = 0, []
    for n, gap in records:
        now += gap
        tape.make_room([n], [now])
        assert tape.acquire(n)
        tape.wrote(tape.next_slots(n), [0] * n)
        tape.commit([n], [now])
        kept = [(size, at) for size, at in [*kept, (n, now)] if at >= now - 50]
        while sum(size for size, _ in kept) > 40:
            kept.pop(0)
        assert [(len(r.tokens), r.ts_event) for r in tape.state.records] == kept
    tape.release()


def test_a_commit_of_the_wrong_shape_changes_nothing() -> None:
    memory = pool()
    tape = tape_of(memory, Retention(20, span_ns=5))
    assert tape.acquire(6)
    tape.wrote(tape.next_slots(6), range(6))
    for lengths, times in (([3, 4], [1, 2]), ([3, 3], [1])):
        with pytest.raises(RuntimeError, match="add up"):
            tape.commit(lengths, times)
    assert tape.live_records == 0
    assert tape.commit([3, 3], [1, 2]) == 1
    assert tape.window == list(range(6))
    tape.release()


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


def test_the_context_of_a_target_is_what_its_next_token_sees_without_the_frozen_prefix() -> None:
    memory = pool()
    tape = tape_of(memory, Retention(30))
    assert append(tape, 7)
    fork = tape.fork()
    assert fork.acquire(3)
    fork.wrote(fork.next_slots(3), [1, 2, 3])
    assert (tape.context_tokens, fork.context_tokens) == (7, FROZEN + 7 + 3)
    fork.release()
    tape.release()
