"""Runs a compiled function on the threads that torch computes with.

A second team would fight: an OpenMP team spins for a while after its work, and another team's threads then
wait for its cores. So the function runs on torch's own, through the entry that compilers use for a parallel
region, ``GOMP_parallel``. LLVM's and Intel's OpenMP have it as well.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_NAMES = ("libgomp", "libomp", "libiomp5")
_LOADED = Path("/proc/self/maps")

Parallel = Callable[[int, int, int], None]
"""Runs the C function at an address with an argument on several threads, and waits for all."""


def threads() -> int:
    """Threads that torch computes with, where the kernel can use them; else 1."""
    return torch.get_num_threads() if _parallel() is not None else 1


def run(function: int, argument: int, team: int) -> None:
    """Call the C function at address ``function`` with ``argument`` on ``team`` threads at once."""
    parallel = _parallel() if team > 1 else None
    if parallel is None:
        _call(function)(argument)
    else:
        parallel(function, argument, team)


@cache
def _call(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


@cache
def functions() -> tuple[int, int, int]:
    """Addresses of what a function may call in its parallel region: barrier, thread number, thread count."""
    library = _library()
    assert library is not None, "there are no parallel regions"
    names = ("GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    barrier, number, count = (
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names
    )
    return barrier, number, count


@cache
def _parallel() -> Parallel | None:
    """``GOMP_parallel`` of the OpenMP library that torch has loaded; None where there is none."""
    library = _library()
    if library is None:
        return None
    entry = library.GOMP_parallel
    entry.restype, entry.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return lambda function, argument, team: entry(function, argument, team, 0)


@cache
def _library() -> ctypes.CDLL | None:
    path = torch_openmp(_LOADED.read_text() if _LOADED.exists() else "")
    if path is None:
        log.info("torch's OpenMP library was not found: compiled kernels run on one thread")
        return None
    try:
        library = ctypes.CDLL(path)
        _ = library.GOMP_parallel, library.GOMP_barrier
    except (OSError, AttributeError) as error:
        log.info("%s has no parallel regions for others, kernels run on one thread: %s", path, error)
        return None
    return library


def torch_openmp(maps: str) -> str | None:
    """The path of torch's OpenMP library in the process's memory ``maps``; None if it is not certain.

    It lies in torch's own directory, or is the only one of the process.
    """
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    found = sorted(path for path in paths if Path(path).name.startswith(_NAMES))
    home = str(Path(torch.__file__).parent)
    own = [path for path in found if path.startswith((home + "/", home + ".libs/"))]
    if len(own) == 1:
        return own[0]
    return found[0] if len(found) == 1 else None
