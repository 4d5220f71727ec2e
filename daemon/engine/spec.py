"""What the engine process is started with, and the error for a setting that only the engine finds wrong.

Kept apart so that the front needs none of the engine's libraries: it never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from daemon.config.schema import Config


class SettingError(Exception):
    """A setting that only shows to be wrong once the model is there; ``key`` names it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


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
