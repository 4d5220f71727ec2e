"""The ring between two processes, compared with `multiprocessing.Queue` and with copying the same bytes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.queues import Queue

import msgspec
import numpy as np

import ingest
from bench.figures import Figure, Goal, rate
from bench.run import SuiteRun
from bench.stream import processes
from bench.stream.processes import child, new_ring
from ingest.record import RECORD, WORDS, Records, RecordWriter

_RING = 1 << 16
BATCH = 512
_ROWS = 1 << 20
"""Of the columns that records are packed from: more than caches hold."""
_QUEUE_BATCHES = 64
_BATCHED_QUEUE = f"`multiprocessing.Queue`, {BATCH} at a time"


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Records of 128 bytes, 512 at a time: packed from columns as the gateway does, and the ring alone, with
    one batch again and again. Copying the bytes shows the order of memory's speed; its runs
    differ several times over, so it is no floor.
    """
    yield from figures(*run.sized((5_000_000, 1_000_000, 20_000, 7), (200_000, 50_000, 1000, 2)))


def figures(ring: int, batched: int, queued: int, repeats: int) -> Iterator[Figure]:
    """Records per second each way, taken in turn several times.

    ``ring``, ``batched``, ``queued``: records through the ring, and through the queue in batches and singly.
    """
    ingest.warm_up()
    ring, batched = (max(1, n // BATCH) * BATCH for n in (ring, batched))
    ways: dict[str, tuple[int, Callable[[int], float]]] = {
        "ring, packed from columns": (ring, partial(_through_ring, packed=True)),
        "ring, one batch that stays in the cache": (ring, partial(_through_ring, packed=False)),
        _BATCHED_QUEUE: (batched, partial(_through_queue, batch=BATCH)),
        "`multiprocessing.Queue`, one by one": (queued, partial(_through_queue, batch=1)),
        "the bytes copied in and out in one process": (ring, _copied),
    }
    seconds = [[way(n) for n, way in ways.values()] for _ in range(repeats)]
    found, *others = (
        rate(name, ways[name][0], took, "records/s")
        for name, took in zip(ways, zip(*seconds, strict=True), strict=True)
    )
    for other in others:
        goal = Goal(4e6, "at least", "ours") if other.name == _BATCHED_QUEUE else None
        yield msgspec.structs.replace(found, against=other.name, reference=other.ours, goal=goal)
        yield other


def _batch() -> Records:
    records = np.zeros(BATCH, RECORD)
    records["seq"] = np.arange(BATCH)
    return records


def _through_ring(total: int, packed: bool) -> float:
    records, writer = _batch(), RecordWriter(BATCH)
    numbers = np.tile(np.arange(BATCH), _ROWS // BATCH)
    columns = {name: numbers.copy() for name in ("seq", "ts_event", "ts_recv", "ts_source", "a", "b")}
    with new_ring(_RING) as ring, child(processes.pops, ring.name, total) as pipe:
        began = time.monotonic_ns()
        for i in range(total // BATCH):
            if packed:
                writer.clear()
                records, at = writer.extend(BATCH), i * BATCH % _ROWS
                for name, column in columns.items():
                    records[name] = column[at : at + BATCH]
            rest = records[ring.push(records) :]
            while len(rest):
                rest = rest[ring.push(rest) :]
        ended, checksum = pipe.recv()
    check(checksum, int(np.arange(BATCH).sum()) * (total // BATCH))
    return float(ended - began) / 1e9


def _through_queue(total: int, batch: int) -> float:
    queue: Queue[bytes] = multiprocessing.get_context("spawn").Queue(_QUEUE_BATCHES)
    payload = _batch()[:batch].tobytes()
    with child(processes.take, queue, total // batch) as pipe:
        began = time.monotonic_ns()
        for _ in range(total // batch):
            queue.put(payload)
        ended, size = pipe.recv()
    queue.close()
    check(size, total * RECORD.itemsize)
    return float(ended - began) / 1e9


def _copied(total: int) -> float:
    # as words: numpy copies structured records field by field, far below memory speed
    ring, source, out = (np.zeros((n, WORDS), np.uint64) for n in (_RING, BATCH, BATCH))
    began = time.perf_counter()
    for i in range(total // BATCH):
        at = i * BATCH % _RING
        np.copyto(ring[at : at + BATCH], source)
        np.copyto(out, ring[at : at + BATCH])
    return time.perf_counter() - began


def check(found: int, expected: int) -> None:
    """Raises RuntimeError when something is missing or changed."""
    if found != expected:
        raise RuntimeError(f"what arrived adds up to {found}, not to {expected}")
