"""Compiles functions to machine code that is cached on disk and releases the GIL.

numba notices a change in a kernel's own file, but not in kernels it calls from other files. The cache
directory is therefore named after the content of all files that define kernels: an upgrade never runs stale
code, and sources may be read-only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar, cast

import numba

from metrics.cache_home import cache_home

F = TypeVar("F", bound=Callable[..., object])

_PACKAGES = ("metrics", "ingest")
_ROOT = Path(__file__).parent.parent


def _fingerprint() -> str:
    digest = blake2b(numba.__version__.encode(), digest_size=8)
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


numba.config.CACHE_DIR = str(
    Path(os.environ.get("NUMBA_CACHE_DIR") or cache_home() / "numba") / _fingerprint()
)


def kernel(function: F) -> F:
    """Compile `function` with numba on its first call; types are inferred, the signature is kept for mypy."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))
