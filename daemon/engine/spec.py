"""What the engine process is started with. A separate module, so that the gateway never imports torch."""

from dataclasses import dataclass

from daemon.config.schema import Config
from daemon.progress import Progress
from metrics.store import Block


@dataclass(frozen=True)
class Spare:
    """For a process that waits: it loads what it can, then its `EngineSpec` follows."""

    config: Config
    cpus: frozenset[int] = frozenset()
    """As in `EngineSpec`."""


@dataclass(frozen=True)
class EngineSpec:
    """The engine process's start-up arguments."""

    config: Config
    ring: str
    wake_fd: int
    store: list[Block]
    commands: str
    events: str
    progress: dict[str, Progress]
    symbols: dict[str, int]
    """Numbers of the symbols in the ring."""
    standby: bool = False
    """Another daemon answers, until `daemon.protocol.TakeOver`."""
    cpus: frozenset[int] = frozenset()
    """CPUs that the process binds itself to; empty: none."""
