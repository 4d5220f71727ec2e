"""Fixtures shared by the whole suite."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

import pytest

pytest_plugins = ["tests.fixtures_kafka", "tests.fixtures_prometheus"]

_pools: WeakSet[Any] = WeakSet()


def _watch_pools() -> None:
    """Remember every pool that is made, once any test module has imported them (most never need torch)."""
    module = sys.modules.get("regions.pool")
    if module is None or hasattr(module.KVPool, "watched"):
        return
    original = module.KVPool.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _pools.add(self)

    module.KVPool.__init__ = init
    module.KVPool.watched = True


@pytest.fixture(autouse=True)
def every_block_is_accounted_for() -> Iterator[None]:
    """After every test each pool's counts, owners and free list agree."""
    _watch_pools()
    yield
    for pool in [ref(pool) for pool in _pools]:
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
    """A second one only waits at models this small, for long where other work runs beside."""
    import torch  # only here: most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
