"""A plugin for `make unit`: tests without PyTorch, broker and browser, with few examples of each property.

A module that imports one of them, or a test that does, is skipped: the import fails before it begins.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from tests.kit.examples import limit_examples

HEAVY = ("torch", "transformers", "playwright")
SLOW_MARKERS = {"kafka", "prometheus", "slow", "long"}
MAX_EXAMPLES = 10
"""Of a property, at most."""


class NoHeavyImports:
    """A finder of modules that skips the module or test that imports one of `HEAVY`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in HEAVY:
            pytest.skip(f"needs {name}", allow_module_level=True)
        return None


def pytest_configure() -> None:
    sys.meta_path.insert(0, NoHeavyImports())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as slow or in need of a server, and ask properties less often."""
    slow = [item for item in items if SLOW_MARKERS & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
    limit_examples(items, MAX_EXAMPLES)
