"""Shared by end-to-end tests: compiled kernels and the embedded model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.directories import cache_home


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded model is built once and kernels are those of the other tests; processes inherit both."""
    cache = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR") or str(cache_home() / "numba"))
        patch.setenv("FORETICK_CACHE", str(cache))
        yield cache
