"""The scrape configurations that the pages show, judged by Prometheus' own tool."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.kit.programs import need

ROOT = Path(__file__).parents[2]
SHOWN = [
    text
    for text in re.findall(r"```yaml\n(.*?)^```$", (ROOT / "docs/operations.md").read_text(), re.M | re.S)
    if "scrape_configs" in text
]


def checked(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The configuration with this checkout's rules; files of secrets are not looked for."""
    path = folder / "prometheus.yml"
    path.write_text(text.replace("/etc/prometheus/foretick/", f"{ROOT}/dashboards/"))
    options = ["--syntax-only"] if "credentials_file" in text else []
    command = [need("promtool"), "check", "config", *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_there_is_one_for_a_key_and_one_without() -> None:
    assert [("credentials_file" in text) for text in SHOWN] == [False, True]


@pytest.mark.parametrize("text", SHOWN)
def test_prometheus_takes_it(text: str, tmp_path: Path) -> None:
    done = checked(text, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_key_that_prometheus_does_not_know_is_refused(tmp_path: Path) -> None:
    assert checked(SHOWN[0].replace("static_configs", "static_config"), tmp_path).returncode != 0
