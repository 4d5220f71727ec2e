"""Fixtures that need a Prometheus binary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.programs import need
from tests.prometheus_server import PrometheusServer


@pytest.fixture
def start_prometheus() -> Iterator[Callable[[str], PrometheusServer]]:
    """Start a Prometheus that scrapes `host:port`; stopped at the end of the test."""
    program = need("prometheus")
    with contextlib.ExitStack() as stack:
        yield lambda target: stack.enter_context(PrometheusServer(program, target))
