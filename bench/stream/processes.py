"""Child processes that are ready before measuring and gone afterwards, and a reader of the ring."""

import contextlib
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import ingest
from ingest.bars import BarPolicy, one_each
from ingest.plane import BarConsumer, DataPlane, Made, SessionSpec
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore

_READY_S = 120.0
_END_S = 10.0
_SOURCE = "bench"
_PIECE = re.compile(r"\d{1,3}|\D")


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


def in_child(work: Callable[..., None], *arguments: object) -> Any:
    """What a child sends when it is done."""
    with child(work, *arguments) as pipe:
        return pipe.recv()


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
