"""Messages to and from an engine process. A separate module, so that the gateway never imports torch."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from daemon.config.schema import Config
from daemon.progress import Progress
from metrics.store import Block


@dataclass(frozen=True)
class Spare:
    """The first message to every engine process: it loads what it can, then its `EngineSpec` follows."""

    config: Config
    cpus: frozenset[int] = frozenset()
    """CPUs that the process binds itself to; empty: none."""


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


class SpareEngine(NamedTuple):
    """Whether another engine is to wait. ``forks``: this process serves by a fork, and waits itself.

    ``why``: in one sentence.
    """

    wanted: bool
    forks: bool
    why: str


class Serving(msgspec.Struct, frozen=True, tag=True):
    """An engine serves: the process itself, or its fork ``pid``, beside which it waits as the spare.

    ``spare``: whether there is to be one; ``why``: in words.
    """

    pid: int
    spare: bool
    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The fork has ended with this status, as `os.waitstatus_to_exitcode` gives it."""

    status: int


Report = Serving | Ended
"""A line of JSON on the process's standard output."""
