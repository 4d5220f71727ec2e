"""Captured passes: on a GPU a small batch takes its kernels' time, not the time Python needs to launch them.

A pass is captured once for each bucket of sizes (rows, sampled rows, attention work) and replayed: inputs are
copied into static device tensors, the attention backend refills its metadata in place, and rows of padding
write their KV to a scratch block without readers. Models that read device values on the host
(`capture_obstacle`) and large batches run eagerly.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

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

MAX_ROWS = 256
"""Most rows of a captured pass; in larger ones arithmetic hides the launches."""
MAX_GRAPHS = 48
"""Most captured graphs kept; the least recently used is dropped."""

Replay = Callable[[], torch.Tensor]
"""Runs a pass. A captured one replays its launches, with its result at the same address each time."""
Capture = Callable[[Replay], Replay]
"""Captures a pass. Raises RuntimeError when that is impossible."""
Key = tuple[int, int, Hashable]
"""Rows, sampled rows, and the attention backend's key of the metadata."""


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
        max_rows: int = MAX_ROWS,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._model, self._pool, self._attention = model, pool, attention
        self._capture = capture or CudaCapture()
        self._most_rows, self._most_graphs = max_rows, max_graphs
        self._inputs: dict[tuple[int, int], Staging] = {}
        self._captured: OrderedDict[Key, Replay] = OrderedDict()
        self._metadata: AttentionMetadata | None = None  # of the pass: a `Capture` may run it again
        runs = pool.take(1)
        if runs is None:
            raise ValueError("the pool has no free block for the rows of padding; enlarge it")
        self._scratch = SharedBlocks(pool, runs)
        pool.blocks.release(runs)
        self._refused = set[Key]()
        """Passes that cannot be captured."""
        self.captures = 0
        self.replays = 0

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether the batch is small enough."""
        return metadata.rows <= self._most_rows

    @torch.inference_mode()
    def logits(self, metadata: AttentionMetadata, tokens: Sequence[int], keep: Sequence[int]) -> torch.Tensor:
        """The logits of rows ``keep`` in one pass, fp32 [keep, vocabulary]; valid until the next pass."""
        rows, kept = round_up(metadata.rows), round_up(len(keep))
        inputs = self._inputs.get((rows, kept))
        if inputs is None:
            sizes = {"tokens": rows, "positions": rows, "slots": rows, "keep": kept}
            inputs = self._inputs[rows, kept] = Staging(sizes, torch.int64, self._model.device)
        positions = [at for part in metadata.sequences for at in part.positions]
        ranges = [slots for part in metadata.sequences for slots in part.placement.slots]
        slots = [slot for first, n in ranges for slot in range(first, first + n)]
        scratch = self._scratch.blocks[0].start * self._pool.block_size
        inputs.fill(tokens=(tokens, 0), positions=(positions, 0), slots=(slots, scratch), keep=(keep, 0))
        key = rows, kept, self._attention.prepare(metadata)
        self._metadata = metadata
        replay = self._captured.get(key)
        if replay is None:
            return self._first(key, inputs.parts, metadata)[: len(keep)]
        self._captured.move_to_end(key)
        self.replays += 1
        return replay()[: len(keep)]

    def _first(
        self, key: Key, inputs: Mapping[str, torch.Tensor], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Run the pass eagerly, which also compiles its kernels, then capture it."""

        def run() -> torch.Tensor:
            assert self._metadata is not None
            context = ForwardContext(
                self._metadata, self._pool, inputs["slots"], self._attention, self._model.rotations
            )
            return self._model.forward(context, inputs["tokens"], inputs["keep"], inputs["positions"])

        result = run()
        # the eager pass may have found new kinds of layers: complete the metadata before the capture
        complete = *key[:2], self._attention.prepare(metadata)
        if complete in self._refused:
            return result
        try:
            replay = self._capture(run)
        except RuntimeError as error:
            if out_of_memory(error):  # the pass itself is done; try to capture the next one of this size
                return result
            log.warning("passes of %d rows are not captured: %s", key[0], error)
            self._refused.add(complete)
            return result
        self._captured[complete] = replay
        self.captures += 1
        while len(self._captured) > self._most_graphs:
            self._captured.popitem(last=False)
        return result


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
    model: LoadedModel, pool: KVPool, attention: Attention, capture: Capture | None
) -> GraphRunner | None:
    """A runner if passes can be captured, on a GPU or with another ``capture``; else None."""
    if (capture is None and model.device.type != "cuda") or not isinstance(attention, StaticAttention):
        return None
    obstacle = capture_obstacle(model.model, ATTENTION)
    if obstacle is not None:
        log.warning("CUDA graphs are off: passes of this model cannot be captured: %s", obstacle)
        return None
    return GraphRunner(model, pool, attention, capture=capture)
