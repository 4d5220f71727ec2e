"""Who may read a file with secrets, by its permission bits, its owner and the daemon's user."""

import stat
from pathlib import Path

import pytest

from feeds.connector import SettingError
from feeds.secret_files import is_exposed, read_secret, write_secret

ROOT, DAEMON, OTHER = 0, 10001, 10002


@pytest.mark.parametrize("owner", [ROOT, DAEMON, OTHER])
@pytest.mark.parametrize("user", [ROOT, DAEMON])
def test_only_the_group_of_a_file_of_roots_may_read_it_too(owner: int, user: int) -> None:
    for mode in range(0o1000):
        others = mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP)
        by_group = bool(mode & stat.S_IRGRP) and not (owner == ROOT and user != ROOT)
        assert is_exposed(mode, owner, user) == (bool(others) or by_group), oct(mode)


def test_a_secret_that_was_written_is_read_until_others_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_secret(file, "s3cret")
    assert read_secret("key_file", file) == "s3cret"
    file.chmod(0o640)
    with pytest.raises(SettingError, match="has mode 0640") as error:
        read_secret("key_file", file)
    assert "s3cret" not in str(error.value)
