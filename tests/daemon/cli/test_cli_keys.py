"""`foretick keys`: what it prints fits the tenants file."""

import re
from pathlib import Path

from click.testing import CliRunner

from daemon.cli.keys import command
from daemon.config.tenants_file import read_tenants
from daemon.tenants import Tenants, hash_of


def test_an_api_key_is_printed_once_with_the_lines_that_admit_it(tmp_path: Path) -> None:
    printed = [CliRunner().invoke(command, ["--api", "desk"]).output for _ in range(2)]
    keys = [re.findall(r"ftk_\S+", text) for text in printed]
    assert [len(found) for found in keys] == [1, 1]
    assert keys[0] != keys[1]
    file = tmp_path / "tenants.toml"
    file.write_text(printed[0])
    tenants = Tenants(read_tenants(str(file)))
    found = tenants.holder(hash_of(keys[0][0]))
    assert found is not None
    assert found.name == "desk"
    assert tenants.holder(hash_of(keys[1][0])) is None
    assert list(tmp_path.iterdir()) == [file]
