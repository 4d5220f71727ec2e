"""What the engine process is started with. Apart from the engine, so that the front never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.config.schema import Config


@dataclass(frozen=True)
class EngineSpec:
    """What the engine process is told at its start."""

    config: Config
    ring: str
    wake_fd: int
    store: str
    labels: dict[str, list[str]]
    commands: str
    events: str
    versions: dict[str, int]
