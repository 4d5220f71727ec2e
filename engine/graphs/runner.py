"""Captured passes: on a GPU a small batch costs its kernels, not the time Python takes to launch them.

A pass is recorded once for each bucket of sizes (rows, sampled rows, attention work) and replayed with the
same tensors at the same addresses: inputs are copied into static device tensors, the attention backend
refills its plan in place, and rows of padding write their KV to a scratch block nobody reads. Models that
read device values on the host (`capture_obstacle`) and large batches, which hide their launches behind
arithmetic, take the eager path.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.attention.base import Attention
from engine.attention.metadata import BatchPlan
from engine.graphs.capture import capture_obstacle
from engine.graphs.static import Staging, round_up
from engine.memory import out_of_memory
from engine.model.loading import ATTENTION, LoadedModel, Pass
from regions.frozen import SharedBlocks
from regions.pool import KVPool

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Rows of the largest recorded pass; beyond, arithmetic hides the launches."""
MOST_GRAPHS = 48
"""Recorded passes that are kept, the most recently used ones."""

Replay = Callable[[], torch.Tensor]
Key = tuple[int, int, Hashable]
"""Rows, sampled rows, and what the attention backend says of the plan."""


@runtime_checkable
class StaticAttention(Attention, Protocol):
    """A backend whose calls read nothing but static device tensors."""

    def prepare(self, plan: BatchPlan) -> Hashable:
        """Fill them for ``plan``; passes with equal answers run the same launches on the same addresses."""


class Recorder(Protocol):
    """Turns a pass into something that replays its launches; the result is at the same address each time."""

    def __call__(self, run: Replay) -> Replay:
        """Record ``run``. Raises RuntimeError when it cannot be recorded."""


class CudaRecorder:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Capture ``run`` on a stream of its own."""
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate or wait for copies meanwhile: that is no part of this pass
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class _Inputs:
    """Static input tensors for passes of up to so many rows and sampled rows, filled by one copy."""

    def __init__(self, rows: int, kept: int, device: torch.device) -> None:
        sizes = [rows, rows, rows, kept]
        self._staging = Staging(sum(sizes), torch.int64, device)
        self._parts = torch.split(self._staging.host, sizes)
        self.tokens, self.positions, self.slots, self.keep = torch.split(self._staging.device, sizes)

    def fill(self, *values: tuple[Sequence[int], int]) -> None:
        """(numbers, what follows them up to the end) for tokens, positions, slots and rows to keep."""
        with self._staging.filling():
            for part, (numbers, padding) in zip(self._parts, values, strict=True):
                part[: len(numbers)] = torch.tensor(numbers)
                part[len(numbers) :] = padding


@dataclass
class _Recorded:
    """``work`` is kept because a recorder may run it again, with another plan."""

    inputs: _Inputs
    work: Pass
    replay: Replay


class GraphRunner:
    """Runs small passes from recordings. ``record``: how; by default CUDA graphs."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        attention: StaticAttention,
        *,
        record: Recorder | None = None,
        most_rows: int = MOST_ROWS,
        most_graphs: int = MOST_GRAPHS,
    ) -> None:
        self._model, self._pool, self._attention = model, pool, attention
        self._record = record or CudaRecorder()
        self._most_rows, self._most_graphs = most_rows, most_graphs
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._recorded: OrderedDict[Key, _Recorded] = OrderedDict()
        runs = pool.take(1)
        if runs is None:
            raise ValueError("the pool has no block left for the rows of padding")
        self._scratch = SharedBlocks(pool, runs)
        pool.blocks.release(runs)
        self._refused = False
        self.recordings = 0
        self.replays = 0

    def takes(self, plan: BatchPlan) -> bool:
        """The batch is small enough, and recording works."""
        return plan.rows <= self._most_rows and not self._refused

    @torch.inference_mode()
    def logits(self, plan: BatchPlan, tokens: Sequence[int], keep: Sequence[int]) -> torch.Tensor:
        """One pass; logits of rows ``keep``, fp32 [keep, vocabulary], valid until the next pass."""
        rows, kept = round_up(plan.rows), round_up(len(keep))
        inputs = self._inputs.get((rows, kept))
        if inputs is None:
            inputs = self._inputs[rows, kept] = _Inputs(rows, kept, self._model.device)
        positions = [at for part in plan.sequences for at in part.positions]
        ranges = [slots for part in plan.sequences for slots in part.placement.slots]
        slots = [slot for first, n in ranges for slot in range(first, first + n)]
        scratch = self._scratch.blocks[0].start * self._pool.block_size
        inputs.fill((tokens, 0), (positions, 0), (slots, scratch), (keep, 0))
        key = rows, kept, self._attention.prepare(plan)
        recorded = self._recorded.get(key)
        if recorded is None:
            return self._first(key, inputs, plan)[: len(keep)]
        self._recorded.move_to_end(key)
        recorded.work.plan = plan
        self.replays += 1
        return recorded.replay()[: len(keep)]

    def _first(self, key: Key, inputs: _Inputs, plan: BatchPlan) -> torch.Tensor:
        """Run the pass eagerly, which also compiles what it needs, then record it for the next time."""
        work = Pass(plan, self._pool, inputs.slots, self._attention, self._model.turners)

        def run() -> torch.Tensor:
            return self._model.forward(work, inputs.tokens, inputs.keep, inputs.positions)

        result = run()
        # the eager pass may have shown new kinds of layers: the plan must be complete before it is recorded
        complete = *key[:2], self._attention.prepare(plan)
        try:
            replay = self._record(run)
        except RuntimeError as error:
            if out_of_memory(error):  # the pass itself is done; the next of this size is recorded
                return result
            log.warning("passes of this model cannot be recorded, they run eagerly: %s", error)
            self._refused = True
            return result
        self._recorded[complete] = _Recorded(inputs, work, replay)
        self.recordings += 1
        while len(self._recorded) > self._most_graphs:
            self._recorded.popitem(last=False)
        return result


def runner_for(
    model: LoadedModel, pool: KVPool, attention: Attention, record: Recorder | None
) -> GraphRunner | None:
    """A runner where passes can be recorded: on a GPU, or by another recorder, with a static backend.

    None elsewhere, and for a model that reads device values on the host, which is logged.
    """
    if (record is None and model.device.type != "cuda") or not isinstance(attention, StaticAttention):
        return None
    obstacle = capture_obstacle(model.model, ATTENTION)
    if obstacle is not None:
        log.warning("passes of this model cannot be recorded, they run eagerly: %s", obstacle)
        return None
    return GraphRunner(model, pool, attention, record=record)
