"""What the engine process is started with. A separate module, so that the front never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.config.schema import Config


@dataclass(frozen=True)
class EngineSpec:
    """The engine process's start-up arguments."""

    config: Config
    ring: str
    wake_fd: int
    store: str
    labels: dict[str, list[str]]
    commands: str
    events: str
    versions: dict[str, int]
    cpus: frozenset[int] = frozenset()
    """CPUs that the process binds itself to; empty: none."""
