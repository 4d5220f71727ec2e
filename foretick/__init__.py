"""Foretick in your own program: `Daemon` serves a configuration, `Engine` answers over texts that grow.

See `docs/embedding.md`. `Engine`, `Retention` and `load_model` import PyTorch, when you first use them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from daemon.api.client import AsyncQueryClient, QueryClient
from daemon.config.load import Config, ConfigError, load_config
from foretick.in_process import Daemon

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.model.loading import load_model
    from regions.tape import Retention

__all__ = [
    "AsyncQueryClient",
    "Config",
    "ConfigError",
    "Daemon",
    "Engine",
    "QueryClient",
    "Retention",
    "load_config",
    "load_model",
]

_WITH_TORCH = {"Engine": "engine.engine", "Retention": "regions.tape", "load_model": "engine.model.loading"}


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch. Raises AttributeError for other names."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)
