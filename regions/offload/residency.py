"""Decides which sessions stay in the pool: idle ones go to disk or the host tier, and return when used.

A session is offloaded when it was idle for a while. When the pool and its caches have no free block, the
least recently used one is offloaded, before anything is preempted. When stored KV cannot be read back the
tape is lost, and the scheduler prefills its window again (`Tape.adopt`).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from regions.kv_tensors import KVPool
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import StoredLost
from regions.offload.snapshot_format import DiskCopy, Identity, SnapshotError, SnapshotHeader, write_snapshot
from regions.tape import Tape

log = logging.getLogger(__name__)

TierName = Literal["host", "disk"]


@dataclass(frozen=True)
class Idleness:
    """When and where sessions are offloaded.

    ``limit_ns``: idle time after which a session is offloaded, to a file if possible; 0: only when blocks are
    short, to the host tier if possible. ``directory``: for the files; None: only the host tier. ``retry_ns``:
    pause after a file could not be written.
    """

    limit_ns: int = 0
    directory: Path | None = None
    retry_ns: int = 60 * 10**9


class Residency:
    """Keeps tapes in the pool, on the host or on disk: a `ResidencyManager`, and a `Reclaimer` of the pool.

    ``clock``: monotonic, ns. Create it after all caches of the pool, so that it is the last reclaimer.
    """

    reclaimable = 0
    """Always 0: only trying shows whether a session can be offloaded."""

    def __init__(
        self,
        pool: KVPool,
        idleness: Idleness,
        clock: Callable[[], int],
        *,
        host: HostTier | None = None,
    ) -> None:
        self.spills: Counter[TierName] = Counter()
        """Offloaded sessions, by tier."""
        self.restores: Counter[str] = Counter()
        """Sessions that returned: from `host`, from `disk`, or `rebuilt`."""
        self.failures = 0
        """Snapshots that could not be written or read back."""
        self._pool, self._idleness, self._clock = pool, idleness, clock
        self._host = host
        self._used: dict[Tape, int] = {}  # least recently used first
        self._identity: dict[Tape, Identity] = {}
        self._tier: dict[Tape, TierName] = {}  # of offloaded tapes
        self._no_disk_before = 0
        pool.add_reclaimer(self)

    def attach(self, tape: Tape, identity: Identity) -> None:
        """Start managing ``tape``."""
        self._identity[tape] = identity
        self._used[tape] = self._clock()
        tape.attach(self)

    def detach(self, tape: Tape) -> None:
        """Stop managing ``tape``; call it before the tape is released."""
        for kept in (self._identity, self._used, self._tier):
            kept.pop(tape, None)
        tape.attach(None)

    def use(self, tape: Tape, n: int) -> bool:
        """See `ResidencyManager.use`."""
        del self._used[tape]
        self._used[tape] = self._clock()
        if tape.resident:
            return True
        try:
            if not tape.swap_in(n):
                return False
        except StoredLost as error:
            log.warning("session %s must be prefilled again from its own tokens: %s", tape.name, error)
            self.failures += 1
            return False
        self._count(tape, self._tier[tape])
        return True

    def rebuilt(self, tape: Tape) -> None:
        """See `ResidencyManager.rebuilt`."""
        self._count(tape, "rebuilt")

    def prefix_changed(self, tape: Tape) -> None:
        """See `ResidencyManager.prefix_changed`."""
        self._identity[tape] = self._identity[tape].behind(tape.prefix)

    def spill_idle(self) -> bool:
        """Offload one session that reached the idle limit; False when there is none that can go."""
        if not self._idleness.limit_ns:
            return False
        since = self._clock() - self._idleness.limit_ns
        idle = [tape for tape, used in self._used.items() if used <= since]
        return any(self._spill(tape, self._to_disk, self._to_host) for tape in idle)

    def next_due(self) -> int | None:
        """Time until the next session in the pool reaches the idle limit, ns; None without one.

        Those that a full disk left in the pool are due when it is tried again.
        """
        limit, now, disk = self._idleness.limit_ns, self._clock(), self._no_disk_before
        due = (max(used + limit, disk) - now for tape, used in self._used.items() if tape.resident)
        return min((ns for ns in due if ns > 0), default=None) if limit else None

    def reclaim(self, blocks: int) -> None:
        """Offload sessions, the least recently used first, until ``blocks`` more blocks are free."""
        enough = self._pool.blocks.free_blocks + blocks
        for tape in list(self._used):
            if self._pool.free_blocks >= enough:
                break
            if not tape.has_readers:
                self._spill(tape, self._to_host, self._to_disk)
        if self._host is not None:
            self._host.wait_for(enough - self._pool.blocks.free_blocks)

    def _spill(self, tape: Tape, *ways: Callable[[Tape], TierName | None]) -> bool:
        """Offload a tape by the first of ``ways`` that works."""
        tier = next((tier for way in ways if (tier := way(tape))), None) if tape.movable else None
        if tier is None:
            return False
        self._tier[tape] = tier
        self.spills[tier] += 1
        return True

    def _to_host(self, tape: Tape) -> TierName | None:
        return "host" if self._host is not None and tape.swap_out(self._host) else None

    def _to_disk(self, tape: Tape) -> TierName | None:
        directory, identity = self._idleness.directory, self._identity[tape]
        if directory is None or self._clock() < self._no_disk_before:
            return None
        path = directory / f"{quote(tape.name, safe='')}.kv"
        header = SnapshotHeader(tape.name, identity, self._pool.block_size, tape.state, time.time_ns())
        ranges = tape.live_ranges
        try:
            seal = write_snapshot(path, header, self._pool, ranges)
        except SnapshotError as error:
            log.error("session %s stays in the pool: %s", tape.name, error)
            self.failures += 1
            self._no_disk_before = self._clock() + self._idleness.retry_ns
            return None
        tape.offload(DiskCopy(self._pool, path, identity, seal, ranges[0][0] % self._pool.block_size))
        return "disk"

    def _count(self, tape: Tape, how: str) -> None:
        self._tier.pop(tape, None)
        self.restores[how] += 1
