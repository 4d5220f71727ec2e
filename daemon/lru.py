"""A cache of the most recently used values, with counted hits and misses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """At most ``most`` values. ``count(outcome)`` hears of each look-up, ``hit`` or ``miss``."""

    def __init__(self, most: int, count: Callable[[str], None] = lambda outcome: None) -> None:
        self._most, self._count = most, count
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which is now the newest; None without one."""
        value = self._values.get(key)
        self._count("miss" if value is None else "hit")
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Keep a value; the least recently used one goes."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value, made if it is not there. What ``make`` raises is not kept."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value
