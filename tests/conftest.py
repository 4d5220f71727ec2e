"""Fixtures shared by the whole suite."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

pytest_plugins = ["tests.fixtures_kafka", "tests.fixtures_prometheus", "tests.fixtures_triton"]

# For PyTorch, here and in every process that a test starts: models this small gain nothing by more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED = ("triton", "replaying", "real_kafka")
"""Fixtures that take long to start: their tests run on one worker, before the others."""
LONGEST = ("e2e", "engine", "bench", "feeds")
"""Packages of tests, the slowest first."""
MOST_WORKERS = 8
"""Each imports PyTorch."""


def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores: many tests wait."""
    return min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep on one worker what shares fixtures; run first what takes longest, so that no worker ends late."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_turn)


def _group(item: pytest.Item) -> str:
    shared = (name for name in SHARED if name in getattr(item, "fixturenames", ()))
    return next(shared, item.path.stem)


def _turn(item: pytest.Item) -> tuple[int, int]:
    """Shared fixtures in their order, then packages in theirs."""
    group, package = _group(item), item.path.relative_to(item.config.rootpath).parts[1]
    return (
        SHARED.index(group) if group in SHARED else len(SHARED),
        LONGEST.index(package) if package in LONGEST else len(LONGEST),
    )


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
