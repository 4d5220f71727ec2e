"""Whether there is memory for a spare engine, and how it comes about."""

import os
from collections.abc import Callable

from daemon.config.schema import Config
from daemon.engine.build import Loaded, pool_bytes
from daemon.engine.memory_budget import SHARE, shown_bytes
from daemon.engine.spec import SpareEngine
from engine.free_memory import host_bytes, own_bytes
from feeds.connector import SettingError

KEY = "process.spare_engine"


def can_watch() -> bool:
    """Whether a process can wait for another's end by a descriptor: Linux 5.3, and no sandbox forbids it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def spare_engine(
    config: Config,
    loaded: tuple[Loaded, ...],
    *,
    own: Callable[[], int] = own_bytes,
    available: Callable[[], int] = host_bytes,
) -> SpareEngine:
    """The spare of an engine whose process has loaded all it can. ``loaded``: the models, on a CPU.

    A fork shares its memory until the engine writes to it; at worst, as a second process, it takes the same
    again. That must fit beside pool and host tier. With `true` there is a spare even where it does not.
    """
    setting, forks = config.process.spare_engine, bool(loaded) and can_watch()
    if setting is False:
        return SpareEngine(False, False, f"no spare engine: {KEY} = false")
    if config.process.mode != "two":
        return SpareEngine(False, False, "no spare engine: the engine has no process of its own")
    try:
        pool = pool_bytes(config, loaded) if loaded else 0
    except SettingError:  # the engine says it as it is built
        return SpareEngine(False, False, "no spare engine: there is no engine")
    need, room = own(), available()
    sentence = (
        f"it takes up to {shown_bytes(need)}, and the pool {shown_bytes(pool)}, of which "
        f"{shown_bytes(room)} are available"
    )
    if need + pool <= SHARE * room:
        return SpareEngine(True, forks, f"a spare engine: {sentence}")
    if setting is True:
        return SpareEngine(
            True, forks, f"a spare engine, since {KEY} = true, but it does not fit: {sentence}"
        )
    return SpareEngine(False, False, f"no spare engine, since it does not fit: {sentence} ({KEY})")
