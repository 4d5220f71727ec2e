"""How much memory the largest pass takes beside weights and KV: measured on a GPU, counted on a CPU."""

import gc

import torch

from engine.device import finish
from engine.engine import Engine
from engine.free_memory import available_bytes
from engine.graphs.runner import MAX_ROWS, CapturePlan
from engine.model.loaded import LoadedModel
from engine.warm_up import MAX_ANSWERS, run_pass
from regions.frozen import Context

_STATES, _LOGITS = 8, 3
"""Arrays of a pass that live at once: of the widest sums of all rows, and of the logits of those sampled."""
_NUMBER_BYTES = 4
"""States and logits are in float32 on a CPU."""


def pass_bytes(model: LoadedModel, rows: int, block_size: int) -> int:
    """Bytes that passes of up to ``rows`` tokens take beside weights and KV. Raises OutOfMemory."""
    if model.device.type != "cpu":
        return measured_pass_bytes(model, rows, block_size)
    numbers = _STATES * rows * model.sizes.width + _LOGITS * MAX_ANSWERS * model.sizes.vocabulary
    return _NUMBER_BYTES * numbers


def measured_pass_bytes(model: LoadedModel, rows: int, block_size: int) -> int:
    """The same, of a small engine's largest passes and their captures, which is gone afterwards.

    It is what the device has less: libraries and kernels that are loaded meanwhile count, too.
    """
    before = available_bytes(model.device)
    plan = CapturePlan(min(MAX_ROWS, rows), deferred=True)
    blocks = MAX_ANSWERS - (-rows // block_size) + 1  # one is of the captures
    engine = Engine(model, blocks=blocks, block_size=block_size, captures=plan)
    for readers, tokens in ((1, rows), (1, plan.max_rows), (min(MAX_ANSWERS, rows), 1)):
        run_pass(engine, Context(), readers, tokens)
    while engine.graphs is not None and engine.graphs.waiting:
        engine.graphs.capture_next()
    finish(model.device)
    taken = before - available_bytes(model.device) - engine.pool.bytes
    del engine
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return max(0, taken)
