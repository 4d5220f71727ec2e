"""How many examples a property gets."""

from collections.abc import Iterable

import pytest
from hypothesis import settings

_OWN = "_hypothesis_internal_use_settings"


def limit_examples(items: Iterable[pytest.Item], most: int) -> None:
    """Let no property have more than ``most`` examples, whatever it asks for; each run draws others."""
    for item in items:
        test = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)  # of a method
        if (own := getattr(test, _OWN, None)) is not None and own.max_examples > most:
            setattr(test, _OWN, settings(own, max_examples=most))
        machine = getattr(item, "cls", None)  # a state machine's TestCase
        if isinstance(own := getattr(machine, "settings", None), settings) and own.max_examples > most:
            machine.settings = settings(own, max_examples=most)
