"""What takes long to start begins with the first test, in the background, if any test is going to need it."""

from __future__ import annotations

import pytest


def is_needed(fixture: str, request: pytest.FixtureRequest) -> bool:
    """Whether a test of this run asks for the fixture."""
    return any(fixture in getattr(item, "fixturenames", ()) for item in request.session.items)
