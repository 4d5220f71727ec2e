"""Swapping to the host: KV comes back bit by bit, and no block is reused while it is copied."""

import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.ephemeral import Fork
from regions.kv_tensors import KVPool
from regions.offload.copies import DirectCopies
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import NotResident, Way
from regions.tape import Retention
from tests.regions.numbered import (
    COPY_NS,
    FROZEN,
    Late,
    append,
    grow,
    late_tier,
    pool,
    prompt_of,
    read,
    scribble,
    tape_of,
    write,
)


def swapped(n: int, blocks: int = 40) -> tuple[KVPool, HostTier, Fork]:
    """A prompt of ``n`` numbers on the host."""
    memory = pool(blocks)
    host = HostTier(memory, 20)
    fork = prompt_of(memory, range(n))
    assert fork.swap_out(host)
    return memory, host, fork


def test_a_fork_swaps_out_and_in() -> None:
    """It returns to other blocks with the same numbers, and the host is empty again."""
    memory, host, fork = swapped(14)
    assert fork.swapped
    assert (memory.free_blocks, host.pool.free_blocks) == (40, 16)
    other = prompt_of(memory, [9] * 3)
    scribble(memory)
    with pytest.raises(RuntimeError, match="no extents"):
        fork.extents  # noqa: B018  # the property raises
    assert fork.length == 14
    assert fork.swap_in()
    assert not fork.swapped
    assert read(memory, fork.extents) == list(range(14))
    assert host.pool.free_blocks == 20
    assert (host.swapped_out, host.swapped_in) == (1, 1)
    grow(memory, fork, [14, 15, 16])
    assert read(memory, fork.extents) == list(range(17))
    fork.release()
    other.release()


def test_without_room_on_the_other_side_nothing_changes() -> None:
    memory = pool(10)
    host = HostTier(memory, 3)
    large = prompt_of(memory, list(range(16)))
    assert not large.swap_out(host)
    assert read(memory, large.extents) == list(range(16))
    small = prompt_of(memory, list(range(11)))
    assert small.swap_out(host)
    rest = prompt_of(memory, [7] * 20)
    assert not small.swap_in()
    assert not small.acquire(1)
    assert small.swapped
    memory.check_integrity()
    rest.release()
    assert small.acquire(30 - 16 - 11)  # brings it back as well, in one go
    assert read(memory, small.extents) == list(range(11))
    large.release()
    small.release()
    assert (memory.free_blocks, host.pool.free_blocks) == (10, 3)


def test_acquiring_a_swapped_fork_counts_what_it_has_to_bring_back() -> None:
    """All of it or nothing: not the swapped tokens alone when there is no room for the new ones."""
    memory, _, fork = swapped(12, blocks=10)
    rest = prompt_of(memory, [7] * 24)
    assert fork.blocks_needed(5) == 5
    assert not fork.acquire(5)
    assert memory.free_blocks == 4
    assert fork.acquire(4)
    assert memory.free_blocks == 0
    rest.release()
    fork.release()


@pytest.mark.parametrize("kept", [0, 1, 4, 5, 8, 13, 14])
def test_an_update_of_a_swapped_prompt_frees_on_the_host(kept: int) -> None:
    """*Stream2LLM* section 4.2: invalidate there, free, swap the rest back, compute what changed."""
    memory, host, fork = swapped(14)
    fork.keep(kept)
    assert host.pool.free_blocks == 20 - -(-kept // 4)
    assert fork.swapped == (kept > 0)
    host.pool.check_integrity()
    grow(memory, fork, list(range(100, 106)))
    assert read(memory, fork.extents) == [*range(kept), *range(100, 106)]
    fork.release()
    assert host.pool.free_blocks == 20


def test_tokens_that_others_read_stay_in_the_pool() -> None:
    memory = pool()
    host = HostTier(memory, 20)
    fork = prompt_of(memory, list(range(6)))
    cached = fork.as_context()
    fork.keep(5)  # its last block is the cache's too: from here on it writes behind it
    grow(memory, fork, list(range(50, 57)))
    assert fork.swap_out(host)
    assert host.pool.free_blocks == 20 - 2
    scribble(memory)
    assert fork.swap_in()
    assert read(memory, fork.extents) == [*range(5), *range(50, 57)]
    assert fork.swap_out(host)
    fork.keep(3)
    assert not fork.swapped
    assert read(memory, fork.extents) == [0, 1, 2]
    fork.release()
    cached.release()


def test_an_empty_fork_gives_back_what_it_took_ahead() -> None:
    memory = pool()
    fork = Fork(memory, frame_limit=100)
    assert fork.acquire(9)
    assert fork.swap_out(HostTier(memory, 1))
    assert memory.free_blocks == 40
    assert not fork.swapped
    fork.release()


def test_a_swapped_fork_cannot_be_detached_or_become_a_context() -> None:
    _, _, fork = swapped(9)
    with pytest.raises(RuntimeError, match="cannot be detached"):
        fork.detach()
    with pytest.raises(RuntimeError, match="no extents"):
        fork.as_context()
    fork.release()


def test_blocks_are_not_handed_out_before_their_copy_is_done() -> None:
    """They stay out of the free list; a taker waits for the copy, and all of it arrives."""
    memory = pool(10)
    host, late = late_tier(memory, 20)
    fork = prompt_of(memory, list(range(32)))
    assert fork.swap_out(host)
    assert memory.blocks.free_blocks == 2
    assert memory.free_blocks == 10  # free once the copies are awaited
    memory.check_integrity()
    small = prompt_of(memory, [-1] * 8)
    assert late.waits == 0
    assert memory.blocks.free_blocks == 0
    other = prompt_of(memory, [-1] * 4)  # needs one of the blocks that are being copied
    assert late.waits == 1
    small.release()
    other.release()
    scribble(memory)
    assert fork.swap_in()
    assert read(memory, fork.extents) == list(range(32))
    fork.release()


def test_finished_copies_are_noticed_without_waiting() -> None:
    memory = pool(10)
    host, late = late_tier(memory, 20)
    fork = prompt_of(memory, list(range(32)))
    assert fork.swap_out(host)
    host.poll()
    assert memory.blocks.free_blocks == 2
    late.finish()
    host.poll()
    assert memory.blocks.free_blocks == 10
    assert late.waits == 0
    fork.release()


def test_a_tape_swaps_out_and_comes_back_as_the_same_version() -> None:
    """Readers of before keep what they see; a reader of afterwards sees the same, elsewhere."""
    memory = pool(60)
    host = HostTier(memory, 30)
    tape = tape_of(memory, Retention(30))
    for i in range(6):
        append(memory, tape, [10 * i + j for j in range(7)])
    before = tape.fork()
    seen = read(memory, before.extents)
    assert tape.swap_out(host)
    assert not tape.resident
    used = host.pool.total_blocks - host.pool.free_blocks
    assert used == 8  # 28 tokens, the oldest of them in the middle of a block
    assert read(memory, before.extents) == seen
    after = tape.fork()
    assert tape.resident
    assert after.version == before.version == 6
    assert read(memory, after.extents) == seen
    assert [e[1:] for e in after.extents] == [e[1:] for e in before.extents]
    before.release()
    after.release()
    assert append(memory, tape, [1, 2, 3])
    tape.release()
    assert (memory.free_blocks, host.pool.free_blocks) == (60, 30)


def test_a_stored_version_is_whole_until_the_next_commit() -> None:
    """Evicting for an append that is not executed yet takes nothing from the version on the host."""
    memory = pool(60)
    host = HostTier(memory, 30)
    tape = tape_of(memory, Retention(20))
    for i in range(4):
        append(memory, tape, [10 * i + j for j in range(5)])
    seen, before = read(memory, tape.extents), tape.extents
    assert tape.swap_out(host)
    assert tape.make_room([7]) == 10
    assert tape.live_tokens == 10
    early = tape.fork()
    assert read(memory, early.extents) == seen
    assert [e[1:] for e in early.extents] == [e[1:] for e in before]  # the frozen prefix, too
    grow(memory, tape, list(range(50, 57)))
    tape.commit([7])
    late = tape.fork()
    assert read(memory, late.extents)[FROZEN:] == [*range(20, 25), *range(30, 35), *range(50, 57)]
    assert read(memory, early.extents) == seen
    early.release()
    late.release()
    tape.release()
    assert memory.free_blocks == memory.total_blocks


def test_a_tape_in_the_middle_of_an_append_does_not_move() -> None:
    memory = pool(60)
    host = HostTier(memory, 30)
    tape = tape_of(memory, Retention(20))
    assert not tape.swap_out(host)  # nothing to move
    for i in range(4):
        append(memory, tape, [i] * 5)
    assert tape.movable
    assert tape.acquire(3)  # blocks for a pass that is about to run
    assert not tape.swap_out(host)
    write(memory, tape, [7] * 3)
    assert not tape.swap_out(host)
    tape.commit([3])
    assert tape.movable
    tape.make_room([5])
    assert not tape.swap_out(host)  # the version readers see is more than the window
    assert host.pool.free_blocks == 30
    tape.release()


def test_a_tape_that_cannot_come_back_says_so() -> None:
    memory = pool(20)
    host = HostTier(memory, 30)
    tape = tape_of(memory, Retention(40))
    append(memory, tape, list(range(38)))
    assert tape.swap_out(host)
    hog = prompt_of(memory, [1] * 4 * 17)
    assert tape.blocks_needed(2) == 10
    with pytest.raises(NotResident, match="1 of 20"):
        tape.fork()
    assert not tape.acquire(1)
    assert not tape.swap_in()
    assert memory.free_blocks == 1
    hog.release()
    assert tape.acquire(2)
    assert read(memory, tape.extents)[FROZEN:] == list(range(38))
    tape.release()


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.booleans())
def test_any_order_of_operations_keeps_every_number(seed: int, late: bool) -> None:
    """Append, evict, fork, cut back, swap both ways, compact: every reader sees exactly its own numbers.

    Whole records are evicted, positions stay below the frame limit, the frozen prefix right before the tape.
    """
    rng = random.Random(seed)
    frame_limit, max_records = rng.choice([44, 64]), rng.choice([0, 3, 5])
    memory = pool(50)
    host, copies = late_tier(memory, rng.randrange(4, 40))
    host = host if late else HostTier(memory, 21)
    tape = tape_of(memory, Retention(30, max_records), frame_limit)
    window: list[list[int]] = []
    forks: list[tuple[Fork, list[int], list[int]]] = []
    number = coord = 0

    def fresh(n: int) -> list[int]:
        nonlocal number
        number += n
        return list(range(number - n + 1, number + 1))

    def check() -> None:
        memory.check_integrity()
        host.pool.check_integrity()
        if tape.resident:
            numbers = list(chain.from_iterable(window))
            assert (tape.live_records, tape.live_tokens) == (len(window), len(numbers))
            assert read(memory, tape.extents) == [*[0] * FROZEN, *numbers]
            first = coord - len(numbers) - FROZEN
            assert [at for e in tape.extents for at in range(e.coord, e.coord + e.length)] == [
                *range(first, coord)
            ]
        for fork, context, own in forks:
            assert fork.tokens == own
            if not fork.swapped:
                assert read(memory, fork.extents) == context + own

    for _ in range(40):
        action = rng.choice(
            ["append", "fork", "grow", "keep", "out", "in", "drop", "tape", "compact", "copies"]
        )
        picked = rng.choice(forks) if forks else None
        if action == "append":
            record = fresh(rng.randrange(1, 9))
            if append(memory, tape, record):
                window.append(record)
                coord += len(record)
                while sum(map(len, window)) > 30 or (max_records and len(window) > max_records):
                    window.pop(0)
                assert all(each.max_position < frame_limit for each in tape.state.stretches)
            else:  # what was evicted for it is gone with the next commit
                while sum(map(len, window)) > tape.live_tokens:
                    window.pop(0)
        elif action == "fork" and len(forks) < 4 and tape.acquire(0):
            fork = tape.fork()
            forks.append((fork, read(memory, fork.extents), []))
        elif action == "tape":
            tape.swap_out(host) if rng.random() < 0.7 else tape.swap_in()
        elif action == "compact":
            tape.compact()
        elif action == "copies":
            copies.finish()
            host.poll()
        elif picked is not None:
            fork, _, own = picked
            if action == "grow":
                numbers = fresh(rng.randrange(1, 7))
                if fork.acquire(len(numbers)):
                    write(memory, fork, numbers)
                    own += numbers
            elif action == "keep":
                n = rng.randrange(len(own) + 1)
                fork.keep(n)
                del own[n:]
            elif action == "out":
                fork.swap_out(host)
            elif action == "in":
                fork.swap_in()
            else:
                fork.release()
                forks.remove(picked)
        check()
    for fork, _, _ in forks:
        fork.release()
        fork.release()
    tape.release()
    copies.finish()
    host.poll()
    assert (memory.free_blocks, host.pool.free_blocks) == (memory.total_blocks, host.pool.total_blocks)


class Told:
    """Remembers what it is called with."""

    def __init__(self) -> None:
        self.all: list[tuple[Way, int, int]] = []

    def __call__(self, way: Way, blocks: int, ns: int) -> None:
        self.all.append((way, blocks, ns))


def test_each_finished_copy_is_told_once_with_its_way_its_blocks_and_its_time() -> None:
    memory = pool(10)
    told = Told()
    late = Late(memory)
    host = HostTier(memory, 20, late, told)
    fork = prompt_of(memory, list(range(30)))
    assert fork.swap_out(host)
    host.poll()
    assert not told.all
    late.finish()
    host.poll()
    host.poll()
    assert told.all == [("out", 8, COPY_NS)]
    assert fork.swap_in()
    assert told.all[1:] == [("in", 8, COPY_NS)]
    fork.release()


def test_copies_in_host_memory_are_timed_by_the_given_clock() -> None:
    memory = pool(10)
    told = Told()
    ticks = iter(range(0, 1000, 50))
    host = HostTier(memory, 20, DirectCopies(lambda: next(ticks)), told)
    fork = prompt_of(memory, list(range(30)))
    assert fork.swap_out(host)
    assert fork.swap_in()
    assert told.all == [("out", 8, 50), ("in", 8, 50)]
    fork.release()
