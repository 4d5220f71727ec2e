"""Directories: the cache, for what can be rebuilt (compiled kernels, the embedded model), and the state."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_home() -> Path:
    """`$FORETICK_CACHE`, or `foretick` in the user's cache directory (without a home: the temporary one)."""
    if configured := os.environ.get("FORETICK_CACHE"):
        return Path(configured)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "foretick"
    try:
        return Path.home() / ".cache" / "foretick"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"foretick-{os.getuid()}"


def state_home() -> Path:
    """The state directory that systemd gives the service, or else the cache directory."""
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(given) if given else cache_home()


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """The directory ``target``, which ``build`` fills if it is not there.

    Other processes never see a part of it: they wait, and what a killed one left is removed.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f"{target.name}.part")
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                build(building)
                building.rename(target)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
    return target


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists. Raises OSError where that cannot be seen."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
