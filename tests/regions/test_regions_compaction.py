"""Compaction copies a window in several runs to one run; its readers see the same."""

from regions.ephemeral import Fork
from regions.kv_tensors import KVPool
from regions.tape import Retention, Tape, compact_one
from tests.regions.numbered import append, pool, read, scribble, tape_of


def spread_tape(memory: KVPool, runs: int) -> Tape:
    tape = tape_of(memory, Retention(60), frame_limit=200)
    while tape.runs < runs:
        last = tape.extents[-1]
        behind = -(-(last.slot + last.length) // 4)
        blocked = memory.blocks.take(1, behind=behind)
        assert blocked is not None
        assert append(memory, tape, [tape.version + 1] * 5)
        memory.blocks.release(blocked)
    return tape


def test_a_window_in_several_runs_is_compacted_into_one() -> None:
    """Same numbers, same frames, readers undisturbed; the one in the most runs first, one at a time."""
    memory = pool(100)
    little, much = spread_tape(memory, 2), spread_tape(memory, 4)
    free = memory.free_blocks
    reader = much.fork()
    before = reader.extents
    seen = read(memory, before)
    assert compact_one([little, much])
    assert (little.runs, much.runs) == (2, 1)
    assert reader.extents == before
    later = much.fork()
    assert read(memory, later.extents) == read(memory, before) == seen
    assert not {e.slot for e in later.extents[1:]} & {e.slot for e in before[1:]}
    assert [(e.coord, e.origin) for e in later.extents[:2]] == [(e.coord, e.origin) for e in before[:2]]
    assert compact_one([little, much])
    assert not compact_one([little, much])
    for fork in (reader, later):
        fork.release()
    assert memory.free_blocks == free  # the old blocks have no reader any more
    scribble(memory)
    assert read(memory, much.extents) == seen
    assert append(memory, much, [1, 2])
    little.release()
    much.release()
    assert memory.free_blocks == memory.total_blocks


def test_no_run_is_made_free_for_it() -> None:
    """Without a free run that long, or in the middle of an append, the window stays where it is."""
    memory = pool(40)
    tape = spread_tape(memory, 3)
    blocks = sum(run.blocks for run in memory.blocks.take(0) or []) or 5
    hogs = []
    while memory.blocks.largest_free_run >= blocks - 1:
        hog = Fork(memory, frame_limit=1000)
        assert hog.acquire(4)
        hogs.append(hog)
    assert not compact_one([tape])
    for hog in hogs:
        hog.release()
    assert tape.acquire(1)
    assert not compact_one([tape])
    tape.release()
