"""Fixtures shared by the whole suite."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

pytest_plugins = ["tests.fixtures_kafka", "tests.fixtures_prometheus", "tests.fixtures_triton"]


def pytest_collection_finish() -> None:
    """Take what imports made out of the collector's lists: to find the pools among the rest is quick."""
    gc.collect()
    gc.freeze()


def _pools() -> list[ref[Any]]:
    """The pools alive, as the collector knows them: the product keeps no register for its tests."""
    module = sys.modules.get("regions.block_pool")
    if module is None:
        return []
    kinds = (module.BlockPool, *module.BlockPool.__subclasses__())
    return [ref(found) for found in gc.get_referrers(*kinds) if isinstance(found, kinds)]


@pytest.fixture(autouse=True)
def every_block_is_accounted_for() -> Iterator[None]:
    """After every test each pool's counts, owners and free list agree."""
    yield
    for pool in _pools():
        _audit(pool)


def _audit(pool: ref[Any]) -> None:
    """A pool that fails gets a moment: a worker may be ending, and garbage may wait for collection."""
    for _ in range(30):
        try:
            if (alive := pool()) is not None:
                alive.check_integrity()
            return
        except AssertionError as error:
            failed = str(error)
        del alive
        gc.collect()
        time.sleep(0.1)
    pytest.fail(failed)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A second one only waits at models this small, for long where other work runs."""
    import torch  # only here: most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
