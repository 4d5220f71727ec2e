"""Compiles or loads every kernel before the first tick needs it."""

import os
import threading

import numpy as np

from ingest.bars import BarPolicy, one_each
from ingest.compact import CompactSpec
from ingest.identity import IDENTITY, unpacked_tables
from ingest.plane import BarConsumer, DataPlane, Made, SessionSpec
from ingest.record import QUOTE, RecordWriter
from ingest.ring import Mode, Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore


def warm_up() -> None:
    """Run one bar through a whole plane of each ring mode.

    The first run on a machine compiles (about ten seconds); later runs load the cache. Raises OSError when
    there is no shared memory for two small rings.
    """
    modes: tuple[Mode, ...] = ("pause", "overwrite")
    for mode in modes:
        wake_fd = os.eventfd(0)
        ring = Ring.create(8, mode, wake_fd=wake_fd)
        try:
            _one_bar(ring)
        finally:
            ring.close()
            ring.unlink()
            os.close(wake_fd)


class _StopsAtABar(BarConsumer):
    def __init__(self) -> None:
        self.stop = threading.Event()

    def submit(self, made: Made) -> None:
        self.stop.set()


def _one_bar(ring: Ring) -> None:
    metrics = MetricStore.local({"session": ["warm", "compact"], "source": ["warm"]})
    policy = BarPolicy(1_000_000_000, empty="fill", max_fill=1, idle_close_ns=3_600_000_000_000)
    feeds = one_each(2, policy)
    tokeniser = Tokeniser(lambda text: [ord(character) for character in text])
    consumer = _StopsAtABar()
    plane = DataPlane(
        ring,
        "warm",
        tokeniser,
        [SessionSpec("warm", feeds[0]), SessionSpec("compact", feeds[1], CompactSpec())],
        consumer,
        metrics,
    )
    writer = RecordWriter(4)
    for second, session in ((1, 1), (2, 1), (1, 0), (2, 0)):
        writer.add(QUOTE, session, second * 1_000_000_000, second * 1_000_000_000, (1, 1, 1, 1, 0))
    plane.mark_gap()
    ring.push(writer.records)
    ring.tell_read(1)
    plane.run(consumer.stop)
    ring.wait(0.0)
    plane.flush()
    unpacked_tables(np.zeros(1, IDENTITY), 1)
