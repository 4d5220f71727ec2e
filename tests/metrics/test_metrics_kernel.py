"""Compiled kernels are cached by the content of every file that defines one, and start without a cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.numba_kernel import CODE, fingerprint

_ROOT = Path(__file__).parents[2]


def test_the_cache_knows_every_file_that_defines_kernels(tmp_path: Path) -> None:
    """A change in any of them, or a new one, is another cache."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1")
    (package / "b.py").write_text("y = 1")
    before = fingerprint([package])
    (package / "b.py").write_text("y = 2")
    changed = fingerprint([package])
    (package / "c.py").write_text("")
    assert len({before, changed, fingerprint([package])}) == 3
    alone = fingerprint([package / "a.py"])
    (package / "b.py").write_text("y = 3")
    assert fingerprint([package / "a.py"]) == alone, "nor does another file's change count"
    (package / "a.py").write_text("x = 2")
    assert fingerprint([package / "a.py"]) != alone


def test_every_file_with_kernels_is_part_of_it_and_no_text_of_metrics() -> None:
    defining = {
        path
        for path in _ROOT.glob("*/**/*.py")
        if path.relative_to(_ROOT).parts[0] != "tests"
        and not path.relative_to(_ROOT).parts[0].startswith(".")  # environments
        and any(word in path.read_text() for word in ("support.numba_kernel import", "import intrinsic"))
    }
    covering = {path if path in CODE else path.parent for path in defining}
    assert covering == set(CODE)
    assert _ROOT / "metrics" not in CODE, "a metric's description would compile every kernel again"


@pytest.mark.parametrize("directory", ["/dev/null/no", ""])
def test_a_start_needs_no_cache(directory: str, tmp_path: Path) -> None:
    """Where nothing can be written, kernels are compiled at every start."""
    script = "from metrics.histogram import bucket_of; print(bucket_of(100))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_CACHE_DIR": directory or str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=_ROOT,
    )
    assert done.stdout.split() == ["3"], done.stderr
