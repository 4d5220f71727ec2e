"""`[traces]`: an address that is none, and an HTTP client that is not there, are named in one sentence."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from daemon.config import checks
from daemon.config.errors import ConfigError
from daemon.config.load import load_config
from feeds.connector import SettingError
from feeds.secret_files import read_headers

FILE = '[[sessions]]\nname = "a"\nsymbol = "V:A"\n[traces]\n'


def problems(tmp_path: Path, text: str) -> list[tuple[str, str]]:
    file = tmp_path / "foretick.toml"
    file.write_text(FILE + text)
    try:
        load_config(file, environment={})
    except ConfigError as error:
        return [(each.key, each.message) for each in error.problems]
    return []


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "ftp://a/v1/traces", "http://", "http://a:b/v1", "http://[::1/v1"]
)
def test_what_is_no_address_is_refused(tmp_path: Path, endpoint: str) -> None:
    ((key, message),) = problems(tmp_path, f'endpoint = "{endpoint}"')
    assert (key, endpoint in message) == ("traces.endpoint", True)


def test_an_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = 'endpoint = "https://collector.example/v1/traces"\nresource = ["a=b"]'
    assert problems(tmp_path, good) == []
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "httpx2" else find_spec(name))
    assert problems(tmp_path, good) == [
        ("traces.endpoint", "httpx2 is not installed: pip install 'foretick[otel]'")
    ]
    assert problems(tmp_path, "") == []


@pytest.mark.parametrize(
    ("text", "key"), [("sample_ratio = 1.5", "traces.sample_ratio"), ('resource = ["=b"]', "traces.resource"),
                      ("kept = 0", "traces.kept")]
)  # fmt: skip
def test_values_out_of_range_are_refused(tmp_path: Path, text: str, key: str) -> None:
    ((found, _),) = problems(tmp_path, text)
    assert found.startswith(key)


def test_headers_come_from_a_file_of_the_owner(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("authorization: Bearer a:b\nx-org: 7\n")
    file.chmod(0o600)
    assert read_headers("k", file) == {"authorization": "Bearer a:b", "x-org": "7"}
    assert read_headers("k", "") == {}
    file.write_text("no header")
    with pytest.raises(SettingError, match="NAME: VALUE"):
        read_headers("k", file)
    file.chmod(0o644)
    with pytest.raises(SettingError, match="chmod 600"):
        read_headers("k", file)
