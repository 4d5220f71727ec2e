"""`foretick mcp` and `http.mcp` where they cannot work; what they do is tested with a whole daemon."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.cli.mcp import command
from daemon.config.checks import cross_check
from daemon.config.schema import HttpConfig
from tests.kit import inproc_config


def test_without_the_sdk_the_setting_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = inproc_config(http=HttpConfig(port=0, mcp=True))
    assert cross_check(config) == []
    monkeypatch.setitem(sys.modules, "mcp", None)  # as if it were not there
    (problem,) = cross_check(config)
    assert (problem.key, "foretick[mcp]" in problem.message) == ("http.mcp", True)
    assert cross_check(inproc_config()) == []


def test_unreadable_keys_are_refused(tmp_path: Path) -> None:
    unread = CliRunner().invoke(command, ["--secret-key", str(tmp_path / "none.secret")])
    assert (unread.exit_code, "none.secret" in unread.stderr) == (1, True)
