"""Captured passes: on a GPU a small batch takes its kernels' time, not the time Python needs to launch them.

A pass is captured once for each bucket of sizes (rows, sampled rows, attention work) and replayed: inputs are
copied into static device tensors, the attention backend refills its metadata in place, and rows of padding
write their KV to a scratch block without readers. The first pass of a bucket runs eagerly; whoever runs
passes says when there is time to capture the bucket, so that no question waits for that. A bucket that cannot
be captured stays eager, and others are captured. Models that read device values on the host
(`capture_obstacle`) and large batches run eagerly.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.attention.base import Attention
from engine.attention.metadata import AttentionMetadata
from engine.device import out_of_memory
from engine.graphs.static import Staging, round_up
from engine.model.fusion import as_written
from engine.model.loaded import ATTENTION, ForwardContext, LoadedModel
from regions.frozen import SharedBlocks
from regions.kv_tensors import KVPool

log = logging.getLogger(__name__)

_TRACE = "foretick_trace"

MAX_ROWS = 1024
"""Most rows of a captured pass; in larger ones arithmetic hides the launches."""
_SHAPES = 5
"""Kinds of passes of equal rows that are captured: by sampled rows, and by what attention reads."""

Replay = Callable[[], torch.Tensor]
"""Runs a pass. A captured one replays its launches, with its result at the same address each time."""
Capture = Callable[[Replay], Replay]
"""Captures a pass. Raises RuntimeError when that is impossible."""
Key = tuple[int, int, Hashable]
"""Rows, sampled rows, and the attention backend's key of the metadata."""
Outcome = Literal["captured", "refused", "no_memory"]
"""What became of an attempt to capture a bucket: it is tried again only after `no_memory`."""


@dataclass(frozen=True)
class CapturePlan:
    """Which passes are captured: those of at most ``max_rows`` rows.

    ``deferred``: by `GraphRunner.capture_next` only, else behind the first pass of a bucket.
    """

    max_rows: int = MAX_ROWS
    deferred: bool = False

    @property
    def max_graphs(self) -> int:
        """Most captured graphs that are kept; the least recently used is dropped."""
        return _SHAPES * round_up(self.max_rows).bit_length()


@runtime_checkable
class StaticAttention(Attention, Protocol):
    """A backend whose calls read only static device tensors."""

    def prepare(self, metadata: AttentionMetadata) -> Hashable:
        """Fill the tensors for ``metadata``; equal results mean equal launches on equal addresses."""


class CudaCapture:
    """Captures CUDA graphs that share one memory pool; they never run concurrently."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Capture ``run`` on a separate stream."""
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate or wait for copies meanwhile, which is no part of this pass
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class GraphRunner:
    """Runs small passes as captured graphs. ``capture``: by default CUDA graphs."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        attention: StaticAttention,
        *,
        capture: Capture | None = None,
        plan: CapturePlan | None = None,
        max_graphs: int | None = None,
    ) -> None:
        self._model, self._pool, self._attention = model, pool, attention
        self._capture = capture or CudaCapture()
        self._plan = plan or CapturePlan()
        self._most_graphs = max_graphs or self._plan.max_graphs
        self._inputs: dict[tuple[int, int], Staging] = {}
        self._captured: OrderedDict[Key, Replay] = OrderedDict()
        self._metadata: AttentionMetadata | None = None  # of the pass: a `Capture` may run it again
        runs = pool.take(1)
        if runs is None:
            raise ValueError("the pool has no free block for the rows of padding; enlarge it")
        self._scratch = SharedBlocks(pool, runs)
        pool.blocks.release(runs)
        self._refused = set[Key]()
        """Buckets that cannot be captured."""
        self._waiting: OrderedDict[Key, AttentionMetadata] = OrderedDict()
        """Buckets that are still to be captured, each with a pass of its size."""
        self.outcomes = Counter[Outcome]()
        """Attempts to capture a bucket."""
        self.replays = 0

    @property
    def captures(self) -> int:
        """Buckets captured."""
        return self.outcomes["captured"]

    @property
    def waiting(self) -> int:
        """Buckets that are still to be captured."""
        return len(self._waiting)

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether the batch is small enough."""
        return metadata.rows <= self._plan.max_rows

    @torch.inference_mode()
    def logits(
        self,
        metadata: AttentionMetadata,
        tokens: Sequence[int],
        keep: Sequence[int],
        begin: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """The logits of rows ``keep`` in one pass, fp32 [keep, vocabulary]; valid until the next pass.

        ``begin``: called in front of its first kernel.
        """
        rows, kept = round_up(metadata.rows), round_up(len(keep))
        inputs = self._inputs.get((rows, kept))
        if inputs is None:
            sizes = {"tokens": rows, "positions": rows, "slots": rows, "keep": kept}
            inputs = self._inputs[rows, kept] = Staging(sizes, torch.int64, self._model.device)
        positions = [at for part in metadata.sequences for at in part.positions]
        ranges = [slots for part in metadata.sequences for slots in part.placement.slots]
        slots = [slot for first, n in ranges for slot in range(first, first + n)]
        padding = self._padding
        inputs.fill(tokens=(tokens, 0), positions=(positions, 0), slots=(slots, padding), keep=(keep, 0))
        key = rows, kept, self._attention.prepare(metadata)
        self._metadata = metadata
        begin()
        replay = self._captured.get(key)
        if replay is None:
            return self._first(key, metadata)[: len(keep)]
        self._captured.move_to_end(key)
        self.replays += 1
        return replay()[: len(keep)]

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Capture the bucket that has waited longest.

        On the thread that runs passes. Nothing that a pass has written is read or changed.
        """
        if self._waiting:
            (rows, kept, _), metadata = self._waiting.popitem(last=False)
            # rows of padding alone: a `Capture` may run them
            self._inputs[rows, kept].fill(
                tokens=((), 0), positions=((), 0), slots=((), self._padding), keep=((), 0)
            )
            self._metadata = metadata
            self._try(rows, kept, metadata)

    @property
    def _padding(self) -> int:
        """The slot that rows of padding write."""
        return self._scratch.blocks[0].start * self._pool.block_size

    def _first(self, key: Key, metadata: AttentionMetadata) -> torch.Tensor:
        """Run the pass eagerly, which also compiles its kernels, and have its bucket captured."""
        rows, kept, _ = key
        result = self._run(rows, kept)
        if key in self._waiting or key in self._refused:
            return result
        if not self._plan.deferred:
            self._try(rows, kept, metadata)
            return result
        # the pass may have found new kinds of layers, which complete the key
        self._waiting[rows, kept, self._attention.prepare(metadata)] = metadata
        if len(self._waiting) > self._most_graphs:
            self._waiting.popitem(last=False)
        return result

    def _run(self, rows: int, kept: int) -> torch.Tensor:
        """The pass of `_metadata`, on the static inputs of these sizes."""
        assert self._metadata is not None
        inputs = self._inputs[rows, kept].parts
        context = ForwardContext(
            self._metadata, self._pool, inputs["slots"], self._attention, self._model.rotations
        )
        return self._model.forward(context, inputs["tokens"], inputs["keep"], inputs["positions"])

    def _try(self, rows: int, kept: int, metadata: AttentionMetadata) -> None:
        """Capture the bucket of a pass that has run, unless that is impossible or done."""
        key = rows, kept, self._attention.prepare(metadata)
        if key in self._refused or key in self._captured:
            return
        try:
            replay = self._capture(partial(self._run, rows, kept))
        except Exception as error:  # the pass itself works, whatever a capture makes of it
            if out_of_memory(error):  # the next pass of this size has it tried again
                self.outcomes["no_memory"] += 1
                return
            log.warning("passes of %d rows (%d sampled) are not captured: %s", rows, kept, error)
            self._refused.add(key)
            self.outcomes["refused"] += 1
            return
        self._captured[key] = replay
        self.outcomes["captured"] += 1
        while len(self._captured) > self._most_graphs:
            self._captured.popitem(last=False)


def capture_obstacle(model: Any, attention: str) -> str | None:
    """Why ``model``'s forward cannot be captured; None if it can. ``attention``: the setting to restore.

    Fake tensors have shapes but no values. Code that reads a device value on the host (an expert routing
    table, rotary tables that follow the longest position) raises with them, as it would break a capture.
    """
    # imported here: passes are captured of models that this code runs, and it takes seconds to import
    from transformers import AttentionInterface

    AttentionInterface.register(_TRACE, _no_attention)
    model.set_attn_implementation(_TRACE)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), as_written(model.device):
            ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
            keep = torch.zeros(2, dtype=torch.long, device=model.device)
            model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=keep)
    except Exception as error:  # any error means that the pass needs values
        message = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {message[:200]}"
    finally:
        model.set_attn_implementation(attention)
    return None


def _no_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def runner_for(
    model: LoadedModel,
    pool: KVPool,
    attention: Attention,
    capture: Capture | None,
    plan: CapturePlan | None = None,
) -> GraphRunner | None:
    """A runner if passes can be captured, on a GPU or with another ``capture``; else None."""
    if (capture is None and model.device.type != "cuda") or not isinstance(attention, StaticAttention):
        return None
    obstacle = capture_obstacle(model.model, ATTENTION)
    if obstacle is not None:
        log.warning("CUDA graphs are off: passes of this model cannot be captured: %s", obstacle)
        return None
    return GraphRunner(model, pool, attention, capture=capture, plan=plan)
