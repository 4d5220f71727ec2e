"""Questions asked while a session of half a gigabyte leaves the pool for a file and returns."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from bench.engine.contenders import model_of
from bench.figures import Figure, Goal, Setting, quantiles
from bench.run import SuiteRun
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from regions.frozen import Context
from regions.kv_tensors import KVPool
from regions.offload.copy_threads import CopyThreads
from regions.offload.kv_store import inline
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity
from regions.offload.staging import CHUNK
from regions.tape import Retention, Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from scheduler.worker import Worker

_BLOCK = 16
_WINDOW = 256
"""Tokens of the session that is asked."""
_QUESTION = tuple(range(10, 50))
Way = Literal["leaves", "leaves for work that waits", "returns"]
WAYS: tuple[Way, ...] = ("leaves", "returns", "leaves for work that waits", "returns")
"""One after the other: what has left returns."""


def measure(run: SuiteRun) -> Iterator[Figure]:
    """One session is asked again and again, while another one's window is written to a file and read back
    (checked, then copied): by the daemon's threads in chunks of 1 MiB, or at once, as before, by the thread
    that runs the model. It leaves because it is idle, or because work waits for its blocks. *Added* is the
    difference from the same quantile with nothing on its way, which is measured right before each copy and
    right after it. Its reference is one chunk of that copy, measured without questions, or the spread of the
    quiet side, the difference between the quantiles before and after, if that is larger: less cannot be told
    from nothing. A plain write of as many bytes to the same directory is the limit of a spill.
    """
    loaded, _ = model_of(run)
    repeats = run.sized(5, 1)
    with TemporaryDirectory(prefix="foretick-spill-") as folder:
        desk = _Desk(loaded, run.sized(512, 2) << 20, Path(folder), run.threads)
        try:
            yield from _figures(desk, repeats)
        finally:
            desk.close()


def _figures(desk: "_Desk", repeats: int) -> Iterator[Figure]:
    size: Setting = {"MiB": round(desk.size / 2**20)}
    written = [desk.plain_write() for _ in range(repeats)]
    mib_s = desk.size / 2**20 / min(written)
    alone_s: dict[Way, float] = {}
    for way in WAYS * repeats:
        alone_s[way] = min(alone_s.get(way, inf), desk.move(way, lambda ended: ended.wait()))
    rate = {way: desk.size / 2**20 / seconds for way, seconds in alone_s.items()}
    yield Figure("leaves", rate["leaves"], "MiB/s", "Rate", size, "plain write", mib_s)
    yield Figure("returns", rate["returns"], "MiB/s", "Rate", size)
    for aside in (True, False):
        desk.copy(aside=aside)
        waits, took_s, quiet = _waits(desk, repeats)
        for way, found in waits.items():
            at = size | {"a session": way, "copied by": "its thread" if aside else "the model's thread"}
            yield Figure(
                "beside questions", median(took_s[way]), "s", "Time of the whole copy", at,
                "without questions", alone_s[way], n=len(took_s[way]), low=min(took_s[way]),
                high=max(took_s[way]),
            )  # fmt: skip
            judged = aside and way == "leaves"
            yield from _added(found, quiet, alone_s[way] / desk.chunks * 1e3, at, judged=judged)


def _waits(
    desk: "_Desk", repeats: int
) -> tuple[dict[Way, list[int]], dict[Way, list[float]], tuple[list[int], list[int]]]:
    """Times of questions beside each way, ns, and of the whole copies, s; those of questions with nothing on
    its way, right before each copy and right after it.
    """
    waits: dict[Way, list[int]] = {way: [] for way in WAYS}
    took_s: dict[Way, list[float]] = {way: [] for way in WAYS}
    before, after = list[int](), list[int]()
    for way in WAYS * repeats:
        before += desk.ask_for(desk.quiet_s)
        took_s[way].append(desk.move(way, partial(desk.ask_until, to=waits[way])))
        after += desk.ask_for(desk.quiet_s)
    return waits, took_s, (before, after)


def _added(
    found: list[int], quiet: tuple[list[int], list[int]], chunk_ms: float, at: Setting, *, judged: bool
) -> Iterator[Figure]:
    for name, share in (("P50", 0.5), ("P99", 0.99), ("most", 1.0)):
        now, both, *halves = (
            quantiles(each, share)[0] / 1e6 for each in (found, [*quiet[0], *quiet[1]], *quiet)
        )
        spread = abs(halves[0] - halves[1])
        yield Figure(f"question {name}", now, "ms", "Waits", at, "quiet", both, n=len(found))
        yield Figure(f"quiet spread {name}", spread, "ms", "Quiet", at, "one chunk", chunk_ms)
        yield Figure(
            f"added {name}", now - both, "ms", "Added", at, "one chunk or the spread", max(chunk_ms, spread),
            goal=Goal(1.0) if judged and name == "P99" else None, n=len(found),
        )  # fmt: skip


class _Desk:
    """A worker with two sessions: one that is asked, and one with ``size`` bytes of KV."""

    def __init__(self, loaded: LoadedModel, size: int, directory: Path, threads: int) -> None:
        token = KVPool.block_bytes(loaded.layers, 1, loaded.kv_dtype)
        tokens = size // token
        self.size, self.chunks, self.directory = tokens * token, -(-tokens * token // CHUNK), directory
        self.quiet_s = 1.0 if size > 1 << 22 else 0.05
        """Of questions with nothing on its way, on either side of a copy."""
        blocks = tokens // _BLOCK + 200
        self._engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
        pool = self._engine.pool
        limits = Limits(max_batch_tokens=1024)
        self._scheduler = Scheduler(self._engine, pool, limits, time.monotonic_ns)
        self._now, self._watch = 0, lambda: None
        self._residency = Residency(pool, Idleness(1, lambda: directory), lambda: self._now)
        self._copies = CopyThreads(between=[self._engine.between_passes], urgent=lambda: pool.leaving > 0)
        self.copy(aside=True)
        self._asked = self._engine.open_tape("asked", (), Retention(_WINDOW + 1))
        self._large = _large(pool, tokens)
        self._residency.attach(self._large, Identity.of(pool, model="m", tokenizer="t", frozen=()))
        self._worker = Worker(self._scheduler)
        self._worker.start()
        committed = threading.Event()
        self._scheduler.subscribe(lambda tape, version, records: committed.set())
        self._scheduler.append((self._asked, [TapeItem([7 + i % 90 for i in range(_WINDOW)])]))
        committed.wait()
        self.ask_for(1.0)

    def copy(self, *, aside: bool) -> None:
        """Have the thread copy that a daemon has, or the model's."""
        self._residency.serve(self._copies if aside else inline, self._notify, self._copies.wait)

    def _notify(self, call: Callable[[], None]) -> None:
        self._scheduler.run_between(call)
        self._scheduler.run_between(self._watch)

    def ask(self) -> int:
        """The time of one question, ns."""
        done = threading.Event()
        spec = RequestSpec(
            PriorityClass.FLASH, "asked", _QUESTION, 1, lambda request: done.set(), tape=self._asked
        )
        began = time.perf_counter_ns()
        self._scheduler.submit(Request(spec))
        done.wait()
        return time.perf_counter_ns() - began

    def ask_for(self, seconds: float) -> list[int]:
        """Ask one question after the other for so long."""
        until, found = time.monotonic() + seconds, list[int]()
        while time.monotonic() < until:
            found.append(self.ask())
        return found

    def ask_until(self, ended: threading.Event, to: list[int]) -> None:
        """As `ask_for`, and at least once."""
        to.append(self.ask())
        while not ended.is_set():
            to.append(self.ask())

    def move(self, way: Way, meanwhile: Callable[[threading.Event], object]) -> float:
        """Have the large session leave or return; returns the seconds from its begin to its end."""
        ended, times = threading.Event(), list[float]()
        begins: dict[Way, Callable[[], object]] = {
            "leaves": self._residency.spill_idle,
            "leaves for work that waits": partial(self._residency.reclaim, 1),
            "returns": self._large.bring_back,
        }

        def begin() -> None:
            times.append(time.perf_counter())
            self._now += 10
            begins[way]()

        def watch() -> None:
            if len(times) == 1 and self._large.resident == (way == "returns"):
                times.append(time.perf_counter())
                ended.set()

        self._watch = watch
        self._scheduler.run_between(begin)
        meanwhile(ended)
        ended.wait()
        return times[1] - times[0]

    def plain_write(self) -> float:
        """Seconds of a plain write of as many bytes, in chunks."""
        data, path = np.ones(CHUNK, np.uint8).data, self.directory / "plain"
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(self.chunks):
                file.write(data)
        took = time.perf_counter() - began
        path.unlink()
        return took

    def close(self) -> None:
        self._worker.stop(10)
        self._residency.finish(60)
        self._residency.detach(self._large)
        self._large.release()
        self._asked.release()


def _large(pool: KVPool, tokens: int) -> Tape:
    """A session of ``tokens`` tokens, whose KV nothing has computed."""
    tape = Tape("large", pool, Context(), Retention(tokens), frame_limit=tokens + 1)
    assert tape.acquire(tokens), "the pool was made for it"
    placement = tape.next_slots(tokens)
    for tensor in pool.tensors:
        for slot, count in placement.slots:
            tensor[:, slot : slot + count] = 1.5
    tape.wrote(placement, [1] * tokens)
    tape.commit([tokens])
    return tape
