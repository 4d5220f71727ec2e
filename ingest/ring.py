"""The ring carries ticks from the gateway to the engine: shared memory, one writer, one reader, no locks.

Two modes. `pause`: a full ring accepts no records, and the source pauses (Kafka). `overwrite`: the
writer never waits; it overwrites the oldest records and the reader counts exactly how many it lost (ZeroMQ).
A sequence lock per slot prevents torn records. An eventfd wakes a sleeping reader; it is written only if the
reader has announced that it sleeps. The ring stores the reader's position and its loss count, so a restarted
engine continues where the last one stopped. The writer may tell up to when it has read its sources, so that
the reader knows a quiet market from a source that is away.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from ingest.atomics import (
    fence_acquire,
    fence_release,
    fence_total,
    load_acquire,
    load_relaxed,
    relax,
    store_relaxed,
    store_release,
)
from ingest.record import TS_RING_WORD, WORDS, Records
from metrics.shm import SharedBlock
from support.numba_kernel import kernel

Words = npt.NDArray[np.uint64]
Mode = Literal["pause", "overwrite"]

# Control words, 128 bytes apart (two cache lines: adjacent lines are prefetched together).
HEAD, TAIL, WRITER_TAIL, LOST, SLEEPING, CAPACITY, MODE, READ_UNTIL = range(0, 128, 16)
CONTROL_WORDS = 128
_MODES: tuple[Mode, ...] = ("pause", "overwrite")
_SPINS = 2000  # about 50 us: less than a futex wake-up with its scheduling latency
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_FULL_SLACK = np.uint64(8)


@kernel
def push_pause(control: Words, slots: Words, source: Words, now: int) -> int:
    """Copy records of `source` uint64 [n, 16] in, as many as fit; returns how many. Stamps `ts_ring`."""
    capacity = np.uint64(slots.shape[0])
    head = load_relaxed(control, HEAD)
    wanted = np.uint64(source.shape[0])
    if capacity - (head - control[WRITER_TAIL]) < wanted:
        control[WRITER_TAIL] = load_acquire(control, TAIL)
    accepted = min(wanted, capacity - (head - control[WRITER_TAIL]))
    for i in range(accepted):
        slot = (head + np.uint64(i)) & (capacity - _ONE)
        for k in range(WORDS):
            slots[slot, k] = source[i, k]
        slots[slot, TS_RING_WORD] = np.uint64(now)
    store_release(control, HEAD, head + accepted)
    return int(accepted)


@kernel
def pop_pause(control: Words, slots: Words, out: Words) -> int:
    """Copy the oldest records out into `out` uint64 [n, 16]; returns how many."""
    capacity = np.uint64(slots.shape[0])
    tail = load_relaxed(control, TAIL)
    taken = min(np.uint64(out.shape[0]), load_acquire(control, HEAD) - tail)
    for i in range(taken):
        slot = (tail + np.uint64(i)) & (capacity - _ONE)
        for k in range(WORDS):
            out[i, k] = slots[slot, k]
    store_release(control, TAIL, tail + taken)
    return int(taken)


@kernel
def push_overwrite(control: Words, sequence: Words, flat: Words, source: Words, now: int) -> int:
    """Copy all of `source` in, over the oldest. A slot's sequence is 2i+1 while record i is written."""
    capacity = np.uint64(sequence.shape[0])
    head = load_relaxed(control, HEAD)
    for i in range(source.shape[0]):
        slot = np.int64(head & (capacity - _ONE))
        store_relaxed(sequence, slot, _TWO * head + _ONE)
        fence_release()
        for k in range(WORDS):
            word = np.uint64(now) if k == TS_RING_WORD else source[i, k]
            store_relaxed(flat, slot * WORDS + k, word)
        head += _ONE
        store_release(sequence, slot, _TWO * head)
        store_release(control, HEAD, head)
    return len(source)


@kernel
def pop_overwrite(control: Words, sequence: Words, flat: Words, out: Words) -> int:
    """Copy records out, skipping overwritten ones. Loss counted lies *before* the first record returned."""
    capacity = np.uint64(sequence.shape[0])
    tail = load_relaxed(control, TAIL)
    head = load_acquire(control, HEAD)
    taken = 0
    while taken < out.shape[0] and tail < head:
        slot = np.int64(tail & (capacity - _ONE))
        whole = load_acquire(sequence, slot) == _TWO * tail + _TWO
        if whole:
            for k in range(WORDS):
                out[taken, k] = load_relaxed(flat, slot * WORDS + k)
            fence_acquire()
            whole = load_relaxed(sequence, slot) == _TWO * tail + _TWO
        if whole:
            taken += 1
            tail += _ONE
        elif taken > 0:
            break
        else:
            # Overwritten. Continue a little after the oldest record: the writer overwrites the next ones too.
            head = load_acquire(control, HEAD)
            oldest = head - min(head, capacity - capacity // _FULL_SLACK)
            target = min(max(tail + _ONE, oldest), head)
            store_relaxed(control, LOST, load_relaxed(control, LOST) + (target - tail))
            tail = target
    store_release(control, TAIL, tail)
    return taken


@kernel
def reader_sleeps(control: Words) -> bool:
    """Whether the reader announced that it sleeps; ordered after the preceding push."""
    fence_total()
    return bool(load_relaxed(control, SLEEPING) != 0)


@kernel
def announce_sleep(control: Words, sleeping: int) -> bool:
    """Announce that the reader sleeps (1) or woke (0); then returns whether records wait."""
    store_relaxed(control, SLEEPING, np.uint64(sleeping))
    fence_total()
    return bool(load_acquire(control, HEAD) != load_relaxed(control, TAIL))


@kernel
def store_read_until(control: Words, until_ns: int) -> None:
    """What was pushed before can be popped by who loads this."""
    store_release(control, READ_UNTIL, np.uint64(until_ns))


@kernel
def load_read_until(control: Words) -> int:
    """See `store_read_until`."""
    return int(load_acquire(control, READ_UNTIL))


@kernel
def spin_for_records(control: Words, spins: int) -> bool:
    """Spin briefly until there are records; returns whether there are any."""
    for _ in range(spins):
        if load_acquire(control, HEAD) != load_relaxed(control, TAIL):
            return True
        relax()
    return False


class Ring:
    """One end of a ring: `create` it in the gateway, `attach` in the engine (one process may be both)."""

    def __init__(self, block: SharedBlock, wake_fd: int, clock: Callable[[], int]) -> None:
        words = np.frombuffer(block.buffer, np.uint64)
        self.control = words[:CONTROL_WORDS]
        self.capacity = int(self.control[CAPACITY])
        self.mode: Mode = _MODES[int(self.control[MODE])]
        self.sequence = words[CONTROL_WORDS : CONTROL_WORDS + self.capacity]
        start = CONTROL_WORDS + self.capacity
        self.flat = words[start : start + self.capacity * WORDS]
        self.slots = self.flat.reshape(self.capacity, WORDS)
        self.wake_fd = wake_fd
        self._block = block
        self._clock = clock

    @classmethod
    def create(
        cls,
        capacity: int,
        mode: Mode = "pause",
        *,
        wake_fd: int = -1,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Ring:
        """A new ring of `capacity` records of 120 bytes: a power of two from 8. Raises ValueError, OSError.

        Both ends hold the eventfd `wake_fd` (the engine inherits it). Without one a sleeping reader polls
        every millisecond.
        """
        if capacity < 8 or capacity & (capacity - 1):
            raise ValueError(f"a ring's capacity must be a power of two and at least 8, not {capacity}")
        block = SharedBlock.create(8 * (CONTROL_WORDS + capacity * (1 + WORDS)))
        control = np.frombuffer(block.buffer, np.uint64, CONTROL_WORDS)
        control[CAPACITY], control[MODE] = capacity, _MODES.index(mode)
        return cls(block, wake_fd, clock)

    @classmethod
    def attach(cls, name: str, *, wake_fd: int = -1, clock: Callable[[], int] = time.monotonic_ns) -> Ring:
        """Attach the other end of the ring `name`. Raises FileNotFoundError."""
        return cls(SharedBlock.attach(name), wake_fd, clock)

    @property
    def name(self) -> str:
        """The name to `attach` by."""
        return self._block.name

    def push(self, records: Records) -> int:
        """Writer: copy in RECORD [n] and stamp `ts_ring`; returns how many were accepted (overwrite: all)."""
        source = np.ascontiguousarray(records).view(np.uint64).reshape(-1, WORDS)
        now = self._clock()
        if self.mode == "pause":
            accepted = push_pause(self.control, self.slots, source, now)
        else:
            accepted = push_overwrite(self.control, self.sequence, self.flat, source, now)
        if self.wake_fd >= 0 and reader_sleeps(self.control):
            os.eventfd_write(self.wake_fd, 1)
        return int(accepted)

    def pop(self, out: Records) -> int:
        """Reader: copy the oldest records, up to len(out), into contiguous RECORD [n]; returns how many.

        Records lost to overwriting lie before the first returned record, never between two.
        """
        target = out.view(np.uint64).reshape(-1, WORDS)
        if self.mode == "pause":
            return int(pop_pause(self.control, self.slots, target))
        return int(pop_overwrite(self.control, self.sequence, self.flat, target))

    def tell_read(self, until_ns: int) -> None:
        """Writer: all that its sources had at this time, on the clock, is in the ring."""
        store_read_until(self.control, until_ns)

    @property
    def read_until(self) -> int | None:
        """Reader: what the writer told last; None before. Records up to then can be popped."""
        return int(load_read_until(self.control)) or None

    @property
    def lost(self) -> int:
        """Records the reader lost since creation; 0 in pause mode."""
        return int(self.control[LOST])

    @property
    def fill(self) -> float:
        """Share of the ring in use, 0 to 1; approximate, from either end."""
        return min(1.0, (int(self.control[HEAD]) - int(self.control[TAIL])) / self.capacity)

    def wait(self, timeout_s: float) -> bool:
        """Reader: wait for records; False at the time limit. Spins briefly, then sleeps."""
        if spin_for_records(self.control, _SPINS):
            return True
        try:
            if not announce_sleep(self.control, 1):
                self._sleep(timeout_s)
        finally:
            waiting = announce_sleep(self.control, 0)
        return waiting

    def wake(self) -> None:
        """End the reader's `wait`, the current or the next one; without an eventfd it ends by its limit."""
        if self.wake_fd >= 0:
            os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """Close this end; the memory is unmapped with its last view. Idempotent.

        Whoever made `wake_fd` closes it afterwards, so it is not written to any more: its number may be
        another file's.
        """
        self.wake_fd = -1
        self._block.close()

    def unlink(self) -> None:
        """Remove the name; the creator calls this. Idempotent."""
        self._block.unlink()

    def _sleep(self, timeout_s: float) -> None:
        """Wait until the eventfd fires; without one, poll for records every millisecond."""
        if self.wake_fd >= 0:
            poller = select.poll()
            poller.register(self.wake_fd, select.POLLIN)
            if poller.poll(max(0.0, timeout_s) * 1000):
                os.eventfd_read(self.wake_fd)
            return
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not spin_for_records(self.control, 1):
            time.sleep(0.001)
