"""The reading end of the ring for the throughput measurements, in a process of its own."""

from __future__ import annotations

import re
import time
from multiprocessing.connection import Connection

import numpy as np

import ingest
from ingest.bars import BarBuilder, BarPolicy
from ingest.plane import DataPlane, SessionSpec, TapeRecord
from ingest.record import RECORD
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore

SOURCE = "bench"
_PIECE = re.compile(r"\d{1,3}|\D")
READ_BATCH = 4096


def encode(text: str) -> list[int]:
    """A stand-in tokenizer with three-digit number groups: the tables then do what they do for Llama 3."""
    pieces = _PIECE.findall(text)
    return [int(p) + 1000 * len(p) if p.isdigit() else ord(p) for p in pieces]


class Counted:
    """A data plane over one ring that counts the bars and tokens it hands over."""

    def __init__(self, ring: Ring, sessions: list[str]) -> None:
        self.bars = self.tokens = 0
        self.plane = DataPlane(
            ring,
            SOURCE,
            BarBuilder(len(sessions), BarPolicy(1_000_000_000)),
            Tokeniser(encode),
            [SessionSpec(name) for name in sessions],
            self._submit,
            MetricStore.local({"session": sessions, "source": [SOURCE]}),
        )

    def _submit(self, session: int, records: list[TapeRecord]) -> None:
        self.bars += len(records)
        self.tokens += sum(len(record.tokens) for record in records)

    def drain(self, total: int) -> int:
        """Step until ``total`` records are through; the monotonic ns at which the last one was."""
        done = 0
        while done < total:
            taken = self.plane.step()
            if not taken:
                time.sleep(0.0002)
            done += taken
        ended = time.monotonic_ns()
        self.plane.flush()
        return ended


def bars(ring_name: str, sessions: list[str], total: int, pipe: Connection) -> None:
    """Drain into bars; sends "ready", then (monotonic ns of the end, bars, tokens)."""
    ingest.warm_up()
    ring = Ring.attach(ring_name)
    counted = Counted(ring, sessions)
    pipe.send("ready")
    pipe.send((counted.drain(total), counted.bars, counted.tokens))
    ring.close()


def pops(ring_name: str, total: int, pipe: Connection) -> None:
    """Drain and drop; sends "ready", then (monotonic ns of the end, sum of all sequence numbers)."""
    ingest.warm_up()
    ring = Ring.attach(ring_name)
    out = np.zeros(READ_BATCH, RECORD)
    pipe.send("ready")
    done, checksum = 0, 0
    while done < total:
        n = ring.pop(out)
        checksum += int(out["seq"][:n].sum())
        done += n
    pipe.send((time.monotonic_ns(), checksum))
    ring.close()
