"""The ring: four million records between two processes in both modes, and corner cases."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest import ring as ring_module
from ingest.record import BAR, QUOTE, RECORD, SIDE_SELL, TRADE, RecordWriter
from ingest.ring import CONTROL_WORDS, HEAD, Mode, Ring
from tests.ingest import ring_processes as two

TOTAL = 4_000_000
BATCH = 256


def numbered(first: int, n: int) -> np.ndarray:
    records = np.zeros(n, RECORD)
    records["seq"] = np.arange(first, first + n)
    records["a"] = -records["seq"].astype(np.int64)
    return records


def popped(ring: Ring, room: int = 64) -> list[int]:
    out = np.zeros(room, RECORD)
    n = ring.pop(out)
    assert (out["a"][:n] == -out["seq"][:n].astype(np.int64)).all()
    return out["seq"][:n].tolist()


@pytest.fixture
def make() -> Iterator[type[Ring]]:
    made: list[Ring] = []

    class Tracked(Ring):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]  # passed through
            made.append(self)

    yield Tracked
    for ring in made:
        ring.close()
        ring.unlink()


def start_producer(ring: Ring, mode: Mode, pace: int) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=two.producer, args=(ring.name, mode, TOTAL, BATCH, pace))
    process.start()
    while int(ring.control[two.GO]) != 1:
        assert process.is_alive()
        time.sleep(0.01)
    return process


def test_two_processes_pause_nothing_lost_nothing_torn(make: type[Ring]) -> None:
    two.consume_pause(make.create(8).control, make.create(8).slots, 0, BATCH)  # compile first
    ring = make.create(65536)
    process = start_producer(ring, "pause", 0)
    ring.control[two.GO] = 2
    assert two.consume_pause(ring.control, ring.slots, TOTAL, BATCH) == (TOTAL, 0)
    process.join(60)
    assert process.exitcode == 0
    assert (ring.control[HEAD], ring.lost, ring.fill) == (TOTAL, 0, 0.0)


def test_two_processes_overwrite_read_and_lost_are_what_was_written(make: type[Ring]) -> None:
    small = make.create(8, "overwrite")
    two.consume_overwrite(small.control, small.sequence, small.flat, 0, BATCH)  # compile first
    # Small: the writer laps the reader many times, also during its copies.
    ring = make.create(256, "overwrite")
    process = start_producer(ring, "overwrite", 300)
    ring.control[two.GO] = 2
    read, bad, missing = two.consume_overwrite(ring.control, ring.sequence, ring.flat, TOTAL, BATCH)
    process.join(60)
    assert process.exitcode == 0
    assert bad == 0
    assert (ring.control[HEAD], read + ring.lost) == (TOTAL, TOTAL)
    assert missing == ring.lost
    assert 0 < ring.lost < TOTAL  # the test saw both: laps and records


def test_a_slot_being_overwritten_is_lost_not_torn(make: type[Ring]) -> None:
    """A reader that finds a writer in the middle of a slot."""
    ring = make.create(8, "overwrite")
    ring.push(numbered(0, 8))
    # Record 8 begins to overwrite record 0: its slot is marked (2 * 8 + 1), half of it is written.
    ring.sequence[0] = 17
    ring.slots[0, 8:] = 0xDEAD
    assert popped(ring) == [1, 2, 3, 4, 5, 6, 7]
    assert ring.lost == 1


def test_a_pop_ends_at_a_loss_so_that_loss_lies_before_what_is_read(make: type[Ring]) -> None:
    ring = make.create(8, "overwrite")
    ring.push(numbered(0, 8))
    ring.sequence[3] = 2 * 11 + 1  # lapped while the reader was at record 2
    assert popped(ring) == [0, 1, 2]
    assert ring.lost == 0
    assert popped(ring) == [4, 5, 6, 7]
    assert ring.lost == 1


@pytest.mark.parametrize("mode", ["pause", "overwrite"])
def test_records_come_out_as_they_went_in_across_the_seam(make: type[Ring], mode: Mode) -> None:
    ring = make.create(8, mode, clock=lambda: 99)
    first = 0
    for n in (3, 5, 8, 1, 7, 2):
        assert ring.push(numbered(first, n)) == n
        out = np.zeros(16, RECORD)
        assert ring.pop(out) == n
        expected = numbered(first, n)
        expected["ts_ring"] = 99
        assert out[:n].tobytes() == expected.tobytes()
        first += n


def test_full_ring_in_pause_mode_accepts_what_fits(make: type[Ring]) -> None:
    ring = make.create(8)
    assert ring.push(numbered(0, 5)) == 5
    assert ring.push(numbered(5, 5)) == 3
    assert ring.push(numbered(8, 2)) == 0
    assert ring.fill == 1.0
    assert popped(ring, 2) == [0, 1]
    assert ring.push(numbered(8, 5)) == 2
    assert popped(ring) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert (ring.lost, ring.control[HEAD]) == (0, 10)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
@settings(max_examples=150)
def test_overwrite_bookkeeping_against_a_plain_model(steps: list[tuple[bool, int]]) -> None:
    """For any pushes and pops: order kept, loss exact, the oldest overwritten, loss before what is read."""
    ring = Ring.create(16, "overwrite")
    try:
        written, last, read = 0, -1, 0
        for is_push, n in steps:
            if is_push:
                assert ring.push(numbered(written, n)) == n
                written += n
                continue
            lost_before = ring.lost
            seqs = popped(ring, n)
            if seqs:
                assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
                assert seqs[0] - last - 1 == ring.lost - lost_before
                assert seqs[0] == last + 1 or last + 1 < written - ring.capacity
                last, read = seqs[-1], read + len(seqs)
        while seqs := popped(ring):
            last, read = seqs[-1], read + len(seqs)
        assert (read + ring.lost, ring.control[HEAD]) == (written, written)
        assert last == written - 1
    finally:
        ring.close()
        ring.unlink()


@pytest.mark.parametrize("mode", ["pause", "overwrite"])
def test_a_restarted_reader_continues_where_the_last_one_stopped(make: type[Ring], mode: Mode) -> None:
    writer = make.create(8, mode)
    first = make.attach(writer.name)
    writer.push(numbered(0, 6))
    assert popped(first, 4) == [0, 1, 2, 3]
    first.close()
    second = make.attach(writer.name)
    assert (second.mode, second.capacity) == (mode, 8)
    assert popped(second) == [4, 5]
    writer.push(numbered(6, 2))
    assert popped(second) == [6, 7]


@pytest.mark.parametrize("capacity", [0, 4, 12, 100])
def test_capacity_is_a_power_of_two(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring.create(capacity)


@pytest.mark.parametrize("with_fd", [True, False])
def test_a_sleeping_reader_is_woken(make: type[Ring], with_fd: bool) -> None:
    wake_fd = os.eventfd(0) if with_fd else -1
    busy = make.create(8, wake_fd=wake_fd)
    assert busy.wait(0.01) is False
    started = time.monotonic()
    timer = threading.Timer(0.1, busy.push, [numbered(0, 1)])
    timer.start()
    assert busy.wait(10.0) is True
    assert 0.05 < time.monotonic() - started < 5
    assert busy.wait(10.0) is True  # records there already: no sleep
    timer.join()
    if with_fd:
        os.close(wake_fd)


def test_the_eventfd_is_written_only_for_a_sleeper(make: type[Ring]) -> None:
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    ring = make.create(8, wake_fd=wake_fd)
    ring.push(numbered(0, 1))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(wake_fd)
    ring_module.announce_sleep(ring.control, 1)
    ring.push(numbered(1, 1))
    assert os.eventfd_read(wake_fd) == 1
    os.close(wake_fd)


def test_a_closed_end_does_not_write_into_what_took_over_its_eventfds_number(make: type[Ring]) -> None:
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    ring = make.create(8, wake_fd=wake_fd)
    ring.close()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.dup2(writer, wake_fd)
    ring.wake()
    for fd in (writer, wake_fd):
        os.close(fd)
    assert os.read(reader, 8) == b""
    os.close(reader)


def test_cursors_of_the_two_sides_never_share_a_cache_line() -> None:
    assert HEAD == 0
    places = sorted(
        getattr(ring_module, name)
        for name in ("HEAD", "TAIL", "WRITER_TAIL", "LOST", "SLEEPING", "CAPACITY", "MODE")
    )
    assert all(b - a >= 16 for a, b in pairwise(places))
    assert places[-1] + 16 <= CONTROL_WORDS


def test_record_writer_fills_every_field() -> None:
    writer = RecordWriter(3)
    writer.add(TRADE, 7, 100, 90, (1, 2, 0, 0, 0), x=SIDE_SELL, seq=5, offset=44)
    writer.add(QUOTE, 8, 100, 100, (-1, 2, 3, 4, 0))
    writer.add(BAR, 9, 100, 101, (1, 4, 1, 2, 9), x=60)
    names = ("kind", "symbol", "ts_event", "ts_recv", "seq", "offset", "flags", "x")
    assert writer.records[list(names)].tolist() == [
        (TRADE, 7, 100, 90, 5, 44, 1, SIDE_SELL),
        (QUOTE, 8, 100, 100, 0, -1, 0, 0),
        (BAR, 9, 100, 101, 0, -1, 0, 60),
    ]
    assert writer.records[["a", "b", "c", "d", "e"]].tolist() == [
        (1, 2, 0, 0, 0),
        (-1, 2, 3, 4, 0),
        (1, 4, 1, 2, 9),
    ]
    with pytest.raises(IndexError, match="3 records"):
        writer.add(TRADE, 0, 0, 0, (0, 0, 0, 0, 0))
    writer.clear()
    assert len(writer) == 0
    assert RECORD.itemsize == 120
