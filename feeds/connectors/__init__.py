"""The connectors by name: each module of this package offers a `SOURCE`, a `SINK`, or both.

A new module here is a new feed; its settings appear in the configuration as `[source.NAME]` and
`[sink.NAME]`. So do those of plug-ins, which are loaded with this package. Importing it raises PluginError.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeGuard

from feeds.connector import SinkConnector, SourceConnector
from support import plugins

_MODULES = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
_SOURCES: Mapping[str, type[SourceConnector]] = {
    name: module.SOURCE for name, module in _MODULES.items() if hasattr(module, "SOURCE")
}
_SINKS: Mapping[str, type[SinkConnector]] = {
    name: module.SINK for name, module in _MODULES.items() if hasattr(module, "SINK")
}


def _is_source(found: object) -> TypeGuard[type[SourceConnector]]:
    return isinstance(found, type) and issubclass(found, SourceConnector)


def _is_sink(found: object) -> TypeGuard[type[SinkConnector]]:
    return isinstance(found, type) and issubclass(found, SinkConnector)


SOURCES: Mapping[str, type[SourceConnector]] = {
    **_SOURCES,
    **plugins.load(plugins.SOURCES, _SOURCES, "SourceConnector", _is_source),
}
SINKS: Mapping[str, type[SinkConnector]] = {
    **_SINKS,
    **plugins.load(plugins.SINKS, _SINKS, "SinkConnector", _is_sink),
}
