"""What a daemon needs of its machine and may run out: certificates, and room on the snapshots' disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from daemon.config import schema
from feeds.kafka_security import KafkaSecurity
from metrics.store import MetricStore
from support.certificates import validities_in
from support.directories import existing

FREE = "foretick_snapshot_disk_free_ratio"


class HostMetrics:
    """The gauges of one daemon. Certificates are those that it was started with: it reads no newer ones."""

    def __init__(self, config: schema.Config, store: MetricStore) -> None:
        self._store = store
        self._disk = config.recovery.path if config.recovery.interval else None
        expiries: dict[str, list[float]] = {}
        for use, path in _certificates(config):
            expiries.setdefault(use, []).append(expiry_of(path))
        for use, times in expiries.items():
            store.set("foretick_certificate_expiry_timestamp_seconds", min(times), use=use)

    def note(self) -> None:
        """Measure what changes."""
        free = 1.0 if self._disk is None else free_ratio(self._disk)
        self._store.set(FREE, free)


def expiry_of(certificate: str | Path) -> float:
    """When the first certificate of a PEM file expires, Unix time in seconds; 0 where it cannot be read."""
    try:
        return validities_in(Path(certificate))[0].end.timestamp()
    except (OSError, ValueError):
        return 0.0


def free_ratio(directory: Path) -> float:
    """Share of the directory's disk that this user may still fill, 0 to 1; of its parent before it exists.

    0 where the disk does not answer.
    """
    try:
        disk = shutil.disk_usage(existing(directory))
    except OSError:
        return 0.0
    return disk.free / disk.total if disk.total else 1.0


def _certificates(config: schema.Config) -> Iterator[tuple[str, str]]:
    """Certificates that this daemon shows, by what for."""
    if config.http.tls_certificate_file:
        yield "http", config.http.tls_certificate_file
    for tables in (config.source, *config.sources, config.sink):
        security = getattr(getattr(tables, "kafka", None), "security", None)
        if isinstance(security, KafkaSecurity) and security.certificate_file:
            yield "kafka", security.certificate_file
