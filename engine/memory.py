"""Running out of device memory as an event: recognised, cleaned up after, and told by one type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from engine.step import OutOfMemory

Result = TypeVar("Result")

MESSAGES = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""How the CPU allocator, cuBLAS, the driver and Triton say it; they raise plain RuntimeErrors."""


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the device or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def guarded(device: torch.device, run: Callable[[], Result]) -> Result:
    """What ``run`` returns. When memory runs out, frees the device's cache and raises OutOfMemory."""
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        message = str(error).partition("\n")[0] or "out of memory"
    # Outside the handler: as long as the error lives its traceback holds the pass's frames and their tensors.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory(message)
