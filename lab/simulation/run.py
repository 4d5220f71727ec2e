"""One simulated run: a workload's inputs, the real scheduler, and a simulated device.

The device keeps the time. A pass advances the clock, and input that arrives meanwhile is submitted at its own
time while the pass runs, as by other threads in the daemon. When there is nothing to compute, the clock jumps
to the next input.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.simulation.device import DeviceCosts, SimDevice
from lab.simulation.inputs import Input
from scheduler.interfaces import Limits, PriorityClass
from scheduler.policies import Ordering
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import FIFO, Scheduler

PAPER_BATCH_TOKENS = 8192
COLUMNS = (
    "request",
    "opened_ns",
    "last_input_ns",
    "first_token_ns",
    "done_ns",
    "prompt_tokens",
    "reused_tokens",
    "swaps",
    "recomputes",
    "invalidated_tokens",
    "recomputed_tokens",
    "swapped_tokens",
)
NEVER = -1


PAPER = Limits(
    max_batch_tokens=PAPER_BATCH_TOKENS,
    max_batch_requests=256,
    chunk_min=PAPER_BATCH_TOKENS,
    chunk_max=PAPER_BATCH_TOKENS,
    cell_budget_fraction=1.0,
    high_water=1.0,
    max_prompt_tokens=1 << 20,
    max_new_tokens=1 << 20,
    grouping=False,
    max_drafts=0,
    stream_timeout_ns=0,
)
"""vLLM's batching in *Stream2LLM*: a token budget, and chunks as large as it allows."""


def paper_limits(**changes: Any) -> Limits:
    """`PAPER` with changes."""
    return replace(PAPER, **changes)


@dataclass(frozen=True, slots=True)
class Setup:
    """The device's memory and the scheduler's configuration. Raises ValueError for an empty pool."""

    pool_tokens: int
    host_tokens: int = 0
    block_size: int = 16
    ordering: Ordering = FIFO
    limits: Limits = PAPER
    prefix_cache: bool = False
    """Cache prompts in free blocks, for later prompts with the same beginning."""
    seed: int = 0
    """Seed of the scheduler's random choices."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.pool_tokens < self.block_size or self.host_tokens < 0:
            raise ValueError("the pool must have at least one block, and a block at least one token")


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run; times in ns of virtual time."""

    columns: dict[str, NDArray[np.int64]]
    """[requests] each, by `COLUMNS`, in order of opening; `first_token_ns` is -1 for failed requests."""
    failures: dict[str, int]
    """Failed requests by the failure's code."""
    ended_ns: int
    """Time at which the last request ended."""
    passes: int
    computed_tokens: int
    busy_ns: int
    copying_ns: int
    """Time in passes, and time that passes waited for swapped blocks."""
    peak_tokens: int
    """Most KV in the pool at once, in tokens of whole blocks."""

    @property
    def answered(self) -> NDArray[np.bool_]:
        """[requests] got a first token."""
        answered: NDArray[np.bool_] = self.columns["first_token_ns"] != NEVER
        return answered

    @property
    def ttft_ns(self) -> NDArray[np.int64]:
        """[answered requests] from the end of the retrieval, the last input, to the first token."""
        columns, answered = self.columns, self.answered
        ttft: NDArray[np.int64] = (columns["first_token_ns"] - columns["last_input_ns"])[answered]
        return ttft


def simulate(inputs: Iterator[Input], setup: Setup, costs: DeviceCosts) -> Result:
    """Run a workload to its end.

    Raises RuntimeError when the scheduler stops with unfinished requests, which is a bug.
    """
    return _Run(inputs, setup, costs).run()


def go_on(scheduler: Scheduler, number: int, piece: Input, tokens: Sequence[int]) -> None:
    """Submit a later piece of an open request; ``tokens`` are the piece's."""
    if piece.op == "update":
        scheduler.replace(number, tokens)
    elif tokens:
        scheduler.extend(number, tokens)
    if piece.last:
        scheduler.finish(number)


@dataclass(slots=True)
class _Query:
    request: Request
    opened_ns: int
    last_ns: int


class _Run:
    def __init__(self, inputs: Iterator[Input], setup: Setup, costs: DeviceCosts) -> None:
        self.inputs = inputs
        self.upcoming = next(inputs, None)
        self.device = SimDevice(
            costs,
            self.elapse,
            blocks=setup.pool_tokens // setup.block_size,
            block_size=setup.block_size,
            host_blocks=setup.host_tokens // setup.block_size,
            keep_prefixes=setup.prefix_cache,
        )
        self.clock = self.device.clock
        self.scheduler = Scheduler(
            self.device,
            self.device.pool,
            setup.limits,
            self.clock,
            ordering=setup.ordering,
            costs=costs,
            tier=self.device.tier,
            index=self.device.index,
            rng=random.Random(setup.seed),
        )
        self.live: dict[int, _Query] = {}
        self.rows = array("q")
        self.failures = Counter[str]()

    def run(self) -> Result:
        while True:
            if self.scheduler.step():
                continue
            if self.upcoming is None:
                break
            self.elapse(self.upcoming.time_ns)
        if self.live:
            raise RuntimeError(f"the scheduler stopped with {len(self.live)} unfinished requests")
        return self.result()

    def elapse(self, until: int) -> None:
        """Advance the clock, and submit each input that arrives until then at its time."""
        while self.upcoming is not None and self.upcoming.time_ns <= until:
            self.clock.now = max(self.clock.now, self.upcoming.time_ns)
            self.feed(self.upcoming)
            self.upcoming = next(self.inputs, None)
        self.clock.now = max(self.clock.now, until)

    def feed(self, piece: Input) -> None:
        if piece.op == "open":
            self.open(piece)
            return
        query = self.live.get(piece.request)
        if query is None:
            return  # it failed meanwhile
        if piece.last:
            query.last_ns = piece.time_ns
        go_on(self.scheduler, query.request.id, piece, piece.tokens)

    def open(self, piece: Input) -> None:
        request = Request(
            RequestSpec(
                cls=PriorityClass.POOL,
                session="",
                prompt=piece.tokens,
                max_tokens=piece.max_tokens,
                on_done=partial(self.done, piece.request),
                open_prompt=self.device.open_prompt,
                complete=piece.last,
                tenant=piece.tenant,
                weight=piece.weight,
            )
        )
        self.live[piece.request] = _Query(request, piece.time_ns, piece.time_ns)
        self.scheduler.submit(request)

    def done(self, number: int, request: Request) -> None:
        query = self.live.pop(number)
        first = request.first(LifecycleEvent.KV_ON_GPU) if request.state is State.FINISHED else None
        if request.error is not None:
            self.failures[request.error.code] += 1
        kinds = [event for event, _ in request.events]
        self.rows.extend(
            (
                number,
                query.opened_ns,
                query.last_ns,
                NEVER if first is None else first,
                self.clock.now,
                len(request.prompt),
                request.cached_tokens,
                kinds.count(LifecycleEvent.PREEMPTED_SWAP),
                kinds.count(LifecycleEvent.PREEMPTED_RECOMPUTE),
                request.total_tokens_invalidated,
                request.recomputed_tokens,
                request.swapped_tokens,
            )
        )

    def result(self) -> Result:
        device = self.device
        table = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        table = table[np.argsort(table[:, 0])]
        return Result(
            columns={name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(COLUMNS)},
            failures=dict(sorted(self.failures.items())),
            ended_ns=int(table[:, COLUMNS.index("done_ns")].max(initial=0)),
            passes=device.passes,
            computed_tokens=device.tokens,
            busy_ns=device.busy_ns,
            copying_ns=device.copying_ns,
            peak_tokens=device.peak_blocks * device.pool.block_size,
        )
