"""Device helpers: copying lists of integers, detecting that memory ran out, and threads that compute."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from subprocess import CalledProcessError
from typing import TypeVar

import numpy as np
import torch

from engine.model.architectures import ModelError
from engine.step import OutOfMemory

Result = TypeVar("Result")

MESSAGES = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""Messages of the CPU allocator, cuBLAS, the driver and Triton, which raise plain RuntimeErrors."""


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` reports that memory ran out, on the device or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def guarded(device: torch.device, run: Callable[[], Result]) -> Result:
    """Call ``run``. When memory runs out, free the device's cache and raise OutOfMemory."""
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        message = str(error).partition("\n")[0] or "out of memory"
    # Outside the handler: while the error lives, its traceback keeps the pass's frames and their tensors.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory(message)


def queued(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """``values`` of the host, on ``device``; for a GPU pinned, so the copy is queued and does not block."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def to_device(device: torch.device, *lists: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Each list as an int64 tensor [len(list)] on ``device``; they go to a device together, as `queued`."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(np.array(values, np.int64)) for values in lists)
    packed = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int64)
    return torch.split(queued(device, packed), [len(values) for values in lists])


def finish(device: torch.device) -> None:
    """Block until ``device`` has run what is queued on the current stream; its faults are raised here."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def resolve_device(device: str) -> str:
    """Resolve ``auto`` to the GPU if there is one. Raises ModelError for CUDA without a GPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is cuda, but no GPU is visible: {_why_no_gpu()}")
    return device


def unused_gpu(device: str, files: Path = Path("/dev")) -> str | None:
    """Why ``auto`` takes the CPU though there is an NVIDIA GPU, with the remedy; None where it does not.

    ``files``: where the driver has a file for each GPU. A GPU that CUDA_VISIBLE_DEVICES hides is not meant.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if device != "auto" or hidden or torch.cuda.is_available() or not any(files.glob("nvidia[0-9]*")):
        return None
    return f"auto takes the CPU though there is an NVIDIA GPU: {_why_no_gpu()}, or set device to cpu"


def _why_no_gpu() -> str:
    """Why CUDA is not available, with the remedy."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA: install one that has it"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # untyped in torch
    except (RuntimeError, AssertionError) as error:
        seen = str(error).partition("\n")[0].rstrip(".")
        return f"{seen}: `nvidia-smi` must list one, with a driver for CUDA {torch.version.cuda} or later"
    return "`nvidia-smi` and CUDA_VISIBLE_DEVICES say which there are"


def toolchain_fault(error: Exception) -> str | None:
    """What a GPU's kernels lack to be compiled, with the remedy; None where ``error`` is none of that."""
    if isinstance(error, CalledProcessError) or "C compiler" in str(error):
        return (
            "the device's kernels cannot be compiled: install gcc and the headers of this Python (Debian: "
            f'gcc and python3-dev), or set device = "cpu" ({error})'
        )
    if isinstance(error, OSError):
        return (
            f"the device's compiled kernels cannot be kept ({error}): make that directory writable, or name "
            "another one in TRITON_CACHE_DIR"
        )
    return None


def device_name(device: torch.device) -> str:
    """Return the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def use_threads(threads: int) -> None:
    """Compute with this number of CPU threads; 0: torch's own number, at most one per CPU this process may
    use.
    """
    if not threads and hasattr(os, "sched_getaffinity"):
        threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    if threads:
        torch.set_num_threads(threads)


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Run ``work`` in a new thread, which has ended when this returns or raises what ``work`` raised.

    OpenMP keeps a team for every living thread that ever computed. Once the teams have more threads than
    there are cores, all threads sleep between operations, and a forward pass takes 1.7 times as long. So load
    or measure a model in a thread of its own when another thread will compute with it.
    """
    with ThreadPoolExecutor(1, "measure") as thread:
        return thread.submit(work).result()
