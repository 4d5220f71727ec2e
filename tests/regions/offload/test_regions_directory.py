"""Directories below one that several processes share."""

import subprocess
import sys
from pathlib import Path

from regions.offload.directory import OwnDirectory

HOLD = """
import sys
from pathlib import Path
from regions.offload.directory import OwnDirectory

own = OwnDirectory(Path(sys.argv[1]))
print(own.path, flush=True)
sys.stdin.read()
"""


def hold(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a directory of its own, and that directory."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def test_processes_have_their_own_and_one_that_was_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    holder, theirs = hold(tmp_path)
    (theirs / "a.kv").touch()
    own = OwnDirectory(tmp_path)
    assert own.path != theirs
    assert own.path.stat().st_mode & 0o777 == 0o700
    assert (theirs / "a.kv").exists(), "it lives"
    holder.kill()
    holder.communicate()
    newer = OwnDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"other", own.path.name, newer.path.name}


def test_it_is_locked_as_long_as_it_is_referred_to(tmp_path: Path) -> None:
    own = OwnDirectory(tmp_path)
    first = own.path
    del own
    second = OwnDirectory(tmp_path).path
    assert first != second
    assert not first.exists()
