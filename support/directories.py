"""Directories: the cache, for what can be rebuilt (compiled kernels, the embedded model), and the state."""

import os
import tempfile
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
