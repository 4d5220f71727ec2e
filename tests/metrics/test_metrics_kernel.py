"""Compiled kernels are cached by the content of every file that defines one, and start without a cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.numba_kernel import CODE, fingerprint

_ROOT = Path(__file__).parents[2]
_A_NUMBER_OF_KERNELS = "regions/kv_codes.py"
"""It defines none, but they have its constant."""


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


def test_each_tree_says_whether_its_own_kernels_are_compiled(tmp_path: Path) -> None:
    """numba keeps them by the paths of their sources: those of another clone are of no use."""
    said = []
    for clone in ("one", "one", "two"):
        (tmp_path / clone).mkdir(exist_ok=True)
        for name in {path.relative_to(_ROOT).parts[0] for path in CODE} | {"support"}:
            if not (tmp_path / clone / name).exists():
                (tmp_path / clone / name).symlink_to(_ROOT / name)
        said += _run("print(compiled_before()); bucket_of(100)", tmp_path / clone, str(tmp_path / "cache"))
    assert said == ["False", "True", "False"]


def test_every_file_with_kernels_is_part_of_it_and_no_text_of_metrics() -> None:
    defining = {
        path
        for path in _ROOT.glob("*/**/*.py")
        if path.relative_to(_ROOT).parts[0] != "tests"
        and not path.relative_to(_ROOT).parts[0].startswith(".")  # environments
        and any(word in path.read_text() for word in ("support.numba_kernel import", "import intrinsic"))
    }
    covering = {path if path in CODE else path.parent for path in defining}
    assert covering | {_ROOT / _A_NUMBER_OF_KERNELS} == set(CODE)
    assert _ROOT / "metrics" not in CODE, "a metric's description would compile every kernel again"


@pytest.mark.parametrize("directory", ["/dev/null/no", ""])
def test_a_start_needs_no_cache(directory: str, tmp_path: Path) -> None:
    """Where nothing can be written, kernels are compiled at every start."""
    assert _run("print(bucket_of(100))", _ROOT, directory or str(tmp_path)) == ["3"]


def _run(script: str, tree: Path, cache: str) -> list[str]:
    """What a script prints in a process that imports from ``tree``."""
    imports = "from metrics.histogram import bucket_of; from support.numba_kernel import compiled_before; "
    done = subprocess.run(
        [sys.executable, "-c", imports + script],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()
