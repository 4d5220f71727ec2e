"""Fixtures that need a Prometheus binary."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.prometheus_server import PrometheusServer


@pytest.fixture
def start_prometheus() -> Iterator[Callable[[str], PrometheusServer]]:
    """Start a Prometheus that scrapes `host:port`; stopped at the end of the test."""
    program = shutil.which("prometheus")
    if program is None:
        message = "the prometheus program is missing: apt-get install prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with contextlib.ExitStack() as stack:
        yield lambda target: stack.enter_context(PrometheusServer(program, target))
