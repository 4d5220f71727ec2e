"""The connectors by name: each module of this package offers a `SOURCE`, a `SINK`, or both.

A new module here is a new feed; its settings appear in the configuration as `[source.NAME]` and
`[sink.NAME]`.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from feeds.connector import SinkConnector, SourceConnector

_MODULES = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}

SOURCES: Mapping[str, type[SourceConnector]] = {
    name: module.SOURCE for name, module in _MODULES.items() if hasattr(module, "SOURCE")
}
SINKS: Mapping[str, type[SinkConnector]] = {
    name: module.SINK for name, module in _MODULES.items() if hasattr(module, "SINK")
}
