"""Compiles functions to machine code that is cached on disk and releases the GIL.

numba notices a change in a kernel's own file, but not in kernels it calls from other files. The cache
directory is therefore named after the content of all files that define kernels: an upgrade never runs stale
code, and sources may be read-only. It is also named after their paths, by which numba looks kernels up: a
second clone compiles for itself. Where the directory cannot be written, every start compiles.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from support.directories import cache_home

F = TypeVar("F", bound=Callable[..., object])

_ROOT = Path(__file__).parent.parent
_ENGINE = "engine/cpu engine/attention/cpu_kernel engine/attention/layout engine/compiled"
_OTHERS = "metrics/histogram.py regions/kv_codes.py ingest feeds/columns feeds/quality"
CODE = tuple(_ROOT / name for name in f"{_OTHERS} {_ENGINE}".split())
"""All files that define kernels, or their directories."""


def fingerprint(code: Iterable[Path] = CODE) -> str:
    """A digest of these files, of those in these directories, of their paths, and of numba's version."""
    digest = blake2b(numba.__version__.encode(), digest_size=8)
    for each in code:
        for path in sorted(each.glob("*.py")) if each.is_dir() else [each]:
            digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


_DIRECTORY = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_home() / "numba") / fingerprint()
numba.config.CACHE_DIR = str(_DIRECTORY)
_CACHED = _writable(_DIRECTORY)  # numba would raise an error, or write beside the sources


def compiled_before() -> bool:
    """Whether this version, where it is, has compiled kernels; its first start takes a minute or more."""
    return next(_DIRECTORY.rglob("*.nbi"), None) is not None


def kernel(function: F) -> F:
    """Compile `function` with numba on its first call; types are inferred, the signature is kept for mypy."""
    return cast(F, numba.njit(cache=_CACHED, nogil=True)(function))


def inlined_kernel(function: F) -> F:
    """As `kernel`, for code that makes no arrays: it becomes part of its callers, and counts no references.

    Passing many arrays from function to function, and counting who holds them, takes longer than short work.
    """
    made = numba.njit(cache=_CACHED, nogil=True, forceinline=True, _nrt=False)(function)
    return cast(F, made)


def callback(function: Callable[..., None], signature: Any) -> Any:
    """Compile `function` now, as a C function of numba's ``signature``; its ``address`` may be called.

    Division by 0 follows IEEE 754 in it.
    """
    return numba.cfunc(signature, cache=_CACHED, error_model="numpy")(function)
