"""KV that is kept outside the device pool: on the host, on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from regions.allocator import Run


class StoredLost(Exception):
    """Stored KV cannot be read back; the message says why."""


class NotResident(RuntimeError):
    """A session's KV is not in the pool, and the pool has no room to bring it back."""


class Stored(Protocol):
    """The KV of some blocks, oldest first, owned by the sequence it was taken from."""

    def load(self, blocks: Sequence[Run]) -> None:
        """Put it into ``blocks`` of the device pool, in order: as many as were stored.

        Passes begun from here on see it. Raises StoredLost.
        """

    def keep(self, blocks: int) -> None:
        """Only the oldest ``blocks`` blocks are still needed."""

    def release(self) -> None:
        """None of it is needed any more."""


class Store(Protocol):
    """Where the KV of blocks can be kept outside the pool."""

    def put(self, blocks: Sequence[Run]) -> Stored | None:
        """Store ``blocks`` of the device pool; None, and nothing changed, without room for them."""
