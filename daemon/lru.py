"""A cache of the most recently used values, with counted hits and misses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """At most ``most`` values. ``count(outcome)`` hears of each look-up, ``hit`` or ``miss``.

    When it is full, the owner of the most values loses the least recently used one. So one that has fewer
    than another loses none to it, and cannot tell by its misses how much others put in.
    """

    def __init__(self, most: int, count: Callable[[str], None] = lambda outcome: None) -> None:
        self._most, self._count = most, count
        self._owned: dict[str, OrderedDict[K, V]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._owned.values()))

    def get(self, key: K, owner: str = "") -> V | None:
        """The owner's value, which is now its newest; None without one."""
        values = self._owned.get(owner)
        value = None if values is None else values.get(key)
        self._count("miss" if value is None else "hit")
        if values is not None and value is not None:
            values.move_to_end(key)
        return value

    def put(self, key: K, value: V, owner: str = "") -> None:
        """Keep a value."""
        values = self._owned.setdefault(owner, OrderedDict())
        values[key] = value
        values.move_to_end(key)
        if len(self) > self._most:
            most = max(self._owned, key=lambda each: len(self._owned[each]))
            self._owned[most].popitem(last=False)
            if not self._owned[most]:
                del self._owned[most]

    def made(self, key: K, make: Callable[[], V], owner: str = "") -> V:
        """The owner's value, made if it is not there. What ``make`` raises is not kept."""
        value = self.get(key, owner)
        if value is None:
            value = make()
            self.put(key, value, owner)
        return value
