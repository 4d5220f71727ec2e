"""Programs that tests start and that a machine may lack. A test asks here, and nowhere else, for their paths.

Where one is missing, the test is skipped with what to install; with CI=true it fails instead. `guard` makes
sure that no test forgets to ask: whatever else this process starts must belong to Python's environment, to
the checkout or to a temporary directory.
"""

import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "chromium": "chromium",
    "curl": "curl",
    "debootstrap": "debootstrap",
    "dpkg": "dpkg",
    "dpkg-deb": "dpkg",
    "go": "golang-go",
    "java": "openjdk-17-jre-headless",
    "mvn": "maven",
    "node": "nodejs",
    "npm": "npm",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
    "systemd-nspawn": "systemd-container",
    "unshare": "util-linux",
}
"""Debian's package of each program that tests cannot do without."""
OTHER_NAMES = {"chromium": ("chromium-browser", "google-chrome")}
OPTIONAL = frozenset(
    (
        *("git", "mount", "umount"),  # the benchmarks' commit, and chaos's full disk
        *("uname", "file"),  # Python's `platform`
        "fc-list",  # matplotlib, which looks for fonts once
        *("ldconfig", "gcc", "cc", "ld", "objdump"),  # its `ctypes.util`
        *("nvidia-smi", "journalctl"),  # of `foretick doctor`
        "nvcc",  # torch.compile, which asks for its version
        *("ip", "ifconfig", "arp"),  # its `uuid`
    )
)
"""What the code under test, tests or Python's own library try to start, and do without."""
_STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"})
_found: set[str] = set()
"""Paths that `need` returned in this process."""


def need(program: str) -> str:
    """Return the path of a program of `PACKAGES`; without it, skip the test, or with CI=true fail."""
    package = PACKAGES[program]
    for name in (program, *OTHER_NAMES.get(program, ())):
        if path := shutil.which(name):
            _found.add(path)
            return path
    unavailable(f"the program {program} is missing: apt-get install {package}")


def unavailable(message: str) -> NoReturn:
    """Skip the test for want of something outside this repository, or with CI=true fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def guard() -> None:
    """From now on, fail the test that starts a program without asking, in this process.

    An audit hook: it sees `subprocess`, asyncio's processes and `os.system` alike, however imported.
    """
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _STARTS:
        return
    program = os.fsdecode(arguments[0])
    if event == "os.system" or not _may_start(program):
        pytest.fail(
            f"{program[:200]} was started without tests.kit.programs.need, which skips where it is missing"
        )


def _may_start(program: str) -> bool:
    if os.path.basename(program) in OPTIONAL or program in _found or program == sys.executable:
        return True
    return os.path.isabs(program) and any(Path(program).is_relative_to(each) for each in _own())


@cache
def _own() -> tuple[Path, ...]:
    """Where programs are that come with Python's environment, with the checkout or from a test."""
    checkout = Path(__file__).parents[2]
    return Path(sys.prefix), Path(sys.prefix).resolve(), checkout, Path(tempfile.gettempdir())
