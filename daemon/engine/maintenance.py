"""Background work of an idle worker, and the tiers that idle sessions are offloaded to."""

import errno
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from daemon.config.schema import Config, PoolConfig
from engine.engine import Engine
from feeds.connector import SettingError
from metrics.store import MetricStore
from regions.kv_tensors import KVPool
from regions.offload.directory import OwnDirectory
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import Copied
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity
from regions.tape import Tape, compact_one
from support.directories import cache_home

log = logging.getLogger(__name__)

AUDIT_NS = 60 * 10**9
"""Least time between two audits of the pool's block metadata."""
_NS = 1e-9


@dataclass(frozen=True)
class Tiers:
    """Where KV goes when the pool is full; both None: nowhere."""

    host: HostTier | None = None
    residency: Residency | None = None


class _SpillDirectory:
    """Holds the files of sessions, and is locked while this lives. It is made where it is first needed."""

    def __init__(self, settings: PoolConfig) -> None:
        self.base = Path(settings.spill_dir) if settings.spill_dir else cache_home() / "sessions"
        self._own: OwnDirectory | None = None

    def __call__(self) -> Path:
        """Its path. Raises OSError."""
        if self._own is None or not self._own.path.is_dir():
            self.base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own = OwnDirectory(self.base)
        return self._own.path

    def check(self) -> None:
        """Make it. Raises SettingError where that cannot be, except on a full disk: there is room later."""
        try:
            self()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise SettingError("pool.spill_dir", f"cannot make {self.base}: {error.strerror}") from error
            log.error("sessions stay in the pool: %s is full", self.base)


def tiers_of(
    config: Config,
    engine: Engine,
    host_blocks: int,
    copied: Copied = lambda way, blocks, ns: None,
    clock: Callable[[], int] = time.monotonic_ns,
    make_host: Callable[..., HostTier] = HostTier,
) -> Tiers:
    """The tiers of a configuration. Raises SettingError naming the key at fault.

    ``host_blocks``: of the host tier. ``copied``: see `HostTier`. ``clock``: ns.
    """
    settings = config.pool
    spills = bool(settings.idle_spill) or settings.pressure_spill
    if not host_blocks and not spills:
        return Tiers()
    host = None
    try:
        host = make_host(engine.pool, host_blocks, copied=copied) if host_blocks else None
    except (MemoryError, RuntimeError) as error:
        if settings.host_blocks != "auto":
            raise SettingError("pool.host_blocks", f"no memory for the host tier: {error}") from error
        log.warning("there is no host tier, for want of memory: %s", error)
    directory = _SpillDirectory(settings) if spills else None
    if directory is not None and (settings.idle_spill or settings.spill_dir):
        directory.check()
    idleness = Idleness(settings.idle_spill, directory, settings.pressure_spill)
    return Tiers(host, Residency(engine.pool, idleness, clock, host=host))


def identity_of(engine: Engine, frozen: Sequence[int]) -> Identity:
    """Identity of the model and settings that the KV behind ``frozen`` depends on."""
    model = engine.model
    return Identity.of(
        engine.pool, model=f"{model.name}@{model.revision}", tokenizer=_digest(model.tokenizer), frozen=frozen
    )


def _digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return blake2b(text.encode(), digest_size=16).hexdigest()


class Maintenance:
    """The worker's idle hook: each call does one piece of work and says when it wants the next call.

    A call gives back retired memory, notes finished copies, then begins to offload one idle session or
    compacts one fragmented window. If there is neither, it audits the pool's block metadata. ``clock``: ns.
    """

    def __init__(
        self,
        pool: KVPool,
        tapes: Iterable[Tape],
        tiers: Tiers,
        store: MetricStore,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._pool, self._tapes, self._tiers = pool, tapes, tiers
        self._store, self._clock = store, clock
        self._next_audit = clock()

    def __call__(self) -> float | None:
        """Do one piece; returns seconds until the next is due, None: not before new work arrives."""
        self._pool.trim()
        host, residency = self._tiers.host, self._tiers.residency
        if host is not None:
            host.poll()
        if residency is not None:
            residency.poll()
        if (residency is not None and residency.spill_idle()) or compact_one(list(self._tapes)):
            return 0.0
        if self._clock() >= self._next_audit:
            self._audit()
        due = residency.next_due() if residency is not None else None
        return None if due is None else due * _NS

    def _audit(self) -> None:
        self._next_audit = self._clock() + AUDIT_NS
        pools = [self._pool] if self._tiers.host is None else [self._pool, self._tiers.host.pool]
        for pool in pools:
            try:
                pool.check_integrity()
            except AssertionError as error:
                log.error("the KV pool's block metadata is inconsistent (a defect, report it): %s", error)
                self._store.inc("foretick_integrity_failures_total")
