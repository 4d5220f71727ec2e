"""A cache of the most recently used values, with counted hits and misses."""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """At most ``most`` values. ``count(outcome)`` hears of each look-up, ``hit`` or ``miss``.

    When it is full, the owner of the most values loses the least recently used one. So one that has fewer
    than another loses none to it, and cannot tell by its misses how much others put in. Any thread.
    """

    def __init__(self, most: int, count: Callable[[str], None] = lambda outcome: None) -> None:
        self._most, self._count, self._lock = most, count, threading.Lock()
        self._owned: defaultdict[str, LRUCache[K, V]] = defaultdict(lambda: LRUCache(most))

    def __len__(self) -> int:
        return sum(map(len, self._owned.values()))

    def get(self, key: K, owner: str = "", *, is_valid: Callable[[V], bool] = lambda value: True) -> V | None:
        """Return the owner's value, which is now its newest; None without a valid one."""
        with self._lock:
            value = self._owned[owner].get(key)
        if value is not None and not is_valid(value):
            value = None
        self._count("miss" if value is None else "hit")
        return value

    def put(self, key: K, value: V, owner: str = "") -> None:
        """Keep a value."""
        with self._lock:
            self._owned[owner][key] = value
            if len(self) > self._most:
                max(self._owned.values(), key=len).popitem()

    def made(self, key: K, make: Callable[[], V], owner: str = "") -> V:
        """Return the owner's value, made if it is not there. What ``make`` raises is not kept."""
        value = self.get(key, owner)
        if value is None:
            value = make()
            self.put(key, value, owner)
        return value
