"""Fixtures shared by the whole suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

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
    for pool in list(_pools):
        pool.check_integrity()
