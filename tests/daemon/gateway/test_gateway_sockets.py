"""Directories of sockets: gone with their daemon, whatever ended it."""

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.gateway.ipc_dir import PREFIX, SocketDirectory, sweep

HOLDER = """
import time
from daemon.gateway.ipc_dir import SocketDirectory
print(SocketDirectory().path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # Python's own cache of the variable
    return tmp_path


def test_it_is_ours_alone_and_gone_at_the_end(temporary: Path) -> None:
    made = SocketDirectory()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert [path.name for path in temporary.iterdir()] == [made.path.name]
    assert made.path.name.startswith(PREFIX)
    (made.path / "commands").touch()
    made.close()
    made.close()
    assert list(temporary.iterdir()) == []


def test_one_in_use_stays_and_one_of_a_killed_process_is_removed(temporary: Path) -> None:
    mine = SocketDirectory()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        assert sweep() == 0
        assert {mine.path, theirs} == set(temporary.iterdir())
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        again = SocketDirectory()  # sweeps
        assert {mine.path, again.path} == set(temporary.iterdir())
    mine.close()
    again.close()


def test_links_and_files_of_that_name_are_left_alone(temporary: Path) -> None:
    (temporary / "precious").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "precious")
    (temporary / f"{PREFIX}file").touch()
    assert sweep() == 0
    assert len(list(temporary.iterdir())) == 3
