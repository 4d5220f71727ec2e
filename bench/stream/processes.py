"""Child processes that are ready before measuring and gone afterwards: readers of the ring, a client."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import NamedTuple, TypeVar

import numpy as np
import zmq

import ingest
from bench.run import timed
from daemon.api.client import QueryClient
from flash.question import PAPER_SIX
from ingest.bars import BarPolicy, one_each
from ingest.plane import BarConsumer, DataPlane, Made, SessionSpec
from ingest.record import RECORD
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore

_READY_S = 120.0
_END_S = 10.0
_SOURCE = "bench"
_PIECE = re.compile(r"\d{1,3}|\D")
_READ_BATCH = 4096
_PAUSE_S = 0.001

T = TypeVar("T")


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run ``work(*arguments, pipe)``, a module's function, in a new interpreter; wait for its "ready".

    Raises RuntimeError when it is not ready in time; the pipe raises EOFError when it dies later.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_READY_S) or ours.recv() != "ready":
            raise RuntimeError(f"{work.__name__} was not ready within {_READY_S:.0f} s")
        yield ours
        process.join(_END_S)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()


@contextlib.contextmanager
def new_ring(capacity: int) -> Iterator[Ring]:
    """A ring that is removed afterwards."""
    ring = Ring.create(capacity)
    try:
        yield ring
    finally:
        ring.close()
        ring.unlink()


def encode(text: str) -> list[int]:
    """A stand-in tokenizer with three-digit number groups, for which the tables work as for Llama 3."""
    pieces = _PIECE.findall(text)
    return [int(p) + 1000 * len(p) if p.isdigit() else ord(p) for p in pieces]


class Counted(BarConsumer):
    """A data plane over one ring that counts its bars and tokens."""

    def __init__(self, ring: Ring, sessions: list[str]) -> None:
        self.bars = self.tokens = 0
        feeds = one_each(len(sessions), BarPolicy(1_000_000_000))
        self.plane = DataPlane(
            ring,
            _SOURCE,
            Tokeniser(encode),
            [SessionSpec(name, each) for name, each in zip(sessions, feeds, strict=True)],
            self,
            MetricStore.local({"session": sessions, "source": [_SOURCE]}),
        )

    def submit(self, made: Made) -> None:
        """Count the records."""
        for _, records in made:
            self.bars += len(records)
            self.tokens += sum(len(record.tokens) for record in records)

    def drain(self, total: int) -> int:
        """Step until ``total`` records are drained; the monotonic ns of the last one."""
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
    out = np.zeros(_READ_BATCH, RECORD)
    pipe.send("ready")
    done, checksum = 0, 0
    while done < total:
        n = ring.pop(out)
        checksum += int(out["seq"][:n].sum())
        done += n
    pipe.send((time.monotonic_ns(), checksum))
    ring.close()


class HitSamples(NamedTuple):
    """Round trips in ns: asks answered from the cache and not, requests for the latest answer, echoes."""

    hits: list[int]
    computed: list[int]
    latest: list[int]
    echoes: list[int]


def watch(query: str, echo: str, session: str, seconds: float, pipe: Connection) -> None:
    """Ask, fetch the latest answer and echo, in turn, for so long; sends "ready", then `HitSamples`."""
    seen, question = HitSamples([], [], [], []), PAPER_SIX[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket, QueryClient(query) as client:
        socket.linger = 0
        socket.connect(echo)
        pipe.send("ready")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            reply, ns = _paused(lambda: client.ask(session, question.text, 1, question.choices or ()))
            (seen.hits if reply.cached else seen.computed).append(ns)
            seen.latest.append(_paused(lambda: client.answers(session, question.name))[1])
            seen.echoes.append(_paused(lambda: (socket.send(b"echo"), socket.recv()))[1])
    pipe.send(seen)


def _paused(request: Callable[[], T]) -> tuple[T, int]:
    """The reply to a request made after a pause, and the ns it took."""
    time.sleep(_PAUSE_S)
    return timed(request)


def take(queue: Queue[bytes], messages: int, pipe: Connection) -> None:
    """Take from a queue; sends "ready", then (monotonic ns of the end, bytes)."""
    pipe.send("ready")
    size = sum(len(queue.get()) for _ in range(messages))
    pipe.send((time.monotonic_ns(), size))
