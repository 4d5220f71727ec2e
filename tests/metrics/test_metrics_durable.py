"""Files that are replaced whole, and what writers leave that were killed."""

import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pytest

from support.durable_file import create, remove_abandoned, replacing, temporaries

_WRITE = """
import pathlib, sys, time
from support.durable_file import replacing
with replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(bytes(100))
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""

Start = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that has written half of a file."""
    with ExitStack() as running:

        def started(path: Path) -> subprocess.Popen[str]:
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _WRITE, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            running.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            return process

        yield started


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_a_killed_writer_left_is_removed_and_what_one_writes_stays(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "a.snapshot"
    killed = start(path)
    killed.kill()
    killed.wait()
    (left,) = temporaries(tmp_path, "*.snapshot")
    (tmp_path / ".b.snapshot.4711.tmp").touch()  # its name as of earlier versions
    (tmp_path / ".other.tmp").touch()
    writing = start(path)
    assert len(temporaries(tmp_path, "*.snapshot")) == 3
    remove_abandoned(tmp_path, "*.snapshot")
    (alive,) = temporaries(tmp_path, "*.snapshot")
    assert alive != left
    assert writing.communicate("")[0] == ""
    assert writing.returncode == 0
    assert names(tmp_path) == {"a.snapshot", ".other.tmp"}
    assert path.stat().st_size == 100


def test_two_writers_of_one_file_do_not_share_a_temporary(tmp_path: Path) -> None:
    """As of one process, or of two hosts with equal process ids. The last one to finish counts."""
    path = tmp_path / "f"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == {"f"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_taken_for_abandoned_before_it_is_locked_is_begun_again(tmp_path: Path) -> None:
    made: list[Path] = []

    def opened(temporary: Path) -> BinaryIO:
        made.append(temporary)
        file = create(temporary)
        if len(made) == 1:
            remove_abandoned(tmp_path, "f")
        return file

    with replacing(tmp_path / "f", opened=opened) as file:
        file.write(b"whole")
    assert len(set(made)) == 2
    assert (tmp_path / "f").read_bytes() == b"whole"
    assert names(tmp_path) == {"f"}


def test_without_locks_a_file_is_abandoned_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with replacing(tmp_path / "f") as file:
        remove_abandoned(tmp_path, "f")
        file.write(b"whole")
    old, new = tmp_path / ".f.1.tmp", tmp_path / ".f.2.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, time.time() - 3700))
    remove_abandoned(tmp_path, "f")
    assert names(tmp_path) == {"f", ".f.2.tmp"}


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"f"}
