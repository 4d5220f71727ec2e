"""Where sessions are: they leave the pool when idle or when blocks are short, and come back."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from regions.allocator import Run
from regions.ephemeral import Fork
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import NotResident, inline
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity
from regions.tape import Retention, Tape
from tests.regions.numbered import (
    FROZEN,
    append,
    fresh_window,
    late_tier,
    pool,
    prompt_of,
    read,
    scribble,
    tape_of,
    write,
)


class House:
    """Some tapes of one pool, their residency, and the clock; ``fill`` get 14 tokens each, by default all."""

    def __init__(
        self,
        tapes: int,
        *,
        blocks: int = 100,
        limit: int = 100,
        host_blocks: int = 0,
        directory: Path | None = None,
        fill: Sequence[int] | None = None,
    ) -> None:
        self.pool = pool(blocks)
        self.now = 0
        self.host = HostTier(self.pool, host_blocks) if host_blocks else None
        self.residency = Residency(
            self.pool,
            Idleness(limit, directory and (lambda: directory), retry_ns=1000),
            lambda: self.now,
            host=self.host,
        )
        self.tapes = [self.tape(f"t{i}") for i in range(tapes)]
        self.fill(*(range(tapes) if fill is None else fill))

    def tape(self, name: str) -> Tape:
        tape = tape_of(self.pool, Retention(30))
        tape.name = name
        self.residency.attach(tape, self.identity)
        return tape

    @property
    def identity(self) -> Identity:
        return Identity.of(self.pool, model="m", tokenizer="t", frozen=[0] * FROZEN)

    def rebuild(self, i: int) -> None:
        """Rebuild a lost session, as the scheduler does."""
        self.tapes[i].adopt(fresh_window(self.pool, self.tapes[i]))

    def spill(self) -> None:
        """Offload the session that is idle for the longest, long from now."""
        self.now += 1000
        assert self.residency.spill_idle()

    @property
    def resident(self) -> list[bool]:
        return [tape.resident for tape in self.tapes]

    def fill(self, *which: int) -> None:
        """14 tokens a tape, 1 ns apart."""
        for i in which:
            self.now += 1
            assert append(self.pool, self.tapes[i], [100 * i + j for j in range(14)])

    def seen(self, i: int) -> list[int]:
        fork = self.tapes[i].fork()
        numbers = read(self.pool, fork.extents)[FROZEN:]
        fork.release()
        return numbers

    def release(self) -> None:
        for tape in self.tapes:
            self.residency.detach(tape)
            tape.release()
        assert self.pool.free_blocks == self.pool.total_blocks


def numbers(i: int) -> list[int]:
    return [100 * i + j for j in range(14)]


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_idle_sessions_are_offloaded_the_least_recently_used_first(tmp_path: Path, tier: str) -> None:
    """To disk, or to the host without a directory; a session used meanwhile stays."""
    house = House(4, host_blocks=8, directory=tmp_path if tier == "disk" else None, fill=(2, 0, 1, 3))
    assert not house.residency.spill_idle()
    assert house.residency.next_due() == 97
    house.now = 102
    house.tapes[0].fork().release()
    assert house.residency.spill_idle()
    assert house.resident == [True, True, False, True]
    house.now = 103
    assert house.residency.spill_idle()
    assert house.resident == [True, False, False, True]
    assert not house.residency.spill_idle()
    assert house.residency.spills == {tier: 2}
    assert {p.name for p in tmp_path.iterdir()} == ({"t1.kv", "t2.kv"} if tier == "disk" else set())
    assert house.residency.next_due() == 1  # t3 at 104
    scribble(house.pool)
    assert [house.seen(i) for i in range(4)] == [numbers(i) for i in range(4)]
    assert house.residency.restores == {tier: 2}
    assert list(tmp_path.iterdir()) == []
    house.release()


def test_for_want_of_blocks_sessions_are_offloaded_to_the_host_first(tmp_path: Path) -> None:
    """A copy is quicker than a file, and a request waits."""
    house = House(2, host_blocks=4, directory=tmp_path)
    house.residency.reclaim(1)
    assert house.residency.spills == {"host": 1}
    house.residency.reclaim(1)
    assert house.residency.spills == {"host": 1, "disk": 1}
    assert [house.seen(i) for i in range(2)] == [numbers(i) for i in range(2)]
    house.release()


def test_a_file_is_laid_into_whatever_blocks_are_free(tmp_path: Path) -> None:
    """A window whose oldest token is in the middle of a block returns to single blocks far apart."""
    house = House(1, directory=tmp_path, fill=())
    tape = house.tapes[0]
    for i in range(6):
        assert append(house.pool, tape, [10 * i + j for j in range(7)])
    expected = tape.window
    assert tape.live_ranges[0][0] % 4 == 2
    house.spill()
    taken = house.pool.take(house.pool.free_blocks)
    assert taken is not None
    ((start, stop),) = taken
    house.pool.blocks.release([Run(block, block + 1) for block in range(start, stop, 2)])
    assert house.seen(0) == expected
    assert tape.runs == 8
    house.pool.blocks.release([Run(block, block + 1) for block in range(start + 1, stop, 2)])
    house.release()


def test_without_a_limit_idle_sessions_stay(tmp_path: Path) -> None:
    house = House(1, limit=0, directory=tmp_path)
    house.now = 10**12
    assert not house.residency.spill_idle()
    assert house.residency.next_due() is None
    house.release()


def test_want_of_blocks_moves_sessions_before_anything_fails(tmp_path: Path) -> None:
    """The least recently used first, only as many as needed, never one that is read or being written."""
    house = House(5, blocks=32, directory=tmp_path)  # 2 blocks frozen each, 4 for 14 tokens
    assert house.pool.free_blocks == 2
    reader = house.tapes[0].fork()
    assert house.tapes[1].acquire(1)  # a pass is about to write to it
    house.tapes[2].fork().release()  # used last
    prompt = prompt_of(house.pool, list(range(12)))
    assert house.resident == [True, True, True, False, True]
    more = prompt_of(house.pool, list(range(16)))
    assert house.resident == [True, True, True, False, False]
    assert house.pool.free_blocks == 3
    assert not Fork(house.pool, frame_limit=100).acquire(60)  # not even with t2 gone
    assert house.resident == [True, True, False, False, False]
    kept = house.tapes[3].fork()
    with pytest.raises(NotResident, match=r"t4 .*3 of 32"):
        house.tapes[4].fork()
    for fork in (prompt, more, reader, kept):
        fork.release()
    for i in range(5):
        assert house.seen(i) == numbers(i)
    house.release()


def test_a_tape_is_not_moved_for_its_own_append(tmp_path: Path) -> None:
    """Alone and short of blocks, the append is refused and the tape stays."""
    house = House(1, blocks=10, directory=tmp_path)
    hog = prompt_of(house.pool, [1] * 8)
    assert not house.tapes[0].acquire(12)
    assert house.resident == [True]
    house.pool.check_integrity()
    hog.release()
    assert append(house.pool, house.tapes[0], list(range(12)))
    assert house.seen(0) == [*numbers(0), *range(12)]
    house.release()


def test_a_session_that_comes_back_may_send_another_away(tmp_path: Path) -> None:
    """With more sessions than the pool fits, each can still be read and written, one after the other."""
    house = House(6, blocks=26, directory=tmp_path)
    assert sum(house.resident) == 3
    for _ in range(2):
        for i in range(6):
            house.now += 1
            assert house.seen(i) == numbers(i)
    for i in range(6):
        assert append(house.pool, house.tapes[i], [7, 8])
        assert house.seen(i) == [*numbers(i), 7, 8]
    house.release()
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_are_still_being_copied_are_waited_for() -> None:
    house = House(2, blocks=14, fill=())
    tier, late = late_tier(house.pool, 10)
    house.residency = Residency(house.pool, Idleness(), lambda: 0, host=tier)
    for tape in house.tapes:
        house.residency.attach(tape, house.identity)
    house.fill(0, 1)
    prompt = prompt_of(house.pool, list(range(16)))
    assert late.waits == 1
    assert house.resident == [False, True]
    prompt.release()
    scribble(house.pool)
    assert house.seen(0) == numbers(0)
    house.release()


@pytest.mark.parametrize("harm", ["flipped", "incomplete", "gone", "older"])
def test_a_refused_snapshot_loses_the_session_until_its_tokens_are_prefilled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    """With a message in the log; nothing of the file reaches the pool, and the file is removed."""
    house = House(1, directory=tmp_path)
    rebuilt: list[str] = []
    house.residency.serve(inline, lambda call: call(), on_rebuilt=rebuilt.append)
    house.spill()
    file = tmp_path / "t0.kv"
    older = file.read_bytes()
    if harm == "older":
        assert append(house.pool, house.tapes[0], [7])
        house.spill()
        file.write_bytes(older)  # sound in itself, but of another version
    elif harm == "gone":
        file.unlink()
    else:
        file.write_bytes(older[:-1] if harm == "incomplete" else older[:-1] + bytes([older[-1] ^ 1]))
    tape = house.tapes[0]
    version, expected = tape.version, tape.window
    for _ in range(3):
        assert not tape.acquire(1)
        with pytest.raises(NotResident, match="t0 lost"):
            tape.fork()
    assert tape.lost
    assert not tape.movable
    assert house.residency.failures == caplog.text.count("session t0 must be prefilled again") == 1
    assert not file.exists()
    house.rebuild(0)
    assert (tape.resident, tape.lost, tape.version) == (True, False, version)
    assert house.seen(0) == expected
    assert house.residency.restores == {"rebuilt": 1} | ({"disk": 1} if harm == "older" else {})
    assert rebuilt == ["t0"]
    assert append(house.pool, tape, [8, 9])
    assert house.seen(0) == [*expected, 8, 9]
    house.release()


def lost(directory: Path, house: House) -> Tape:
    """The first session of ``house``, offloaded and its file removed."""
    house.spill()
    (directory / "t0.kv").unlink()
    assert not house.tapes[0].acquire(1)
    assert house.tapes[0].lost
    return house.tapes[0]


@pytest.mark.parametrize("when", ["before", "during"])
def test_records_evicted_while_a_session_is_lost_are_not_rebuilt(tmp_path: Path, when: str) -> None:
    """Before its window is prefilled again, or between two passes of that."""
    house = House(1, directory=tmp_path)
    for i in (1, 2):
        assert append(house.pool, house.tapes[0], [i] * 7)
    tape = lost(tmp_path, house)
    if when == "before":
        assert tape.make_room([10]) == 14
        house.rebuild(0)
    else:
        fresh, window = tape.fresh_window(), tape.window
        assert fresh.acquire(len(window))
        write(house.pool, fresh, window[:20])
        assert tape.make_room([10]) == 14
        write(house.pool, fresh, window[20:])
        tape.adopt(fresh)
    assert house.seen(0) == [1] * 7 + [2] * 7
    assert append(house.pool, tape, [5] * 10)
    assert house.seen(0) == [1] * 7 + [2] * 7 + [5] * 10
    house.release()


def test_a_lost_session_of_which_all_was_evicted_goes_on_empty(tmp_path: Path) -> None:
    house = House(1, directory=tmp_path)
    tape = lost(tmp_path, house)
    assert append(house.pool, tape, [5] * 30)
    assert house.seen(0) == [5] * 30
    assert house.residency.restores == {"rebuilt": 1}
    house.release()


def test_only_the_live_window_of_a_lost_session_is_taken_over(tmp_path: Path) -> None:
    """Other tokens or too few of them: refused, and nothing is changed."""
    house = House(2, directory=tmp_path, fill=(0,))
    tape = lost(tmp_path, house)
    for wrong in (tape.window[:-1], tape.window[::-1]):
        fresh = fresh_window(house.pool, tape, wrong)
        with pytest.raises(ValueError, match=r"t0: .* live window"):
            tape.adopt(fresh)
        fresh.release()
    house.rebuild(0)
    assert house.seen(0) == numbers(0)
    house.release()


def test_a_snapshot_is_not_read_without_room_for_it(tmp_path: Path) -> None:
    house = House(1, blocks=10, directory=tmp_path)
    house.spill()
    (tmp_path / "t0.kv").unlink()
    hog = prompt_of(house.pool, [1] * 28)
    assert not house.tapes[0].acquire(1)
    with pytest.raises(NotResident, match="bring it back"):
        house.tapes[0].fork()
    assert (house.residency.failures, house.tapes[0].lost) == (0, False)
    hog.release()
    house.release()


def test_a_disk_that_refuses_is_left_alone_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The session stays, the error is logged once, and the disk is tried again later."""
    directory = tmp_path / "later"
    house = House(2, directory=directory)
    house.now = 500
    assert not house.residency.spill_idle()
    assert not house.residency.spill_idle()
    assert house.residency.failures == 1
    assert caplog.text.count("stays in the pool") == 1
    assert house.resident == [True, True]
    directory.mkdir()
    assert house.residency.next_due() == 1000, "it is woken for that"
    house.now = 1499
    assert not house.residency.spill_idle()
    house.now = 1500
    assert house.residency.spill_idle()
    house.release()


def test_the_log_is_silent_when_all_goes_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    house = House(1, directory=tmp_path)
    house.spill()
    assert house.seen(0) == numbers(0)
    house.release()
    assert caplog.text == ""
