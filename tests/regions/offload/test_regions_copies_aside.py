"""Sessions leave the pool and return by steps that another thread takes, while all else goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.kv_tensors import KVPool, LayerShape
from regions.offload import snapshot_format, staging
from regions.offload.copy_threads import NICENESS, CopyThreads
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import NotResident, Steps
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity, Snapshot, SnapshotHeader, write_snapshot
from regions.tape import Retention, Tape
from tests.regions.aside import Aside
from tests.regions.numbered import FROZEN, append, fresh_window, pool, prompt_of, read, scribble, tape_of

SMALL = 64
"""Bytes of a chunk here, so that a window has many."""


class Desk:
    """Tapes whose copies are stepped; what the stepping thread copies is counted."""

    def __init__(
        self, tapes: int, directory: Path | None, *, blocks: int = 100, limit: int = 100, host_blocks: int = 0
    ) -> None:
        self.pool, self.now, self.aside = pool(blocks), 0, Aside()
        self.host = HostTier(self.pool, host_blocks) if host_blocks else None
        made = None if directory is None else lambda: directory
        idleness = Idleness(limit, made, retry_ns=1000)
        self.residency = Residency(self.pool, idleness, lambda: self.now, host=self.host)
        self.woken: deque[Callable[[], None]] = deque()
        self.residency.serve(self.aside, self.woken.append, lambda seconds: self.aside.finish())
        self.tapes = [tape_of(self.pool, Retention(30)) for _ in range(tapes)]
        for number, tape in enumerate(self.tapes):
            tape.name = f"t{number}"
            identity = Identity.of(self.pool, model="m", tokenizer="t", frozen=[0] * FROZEN)
            self.residency.attach(tape, identity)

    def between(self) -> None:
        """What the stepping thread does between two batches."""
        while self.woken:
            self.woken.popleft()()

    def settle(self) -> None:
        self.aside.finish()
        self.between()

    def seen(self, tape: Tape) -> list[int]:
        fork = tape.fork()
        found = read(self.pool, fork.extents)[FROZEN:]
        fork.release()
        return found

    def fill(self, number: int = 0, first: int = 0, count: int = 14) -> list[int]:
        self.now += 1
        record = [first + i for i in range(count)]
        assert append(self.pool, self.tapes[number], record)
        return record

    def release(self) -> None:
        for tape in self.tapes:
            self.residency.detach(tape)
            tape.release()
        self.settle()
        assert self.pool.free_blocks == self.pool.total_blocks
        assert self.pool.leaving == 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (staging, snapshot_format):
        monkeypatch.setattr(module, "CHUNK", SMALL)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy of KV, whoever makes it."""
    sizes: list[int] = []
    copyto = np.copyto

    def counted(to: Any, of: Any) -> None:
        sizes.append(of.nbytes)
        copyto(to, of)

    monkeypatch.setattr(np, "copyto", counted)
    monkeypatch.setattr(KVPool, "copy_from", lambda *_: pytest.fail("a whole copy at once"))
    return sizes


def kv_bytes(memory: KVPool, tape: Tape) -> int:
    """Bytes of a window's KV."""
    return sum(tape.live_tokens * rows.shape[0] * rows.shape[2] * 4 for rows in memory.tensors)


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.usefixtures("small_chunks")
def test_the_stepping_thread_copies_nothing_and_a_step_at_most_a_chunk(
    tmp_path: Path, copied: list[int], tier: str
) -> None:
    """Out of the pool and back; a block is the least that goes to the host."""
    desk = Desk(1, tmp_path if tier == "disk" else None, host_blocks=10)
    (tape,) = desk.tapes
    expected = desk.fill()
    block = KVPool.block_bytes(desk.pool.layers, 4, torch.float32)
    most = SMALL if tier == "disk" else max(SMALL, block)
    kv = kv_bytes(desk.pool, tape)
    for way in ("out", "in"):
        copied.clear()
        if way == "out":
            desk.now += 1000
            assert desk.residency.spill_idle()
            assert not desk.residency.spill_idle(), "one at a time"
        else:
            scribble(desk.pool)
            with pytest.raises(NotResident, match="being read back"):
                tape.fork()
        assert copied == [], "nothing before the other thread takes a step"
        total, steps, before = 0, 0, 0
        while desk.aside.step():
            desk.between()
            assert sum(copied[before:]) <= most
            total, steps, before = sum(copied), steps + 1, len(copied)
        desk.between()
        assert len(copied) == before, "nothing behind the last step"
        assert steps > 4
        assert total >= kv
        assert tape.resident == (way == "in")
    assert desk.seen(tape) == expected
    assert desk.residency.spills == {tier: 1}
    assert desk.residency.restores == {tier: 1}
    desk.release()


@pytest.mark.usefixtures("small_chunks")
def test_a_session_is_read_while_it_leaves_and_stays_if_it_is_used(tmp_path: Path) -> None:
    """Its blocks are free only once the file is whole; a file of what is used again is removed."""
    desk = Desk(1, tmp_path)
    (tape,) = desk.tapes
    expected = desk.fill()
    free = desk.pool.free_blocks
    desk.now += 1000
    assert desk.residency.spill_idle()
    desk.aside.step()
    assert [path.name for path in tmp_path.iterdir()] == ["t0.kv"]
    assert desk.pool.free_blocks == free
    assert desk.seen(tape) == expected
    desk.settle()
    assert tape.resident
    assert list(tmp_path.iterdir()) == []
    assert desk.residency.spills == {"abandoned": 1}
    desk.now += 1000
    assert desk.residency.spill_idle()
    desk.settle()
    assert not tape.resident
    assert desk.pool.free_blocks == free + 4
    desk.release()


@pytest.mark.usefixtures("small_chunks")
def test_for_want_of_blocks_a_session_leaves_whoever_reads_it(tmp_path: Path) -> None:
    """Records for it wait meanwhile; what needs the blocks knows that they come."""
    desk = Desk(2, tmp_path, blocks=13)
    expected = desk.fill(), desk.fill(1, 100)
    first = desk.tapes[0]
    hungry = prompt_of(desk.pool, [7])
    assert not hungry.acquire(12)
    assert desk.pool.leaving == 4
    assert (first.leaving, first.away, first.resident) == (True, False, True)
    assert not hungry.acquire(12)
    assert desk.tapes[1].leaving is False, "one is enough"
    assert desk.seen(first) == expected[0]
    desk.settle()
    assert (desk.pool.leaving, first.leaving, first.resident) == (0, False, False)
    assert hungry.acquire(12)
    hungry.release()
    assert desk.tapes[0].bring_back() is False
    desk.settle()
    assert (tmp_path / "t0.kv").exists(), "the stepping thread removes no file"
    desk.settle()
    assert list(tmp_path.iterdir()) == []
    assert [desk.seen(tape) for tape in desk.tapes] == list(expected)
    desk.release()


@pytest.mark.parametrize(
    ("harm", "error"),
    [("full", "No space left"), ("read-only", "Permission denied"), ("gone", "No such file")],
)
@pytest.mark.usefixtures("small_chunks")
def test_what_cannot_be_written_stays_in_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, harm: str, error: str
) -> None:
    """With one message and no file; the disk is left alone for a while."""
    directory = tmp_path / "spilled"
    if harm != "gone":
        directory.mkdir()
    desk = Desk(1, directory)
    (tape,) = desk.tapes
    expected = desk.fill()

    def refuses(path: Path) -> Any:
        if harm == "read-only":
            raise PermissionError(errno.EACCES, "Permission denied")
        path.touch()
        return Full(path.open("wb", buffering=0))

    if harm != "gone":
        monkeypatch.setattr(snapshot_format, "create", refuses)
    desk.now += 1000
    assert desk.residency.spill_idle()
    desk.settle()
    assert tape.resident
    assert desk.seen(tape) == expected
    assert desk.residency.failures == 1
    assert f"session t0 stays in the pool: {directory / 't0.kv'} could not be written: {error}" in caplog.text
    assert list(tmp_path.glob("*/*")) == []
    desk.now += 500
    assert not desk.residency.spill_idle()
    desk.release()


class Full:
    """A file on a disk that gets full."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, 5 * SMALL

    def write(self, data: Any) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.write(data)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.mark.parametrize("harm", ["cut", "removed", "changed", "cut behind the check"])
@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_cannot_be_read_back_loses_the_window_which_is_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    """The blocks that were reserved are free again, and the answers are those of the window."""
    desk = Desk(1, tmp_path)
    (tape,) = desk.tapes
    expected = desk.fill()
    desk.now += 1000
    assert desk.residency.spill_idle()
    desk.settle()
    file, free = tmp_path / "t0.kv", desk.pool.free_blocks
    whole = file.read_bytes()
    if harm == "cut":
        file.write_bytes(whole[:-40])
    elif harm == "removed":
        file.unlink()
    elif harm == "changed":
        file.write_bytes(whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:])
    assert not tape.bring_back()
    assert (tape.arriving, tape.away, tape.lost) == (True, True, False)
    if harm == "cut behind the check":
        for _ in range(-(-kv_bytes(desk.pool, tape) // SMALL)):
            desk.aside.step()
        file.write_bytes(whole[:-40])
    desk.settle()
    assert (tape.arriving, tape.lost) == (False, True)
    assert caplog.text.count("session t0 must be prefilled again") == 1
    assert desk.residency.failures == 1
    assert desk.pool.free_blocks == free
    tape.adopt(fresh_window(desk.pool, tape))
    desk.settle()
    assert desk.seen(tape) == expected
    assert list(tmp_path.iterdir()) == []
    desk.release()


@pytest.mark.parametrize("way", ["out", "in"])
@pytest.mark.usefixtures("small_chunks")
def test_a_session_is_closed_while_it_is_on_its_way(tmp_path: Path, way: str) -> None:
    """Its blocks are free once no step reads or writes them, and its file is removed."""
    desk = Desk(1, tmp_path)
    (tape,) = desk.tapes
    desk.fill()
    desk.now += 1000
    assert desk.residency.spill_idle()
    if way == "in":
        desk.settle()
        assert not tape.bring_back()
    desk.aside.step()
    desk.residency.detach(tape)
    tape.release()
    assert desk.pool.free_blocks < desk.pool.total_blocks
    desk.settle()
    assert desk.pool.free_blocks == desk.pool.total_blocks
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_chunks")
def test_at_the_end_copies_are_finished_and_made_at_once(tmp_path: Path) -> None:
    """One that returns arrives, one that leaves stays, and one outside comes when it is asked for."""
    desk = Desk(3, tmp_path)
    expected = [desk.fill(number, 100 * number) for number in range(3)]
    desk.now += 1000
    for _ in range(2):
        assert desk.residency.spill_idle()
        desk.settle()
    assert not desk.tapes[0].bring_back()
    assert desk.residency.spill_idle()
    desk.aside.step()
    desk.residency.finish(10)
    assert [tape.resident for tape in desk.tapes] == [True, False, True]
    assert [desk.seen(tape) for tape in desk.tapes] == expected
    desk.release()


class Histories:
    """Random histories of three tapes, whose records are known in plain lists."""

    def __init__(self, directory: Path, draw: Callable[[Any], Any]) -> None:
        self.desk = Desk(3, directory, blocks=34, limit=50, host_blocks=5)
        self.draw, self.next = draw, 0
        self.expected: list[list[list[int]]] = [[], [], []]
        self.readers: list[tuple[Any, list[int]]] = []

    def act(self) -> None:
        getattr(self, self.draw(st.sampled_from(ACTS)))(self.draw(st.integers(0, 2)))
        self.desk.pool.check_integrity()

    def copy(self, _: int) -> None:
        for _ in range(self.draw(st.integers(1, 40))):
            self.desk.aside.step()

    def poll(self, _: int) -> None:
        self.desk.between()

    def rest(self, _: int) -> None:
        self.desk.now += 60
        self.desk.residency.spill_idle()

    def want(self, _: int) -> None:
        """A prompt needs blocks for a moment."""
        prompt = prompt_of(self.desk.pool, [])
        prompt.acquire(self.draw(st.integers(1, 60)))
        prompt.release()

    def record(self, number: int) -> None:
        """As the scheduler: records wait for a tape that is away or leaves."""
        tape, expected = self.desk.tapes[number], self.expected[number]
        if tape.away or tape.leaving:
            return
        record = [self.next + i for i in range(self.draw(st.integers(1, 9)))]
        # what was evicted for an append without room stays evicted
        appended = append(self.desk.pool, tape, record)
        expected.append(record) if appended else None
        while sum(map(len, expected)) > tape.live_tokens:
            expected.pop(0)
        self.next += 10

    def ask(self, number: int) -> None:
        tape = self.desk.tapes[number]
        try:
            fork = tape.fork()
        except NotResident:
            return
        if self.draw(st.booleans()):
            self.readers.append((fork, tape.window))
        assert read(self.desk.pool, fork.extents)[FROZEN:] == list(chain.from_iterable(self.expected[number]))
        if not self.readers or self.readers[-1][0] is not fork:
            fork.release()

    def leave(self, _: int) -> None:
        """Readers of older versions see what they saw, wherever the tape is now."""
        for fork, seen in self.readers:
            assert read(self.desk.pool, fork.extents)[FROZEN:] == seen
            fork.release()
        self.readers.clear()

    def end(self) -> None:
        self.leave(0)
        self.desk.settle()
        self.desk.residency.finish(1)
        for number, tape in enumerate(self.desk.tapes):
            if tape.bring_back():
                assert self.desk.seen(tape) == list(chain.from_iterable(self.expected[number]))
        self.desk.release()


ACTS = ["copy", "copy", "poll", "rest", "want", "record", "record", "ask", "leave"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_are_what_was_appended_whatever_comes_between_the_steps(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Appends, questions, spills, returns and steps in any order, against plain lists."""
    before = staging.CHUNK, snapshot_format.CHUNK
    staging.CHUNK = snapshot_format.CHUNK = SMALL
    try:
        made = Histories(tmp_path_factory.mktemp("spilled"), data.draw)
        for _ in range(data.draw(st.integers(5, 40))):
            made.act()
        made.end()
    finally:
        staging.CHUNK, snapshot_format.CHUNK = before


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_has_the_same_bytes_at_any_size_of_chunk(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Those of the slots joined by tensor, and they come back bit by bit, NaNs too."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    memory = KVPool([LayerShape(2, 3, 5), LayerShape(1, 2, 2)], 20, block_size=4, dtype=dtype)
    bits = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    for tensor in memory.tensors:
        raw = torch.randint(0, 256, (tensor.numel() * dtype.itemsize,), generator=bits, dtype=torch.uint8)
        tensor.copy_(raw.view(dtype).view(tensor.shape))
    tape = tape_of(memory, Retention(30))
    append(memory, tape, [1] * 9, [2] * data.draw(st.integers(1, 21)))
    ranges = tape.live_ranges
    path = tmp_path_factory.mktemp("file") / "t"
    header = SnapshotHeader("t", Identity.of(memory, model="m", tokenizer="t", frozen=[]), 4, tape.state, 0)
    staging.CHUNK = data.draw(st.integers(1, 300))
    try:
        write_snapshot(path, header, memory, ranges)
        joined = [torch.cat([t[:, slot : slot + n] for slot, n in ranges], 1) for t in memory.tensors]
        kv = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in joined)
        assert path.read_bytes()[-32 - len(kv) : -32] == kv
        other = KVPool(memory.layers, 20, block_size=4, dtype=dtype)
        half = tape.live_tokens // 2
        places = [(40, half), (3, tape.live_tokens - half)]
        Snapshot.open(path).load(other, [each for each in places if each[1]])
    finally:
        staging.CHUNK = 1 << 20
    back = [torch.cat([t[:, slot : slot + n] for slot, n in places], 1) for t in other.tensors]
    assert b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in back) == kv
    tape.release()


def test_copies_back_wait_for_no_copy_out_and_those_of_one_way_end_in_order() -> None:
    """The thread that copies out yields to others."""
    copies, took, go = CopyThreads(), list[tuple[str, int]](), threading.Event()
    returned = threading.Event()

    def steps(name: str) -> Steps:
        for _ in range(2):
            if name == "first out":
                go.wait(30)
            took.append((name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            yield
        if name == "in":
            returned.set()

    for way, name in (("out", "first out"), ("out", "second out"), ("in", "in")):
        copies(way, steps(name))
    assert returned.wait(30)
    assert not copies.wait(0)
    go.set()
    assert copies.wait(30)
    assert [name for name, _ in took] == [
        name for name in ("in", "first out", "second out") for _ in range(2)
    ]
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert {niceness for name, niceness in took if name == "in"} == {here}
    assert {niceness for name, niceness in took if name != "in"} == {max(here, NICENESS)}


def test_a_chunk_is_copied_out_between_two_passes() -> None:
    """Those back wait for none."""
    between, took, returned = threading.Event(), list[str](), threading.Event()
    copies = CopyThreads(between=[between], patience_s=60)

    def steps(name: str, ended: threading.Event | None = None) -> Steps:
        for _ in range(3):
            took.append(name)
            yield
        if ended is not None:
            ended.set()

    copies("out", steps("out"))
    copies("in", steps("in", returned))
    assert returned.wait(30)
    assert not copies.wait(0.05)
    assert took.count("out") <= 1
    between.set()
    assert copies.wait(30)
    assert took.count("out") == 3


def test_a_copy_out_ends_though_a_pass_does_not() -> None:
    copies, took = CopyThreads(between=[threading.Event()], patience_s=0.001), list[int]()

    def steps() -> Steps:
        for number in range(3):
            took.append(number)
            yield

    copies("out", steps())
    assert copies.wait(30)
    assert took == [0, 1, 2]


@pytest.mark.usefixtures("small_chunks")
def test_copies_out_wait_for_no_pass_while_work_waits_for_blocks(tmp_path: Path) -> None:
    """Nor does the copy of an idle session that is under way."""
    desk, patience_s = Desk(2, tmp_path), 1.0
    copies = CopyThreads(
        between=[threading.Event()], urgent=lambda: desk.pool.leaving > 0, patience_s=patience_s
    )
    desk.residency.serve(copies, desk.woken.append, copies.wait)
    desk.fill(0)
    desk.fill(1, 100)
    assert kv_bytes(desk.pool, desk.tapes[0]) > 10 * SMALL
    desk.now += 1000
    assert desk.residency.spill_idle()
    assert not copies.wait(0.1), "a chunk a pass"
    desk.residency.reclaim(5)
    assert desk.pool.leaving == 8
    assert copies.wait(10 * patience_s), "that of the chunk under way, and time to copy"
    desk.between()
    assert [tape.resident for tape in desk.tapes] == [False, False]
    desk.release()
