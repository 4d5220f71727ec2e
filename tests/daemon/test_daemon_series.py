"""How many series a daemon exposes: what Prometheus has to keep for each of them."""

from pathlib import Path

import pytest

from daemon.config.load import load_config
from daemon.gateway.wiring import make_gateway

MAX_SERIES = 706
"""Of a daemon with three sessions."""
MAX_OF_A_SESSION = 60

FILE = """
[source]
kind = "kafka"

[source.kafka]
bootstrap = "127.0.0.1:1"
group = "foretick"

[sink.kafka]
bootstrap = "127.0.0.1:1"

[process]
mode = "inproc"
"""
SESSION = """
[[sessions]]
name = "session-{0}"
symbol = "V:S{0}"
"""


async def series(sessions: int, tmp_path: Path) -> int:
    """Lines of values in the exposition of a daemon with that many sessions, before it starts."""
    file = tmp_path / "foretick.toml"
    text = FILE if sessions else FILE.replace('kind = "kafka"', 'kind = "none"')
    file.write_text(text + "".join(map(SESSION.format, range(sessions))))
    config = load_config(file, environment={})
    gateway = make_gateway(config)
    try:
        lines = gateway.status.metrics().decode().splitlines()
        return sum(not line.startswith("#") for line in lines)
    finally:
        gateway.store.close()
        gateway.store.unlink()


@pytest.mark.parametrize("sessions", [0, 3, 4])
async def test_the_number_of_series_is_bounded(sessions: int, tmp_path: Path) -> None:
    assert await series(sessions, tmp_path) <= MAX_SERIES + max(0, sessions - 3) * MAX_OF_A_SESSION


async def test_a_session_adds_few_series(tmp_path: Path) -> None:
    assert await series(4, tmp_path) - await series(3, tmp_path) <= MAX_OF_A_SESSION
