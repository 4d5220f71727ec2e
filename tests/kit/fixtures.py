"""Shared fixtures: programs (`real_kafka`, `secured_kafka`, `start_prometheus`, `triton`) and `threads`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.kafka import KafkaServer
from tests.kit.programs import need
from tests.kit.prometheus import PrometheusServer


@dataclass(frozen=True)
class RealKafka:
    """A broker under test. ``server`` is None when it is somebody else's, whom we do not stop and start."""

    bootstrap: str
    server: KafkaServer | None


@pytest.fixture(scope="session")
def real_kafka() -> Iterator[RealKafka]:
    if given := os.environ.get("FORETICK_KAFKA"):
        yield RealKafka(given, None)
        return
    with KafkaServer() as server:
        yield RealKafka(server.bootstrap, server)


@pytest.fixture(scope="module")
def secured_kafka() -> Iterator[KafkaServer]:
    """A broker of our own with a listener that demands TLS and a login."""
    with KafkaServer(secured=True) as server:
        yield server


@pytest.fixture
def start_prometheus() -> Iterator[Callable[..., PrometheusServer]]:
    """Start a Prometheus that scrapes `host:port`, with rules if any; stopped at the end of the test."""
    program = need("prometheus")
    with contextlib.ExitStack() as stack:
        yield lambda target, rules="": stack.enter_context(PrometheusServer(program, target, rules))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads; as before at the end of the test."""
    import torch  # only here: most tests need none

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


ROOT = Path(__file__).parents[2]


class BackgroundProcess:
    """A Python module of ours that runs by itself; its output goes to ``folder``."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._output, self._errors = folder / "output", folder / "errors"
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env={**inherited, "TRITON_CACHE_DIR": str(folder), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def output(self) -> str:
        """What it printed, when it has ended; fails unless it ended well."""
        status = self._process.wait()
        output = self._output.read_text()
        assert status == 0, output + self._errors.read_text()
        return output

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Triton:
    """Both run at the same time."""

    compiled: BackgroundProcess
    interpreted: BackgroundProcess


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    import torch  # only here: most tests need none

    package = "tests/engine/attention"
    with (
        closing(
            BackgroundProcess(
                tmp_path_factory.mktemp("compiled"), f"{package}/compiled_triton".replace("/", ".")
            )
        ) as compiled,
        closing(
            BackgroundProcess(
                tmp_path_factory.mktemp("interpreted"),
                *("pytest", "-q", "-p", "no:cacheprovider", f"{package}/interpreted_triton.py"),
                **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}),
            )
        ) as interpreted,
    ):
        yield Triton(compiled, interpreted)
