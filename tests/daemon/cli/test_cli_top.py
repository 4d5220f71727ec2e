"""`foretick top` where it cannot begin; its screens are tested by themselves."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.top import command


def refused(*arguments: str) -> Result:
    done = CliRunner().invoke(command, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        ("--http", "127.0.0.1:7800"),
        ("--http", "ftp://d"),
        ("--http", "http://"),
        ("--http", "http://d:99999"),
        ("--http", "http://[::1"),
        ("--http", "http://d\x00"),
        ("--interval", "0"),
    ],
)
def test_options_that_are_no_address_or_interval_are_refused(arguments: tuple[str, str]) -> None:
    assert arguments[0] in refused(*arguments).stderr


def test_the_key_is_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-text\n")
    key.chmod(0o644)
    exposed = refused("--key-file", str(key)).stderr
    assert ("chmod 600" in exposed, "secret-text" in exposed) == (True, False)
    assert "none.key" in refused("--key-file", str(tmp_path / "none.key")).stderr
    key.chmod(0o600)
    assert "terminal" in refused("--key-file", str(key)).stderr


def test_authorities_must_be_certificates(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    assert "--ca-file" in refused("--ca-file", str(file)).stderr
