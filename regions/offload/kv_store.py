"""KV outside the device pool: on the host or on disk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Literal, Protocol

from regions.allocator import Run

Way = Literal["out", "in"]
"""Of a transfer: out of the pool, or back in."""
Copied = Callable[[Way, int, int], None]
"""Called after each transfer with its way, its blocks and the time that it took, ns."""
Steps = Generator[None, None, None]
"""A copy, a chunk a step; it may be closed after any."""
Aside = Callable[[Way, Steps], None]
"""Take the steps of a copy, elsewhere or at once."""


class StoredLost(Exception):
    """Stored KV cannot be read back; the message says why."""


class NotResident(RuntimeError):
    """A session's KV is outside the pool, which has no room to bring it back."""


class StoredBlocks(ABC):
    """The KV of some blocks, oldest first, owned by the sequence it came from."""

    @abstractmethod
    def loading(self, blocks: Sequence[Run]) -> Steps:
        """Copy it to ``blocks`` of the device pool, in order, one for each stored block.

        The steps raise StoredLost. Passes after the last one see it.
        """

    def load(self, blocks: Sequence[Run]) -> None:
        """All of `loading` at once."""
        for _ in self.loading(blocks):
            pass

    def keep(self, blocks: int) -> None:  # noqa: B027  # what cannot be cut is kept whole
        """Keep only the oldest ``blocks`` blocks, where it can be cut."""

    def release(self) -> None:  # noqa: B027  # what is no copy stays
        """Free all of it."""


def inline(way: Way, steps: Steps) -> None:
    """An `Aside` on the calling thread."""
    for _ in steps:
        pass


class Store(Protocol):
    """Storage for KV outside the pool."""

    def put(self, blocks: Sequence[Run]) -> StoredBlocks | None:
        """Store ``blocks`` of the device pool; None, with nothing changed, when it is full."""
