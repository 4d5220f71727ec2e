"""The other process of the ring tests: producers whose every record can be checked alone."""

import numpy as np
from numba import njit

from ingest.atomics import relax
from ingest.record import TS_RING_WORD, WORDS
from ingest.ring import CONTROL_WORDS, Ring, Words, pop_overwrite, pop_pause, push_overwrite, push_pause

# Not `support.numba_kernel`: a cached kernel would not notice a change of the ring's code, which it contains.
kernel = njit(nogil=True)

GO = CONTROL_WORDS - 1  # an unused control word: the tests' start signal


@kernel
def mix(x: int) -> int:
    x = np.uint64(x)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    return x ^ (x >> np.uint64(33))


@kernel
def write_records(source: Words, first: int, n: int) -> None:
    """Record i: its number, then words that follow from the number."""
    for r in range(n):
        key = mix(np.uint64(first + r))
        source[r, 0] = np.uint64(first + r)
        for k in range(1, WORDS):
            source[r, k] = key + np.uint64(k)


@kernel
def torn(out: Words, n: int) -> int:
    bad = 0
    for r in range(n):
        key = mix(out[r, 0])
        for k in range(1, WORDS):
            if k != TS_RING_WORD and out[r, k] != key + np.uint64(k):
                bad += 1
    return bad


@kernel
def out_of_order(out: Words, n: int, last: int) -> int:
    """Number of records that do not follow `last`, or not directly follow the one before in the same pop."""
    bad = 0
    for r in range(n):
        if np.int64(out[r, 0]) <= last or (r > 0 and np.int64(out[r, 0]) != last + 1):
            bad += 1
        last = np.int64(out[r, 0])
    return bad


@kernel
def produce_pause(control: Words, slots: Words, total: int, batch: int) -> int:
    source = np.empty((batch, WORDS), np.uint64)
    written = 0
    while written < total:
        n = min(batch, total - written)
        write_records(source, written, n)
        done = 0
        while done < n:
            accepted = push_pause(control, slots, source[done:n], 7)
            done += accepted
            if accepted == 0:
                relax()
        written += n
    return written


@kernel
def produce_overwrite(control: Words, sequence: Words, flat: Words, total: int, batch: int, pace: int) -> int:
    source = np.empty((batch, WORDS), np.uint64)
    written = 0
    while written < total:
        n = min(batch, total - written)
        write_records(source, written, n)
        push_overwrite(control, sequence, flat, source[:n], 7)
        written += n
        for _ in range(pace):
            relax()
    return written


@kernel
def consume_pause(control: Words, slots: Words, total: int, batch: int) -> tuple[int, int]:
    """Returns (records read, bad ones)."""
    out = np.empty((batch, WORDS), np.uint64)
    read, bad = 0, 0
    while read < total:
        n = pop_pause(control, slots, out)
        bad += torn(out, n)
        for r in range(n):
            if np.int64(out[r, 0]) != read + r:
                bad += 1
        read += n
        if n == 0:
            relax()
    return read, bad


@kernel
def consume_overwrite(
    control: Words, sequence: Words, flat: Words, total: int, batch: int
) -> tuple[int, int, int]:
    """Returns (records read, torn or disordered ones, numbers missing between and after them)."""
    out = np.empty((batch, WORDS), np.uint64)
    read, bad, missing, last = 0, 0, 0, -1
    while last < total - 1:
        n = pop_overwrite(control, sequence, flat, out)
        bad += torn(out, n) + out_of_order(out, n, last)
        if n > 0:
            missing += np.int64(out[n - 1, 0]) - last - n
            last = np.int64(out[n - 1, 0])
            read += n
        else:
            relax()
    return read, bad, missing


@kernel
def await_go(control: Words) -> None:
    while control[GO] != 2:
        relax()


def producer(name: str, mode: str, total: int, batch: int, pace: int) -> None:
    """Compile on a temporary ring, signal readiness, and write on command."""
    small = Ring.create(8, "pause" if mode == "pause" else "overwrite")
    ring = Ring.attach(name)
    for target, n in ((small, 4), (ring, total)):
        if target is ring:
            ring.control[GO] = 1
            while int(ring.control[GO]) != 2:
                pass
        if mode == "pause":
            produce_pause(target.control, target.slots, n, batch)
        else:
            produce_overwrite(target.control, target.sequence, target.flat, n, batch, pace)
    small.close()
    small.unlink()
    ring.close()
