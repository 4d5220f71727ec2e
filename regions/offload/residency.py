"""Decides which sessions stay in the pool: idle ones go to disk or the host tier, and return when used.

A session is offloaded when it was idle for a while. When the pool and its caches have no free block, the
least recently used one is offloaded. When stored KV cannot be read back the tape is lost, and the scheduler
prefills its window again (`Tape.adopt`).

Other threads copy, in steps of at most one chunk: `Residency.serve`. A session that leaves is in the pool,
and may be used, until its copy is whole; one that returns has its blocks from the start on. Between two
batches the stepping thread changes what is where (`Residency.poll`), which copies nothing.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regions.frozen import SharedBlocks
from regions.kv_tensors import KVPool
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import Aside, Steps, StoredBlocks, StoredLost, Way, inline
from regions.offload.snapshot_format import DiskCopy, Identity, SnapshotHeader
from regions.sliding import KVState, LiveRecord, TapeState
from regions.tape import Tape

log = logging.getLogger(__name__)

TierName = Literal["host", "disk"]


@dataclass(frozen=True)
class Idleness:
    """When and where sessions are offloaded.

    ``limit_ns``: idle time after which a session is offloaded, to a file if possible; 0: only when blocks are
    short, to the host tier if possible. ``directory``: for the files, made where it is first needed (raises
    OSError, on the thread that copies); None: only the host tier. ``under_pressure``: files also take
    sessions when blocks are short. ``retry_ns``: pause after a file could not be written.
    """

    limit_ns: int = 0
    directory: Callable[[], Path] | None = None
    under_pressure: bool = True
    retry_ns: int = 60 * 10**9


@dataclass(eq=False, slots=True)
class _Move:
    """A session's KV on its way, from or to ``blocks``, which are kept until the copy has ended."""

    way: Way
    tape: Tape
    tier: TierName
    stored: StoredBlocks
    blocks: SharedBlocks
    version: tuple[int, KVState]
    """Of the KV that is copied."""
    wanted: bool = False
    """Work waits for the blocks: it leaves though it is used meanwhile."""
    cancelled: bool = False
    ended: bool = False
    error: str = ""
    """Why the copy has failed."""

    def cancel(self) -> None:
        """Take no further step."""
        self.cancelled = True

    def want(self) -> None:
        """Work waits for the blocks."""
        self.wanted, self.tape.condition = True, "leaving"

    def steps(self, copying: Steps, ended: Callable[[], None]) -> Steps:
        """Copy; ``ended`` is called behind the last step, on the same thread."""
        try:
            for _ in copying:
                if self.cancelled:
                    break
                yield
        except StoredLost as error:
            self.error = str(error)
        except Exception as error:
            log.exception("%s: its KV was not copied", self.tape.name)
            self.error = f"{type(error).__name__}: {error}"
        finally:
            copying.close()
        self.ended = True
        ended()


class Residency:
    """Keeps tapes in the pool, on the host or on disk: a `ResidencyManager`, and a `Reclaimer` of the pool.

    ``clock``: monotonic, ns. Create it after all caches of the pool, so that it is the last reclaimer. It
    copies at once until `serve`.
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
        self.spills: Counter[str] = Counter()
        """Offloaded sessions, to `host` or `disk`, and those that were used first (`abandoned`)."""
        self.restores: Counter[str] = Counter()
        """Sessions that returned: from `host`, from `disk`, or `rebuilt`."""
        self.failures = 0
        """Snapshots that could not be written or read back."""
        self._pool, self._idleness, self._clock = pool, idleness, clock
        self._host = host
        self._used: dict[Tape, int] = {}  # least recently used first
        self._identity: dict[Tape, Identity] = {}
        self._tier: dict[Tape, TierName] = {}  # of offloaded tapes
        self._moves: dict[Tape, _Move] = {}
        self._no_disk_before = 0
        self._aside: Aside = inline
        self._notify: Callable[[Callable[[], None]], object] = lambda call: None
        self._wait: Callable[[float], object] = lambda seconds: None
        self._on_rebuilt: Callable[[str], None] = lambda session: None
        pool.add_reclaimer(self)

    def serve(
        self,
        aside: Aside,
        notify: Callable[[Callable[[], None]], object],
        wait: Callable[[float], object] = lambda seconds: None,
        on_rebuilt: Callable[[str], None] = lambda session: None,
    ) -> None:
        """Have ``aside`` copy from now on.

        ``notify``, on any thread, has the stepping thread call back between two batches. ``wait``: until
        the copies under way have ended, or for that many seconds. ``on_rebuilt`` hears of each session whose
        readers see another window at the same version.
        """
        self._aside, self._notify, self._wait, self._on_rebuilt = aside, notify, wait, on_rebuilt

    def finish(self, within_s: float) -> None:
        """Copy at once again, after the last batch. Sessions on their way out stay, the others arrive."""
        for move in self._moves.values():
            if move.way == "out":
                move.cancel()
        self._wait(within_s)
        self._aside = inline
        self.poll()

    def attach(self, tape: Tape, identity: Identity) -> None:
        """Start managing ``tape``."""
        self._identity[tape] = identity
        self._used[tape] = self._clock()
        tape.attach(self)

    def detach(self, tape: Tape) -> None:
        """Stop managing ``tape``; call it before the tape is released."""
        for kept in (self._identity, self._used, self._tier):
            kept.pop(tape, None)
        if tape in self._moves:
            self._moves[tape].cancel()
        tape.attach(None)

    def use(self, tape: Tape, n: int) -> bool:
        """See `ResidencyManager.use`."""
        self._touch(tape)
        move = self._moves.get(tape)
        if tape.resident:
            if move is not None and not move.wanted:
                move.cancel()  # it is idle no longer
            return True
        if move is None and not tape.lost:
            self._bring_back(tape, n)
        return tape.resident

    def rebuilt(self, tape: Tape) -> None:
        """See `ResidencyManager.rebuilt`."""
        if tape in self._moves:
            self._moves[tape].cancel()
        self._count(tape, "rebuilt")
        self._on_rebuilt(tape.name)

    def prefix_changed(self, tape: Tape) -> None:
        """See `ResidencyManager.prefix_changed`."""
        self._identity[tape] = self._identity[tape].behind(tape.prefix)

    def spill_idle(self) -> bool:
        """Begin to offload one session that reached the idle limit.

        False when there is none that can go, or one is on its way.
        """
        if not self._idleness.limit_ns or any(move.way == "out" for move in self._moves.values()):
            return False
        since = self._clock() - self._idleness.limit_ns
        idle = [tape for tape, used in self._used.items() if used <= since]
        return any(self._offload(tape, self._to_disk, self._to_host) for tape in idle)

    def next_due(self) -> int | None:
        """Time until the next session in the pool reaches the idle limit, ns; None without one.

        Those that a full disk left in the pool are due when it is tried again.
        """
        limit, now, disk = self._idleness.limit_ns, self._clock(), self._no_disk_before
        due = (max(used + limit, disk) - now for tape, used in self._used.items() if tape.resident)
        return min((ns for ns in due if ns > 0), default=None) if limit else None

    def reclaim(self, blocks: int) -> None:
        """Offload sessions, the least recently used first, until ``blocks`` more blocks will be free."""
        enough = self._pool.blocks.free_blocks + blocks
        ways = (self._to_host, self._to_disk) if self._idleness.under_pressure else (self._to_host,)
        for tape in list(self._used):
            if self._pool.free_blocks + self._pool.leaving >= enough:
                break
            if (move := self._moves.get(tape)) is not None and move.way == "out" and not move.cancelled:
                move.want()
                self._count_leaving()
            elif not tape.has_readers:
                self._offload(tape, *ways, wanted=True)
        if self._host is not None:
            self._host.wait_for(enough - self._pool.blocks.free_blocks)

    def poll(self) -> None:
        """Change what is where for the copies that have ended."""
        for move in [each for each in self._moves.values() if each.ended]:
            del self._moves[move.tape]
            (self._left if move.way == "out" else self._returned)(move)
            move.blocks.release()
        self._count_leaving()

    def _offload(self, tape: Tape, *ways: Callable[[Tape, bool], bool], wanted: bool = False) -> bool:
        """Begin to offload a tape by the first of ``ways`` that works."""
        return tape not in self._moves and tape.movable and any(way(tape, wanted) for way in ways)

    def _to_host(self, tape: Tape, wanted: bool) -> bool:
        host = self._host
        if host is None:
            return False
        if host.queues:
            if moved := tape.swap_out(host):
                self._stored(tape, "host")
            return moved
        blocks = tape.hold()
        taken = host.take(blocks.blocks)
        if taken is None:
            blocks.release()
            return False
        move = _Move("out", tape, "host", taken[0], blocks, (tape.version, tape.kv), wanted)
        return self._begin(move, taken[1])

    def _to_disk(self, tape: Tape, wanted: bool) -> bool:
        directory = self._idleness.directory
        if directory is None or self._clock() < self._no_disk_before:
            return False
        size, now = self._pool.block_size, time.time_ns()
        records = (LiveRecord([0] * tape.live_tokens, 0),)  # the tape keeps its own
        state = TapeState(tape.version, tape.evicted_tokens, 0, 0, records, (), tape.kv)
        header = SnapshotHeader(tape.name, self._identity[tape], size, state, now)
        copy = DiskCopy(self._pool, directory, header, tape.live_ranges, self._elsewhere)
        move = _Move("out", tape, "disk", copy, tape.hold(), (tape.version, tape.kv), wanted)
        return self._begin(move, copy.writing())

    def _left(self, move: _Move) -> None:
        """A copy to a tier has ended: the window goes, unless it has changed or is used."""
        tape = move.tape
        if tape.leaving:
            tape.condition = None
        if move.error:
            log.error("session %s stays in the pool: %s", tape.name, move.error)
            self.failures += 1
            if move.tier == "disk":
                self._no_disk_before = self._clock() + self._idleness.retry_ns
        elif not move.cancelled and tape.movable and (tape.version, tape.kv) == move.version:
            tape.offload(move.stored)
            self._stored(tape, move.tier)
            return
        else:
            self.spills["abandoned"] += 1
        move.stored.release()

    def _bring_back(self, tape: Tape, n: int) -> None:
        """Begin to read a tape back, where there is room for it and ``n`` more tokens."""
        stored, reserved = tape.stored, tape.reserve(n)
        if stored is None or reserved is None:
            return
        (blocks, target), tier = reserved, self._tier[tape]
        tape.condition = "arriving"
        queued = tier == "host" and self._host is not None and self._host.queues
        move = _Move("in", tape, tier, stored, blocks, (tape.version, tape.kv))
        self._begin(move, stored.loading(target), queued=queued)

    def _returned(self, move: _Move) -> None:
        """A copy from a tier has ended."""
        tape = move.tape
        if move.cancelled:
            return
        if move.error:
            log.warning("session %s must be prefilled again from its own tokens: %s", tape.name, move.error)
            self.failures += 1
            tape.lose()
            return
        tape.arrive(move.blocks)
        self._touch(tape)
        self._count(tape, move.tier)

    def _begin(self, move: _Move, steps: Steps, *, queued: bool = False) -> bool:
        """Begin to copy; False where that has failed at once."""
        self._moves[move.tape] = move
        if move.wanted:
            move.want()
        self._count_leaving()
        (inline if queued else self._aside)(move.way, move.steps(steps, self._ended))
        self.poll()
        return not move.error

    def _ended(self) -> None:
        """A copy has ended. On the thread that copies."""
        self._notify(self.poll)

    def _elsewhere(self, way: Way, steps: Steps) -> None:
        """As ``aside`` is when it is called."""
        self._aside(way, steps)

    def _touch(self, tape: Tape) -> None:
        del self._used[tape]
        self._used[tape] = self._clock()

    def _count_leaving(self) -> None:
        wanted = [move.blocks.blocks for move in self._moves.values() if move.wanted and not move.cancelled]
        self._pool.leaving = sum(run.blocks for runs in wanted for run in runs)

    def _stored(self, tape: Tape, tier: TierName) -> None:
        self._tier[tape] = tier
        self.spills[tier] += 1

    def _count(self, tape: Tape, how: str) -> None:
        self._tier.pop(tape, None)
        self.restores[how] += 1
