"""A wheel and an sdist of the tree as git knows it, without what earlier builds left in the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = (
    "import sys, setuptools.build_meta as backend\n"
    "folder = sys.argv[1]\n"  # the backend replaces it
    "for build in sys.argv[2:]:\n"
    "    getattr(backend, f'build_{build}')(folder)\n"
)


def copy(target: Path) -> Path:
    """Copy the files that git knows, and those that it would: links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in (each for each in listed if (ROOT / each).exists()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build(source: Path, target: Path, *kinds: str) -> None:
    """Build a wheel, an sdist or both of a source tree."""
    command = [sys.executable, "-c", BUILD, target, *kinds]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree, in a folder."""
    build(copy(folder / "source"), folder, "wheel")
    (wheel,) = folder.glob("*.whl")
    return wheel
