"""Shared by end-to-end tests: compiled kernels, the embedded model, and one running daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrics.cache_home import cache_home
from tests.e2e.process import Daemon, Replaying
from tests.e2e.samples import SAMPLES, write
from tests.kafka_server import free_ports

STOP_S = 30.0


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded model is built once and kernels are those of the other tests; processes inherit both."""
    cache = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR") or str(cache_home() / "numba"))
        patch.setenv("FORETICK_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="package")
def replaying(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replaying]:
    """In two processes, as `foretick run` starts it, for tests that only query it."""
    folder, sample, session = tmp_path_factory.mktemp("daemon"), SAMPLES[2], "eurusd"
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    config = f"""
[[sessions]]
name = "{session}"
symbol = "{sample.symbol}"
price_decimals = 5
[source]
kind = "replay"
[source.replay]
file = "{write(sample, folder)}"
format = "{sample.form}"
speed = 2.0
[query]
endpoint = "{endpoint}"
"""
    with Daemon(folder, config, {"SCHEDULER_TYPE": "KLPM"}) as daemon:
        asyncio.run(daemon.ready())
        yield Replaying(daemon, sample, session, endpoint)
        assert daemon.terminate(STOP_S) == 0
