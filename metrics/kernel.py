"""The one way a function becomes machine code here: cached on disk, and without the interpreter lock.

The cache lies beside the sources (or in `NUMBA_CACHE_DIR`); numba notices a change in the file of the kernel
itself, not in a kernel it calls from another file, so after editing `ingest.atomics` remove the `__pycache__`
folders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` with numba on its first call; types are inferred, the signature is kept for mypy."""
    return cast(F, njit(cache=True, nogil=True)(function))
