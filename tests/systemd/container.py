"""A minimal Debian that systemd runs as process 1, in namespaces of its own (systemd-nspawn).

It sees a network, processes, a /tmp, a /run and a /dev/shm of its own, and files of the machine only where
they are bound. What it writes is in memory, and gone with it: debootstrap makes its root once, and it never
changes.
"""

import contextlib
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.deploy.distributions import ROOT
from tests.kit.programs import need, unavailable

CACHE = ROOT / ".cache" / "systemd"
"""Its root, and the kernels that the daemon has compiled in it."""
LIBRARIES = "/opt/libraries"
"""Where it sees the libraries of the tests' environment, which are too large to be installed again."""
_SUITE = "bookworm"
"""The Debian whose Python is the oldest one that is supported."""
_PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,openssl"
_POWER_OFF = 38
"""SIGRTMIN+4 (systemd(1))."""
_START_S, _STOP_S = 60.0, 60.0


_PRIVATE = ("--mount", "--propagation", "private")
"""Options of unshare: mounts of its own, which end with it."""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": ""}


def _run(*command: str | Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """What came of a command, which gets nothing of this process's environment."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_s, env=_ENVIRONMENT
    )


def base() -> Path:
    """The root, made where there is none. Skips the test, and says why, where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("systemd as process 1 takes root, for namespaces and mounts")
    tried = _run(need("unshare"), *_PRIVATE, "--pid", "--net", "--fork", "true")
    if tried.returncode:
        pytest.skip(f"systemd as process 1 takes namespaces, and here: {tried.stderr.strip()}")
    root = CACHE / f"root-{_SUITE}"
    if not root.exists():
        making = root.with_suffix(".part")
        shutil.rmtree(making, ignore_errors=True)  # of a run that was killed
        making.parent.mkdir(parents=True, exist_ok=True)
        make = ("--variant=minbase", f"--include={_PACKAGES}", _SUITE, making)
        made = _run(need("unshare"), *_PRIVATE, need("debootstrap"), *make, timeout_s=900)
        if made.returncode:
            unavailable(f"debootstrap makes no root: {made.stdout[-300:]}{made.stderr[-300:]}")
        making.rename(root)
    return root


class Container:
    """The machine that runs; ``run`` runs commands in it, as root."""

    def __init__(self, init: int) -> None:
        self._init = init
        kinds = ("--mount", "--uts", "--ipc", "--net", "--pid")
        self._enter = (need("nsenter"), f"--target={init}", *kinds)

    def try_(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """What came of a command."""
        return _run(*self._enter, *command, timeout_s=timeout_s)

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """What a command that succeeds prints."""
        done = self.try_(*command, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of its root; directories are made."""
        target = Path(f"/proc/{self._init}/root{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A command that goes on meanwhile."""
        return subprocess.Popen([*self._enter, *command], stdout=subprocess.PIPE, text=True, env=_ENVIRONMENT)

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def journal(self, unit: str) -> str:
        """All that systemd and the unit have said of it."""
        return self.run(
            "journalctl", "--no-pager", "--output=cat", f"UNIT={unit}", "+", f"_SYSTEMD_UNIT={unit}"
        )


@contextlib.contextmanager
def container(binds: Mapping[Path, str], kept: Mapping[Path, str]) -> Iterator[Container]:
    """Boot it. ``binds``: what it may read, and where it sees it; ``kept``: what it may write, and stays."""
    nspawn = [
        need("systemd-nspawn"),
        *("--quiet", "--register=no", "--keep-unit", "--boot", "--private-network", "--console=pipe"),
        *(f"--directory={base()}", "--volatile=overlay", "--machine=foretick-test", "--link-journal=no"),
        *(f"--bind-ro={source}:{target}" for source, target in binds.items()),
        *(f"--bind={source}:{target}" for source, target in kept.items()),
    ]
    # its own /run, where nspawn keeps its state
    script = 'mount -t tmpfs tmpfs /run && mkdir /run/systemd && exec "$@"'
    command = [need("unshare"), *_PRIVATE, "sh", "-c", script, "sh", *nspawn]
    log = CACHE / "boot.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        init = _init_of(process, log)
        machine = Container(init)
        machine.run(
            "sh", "-c", "until systemctl is-system-running | grep -qE 'running|degraded'; do sleep 0.1; done"
        )
        yield machine
        os.kill(init, _POWER_OFF)
        assert process.wait(_STOP_S) == 0, log.read_text()
    finally:
        if process.poll() is None:  # process 1 takes all others with it
            process.kill()
            process.wait()


def _init_of(process: subprocess.Popen[bytes], log: Path) -> int:
    """The machine's process 1, once it is systemd."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # one of the script's other commands, which has ended meanwhile
            for child in map(int, children.read_text().split()):
                if os.path.basename(os.readlink(f"/proc/{child}/exe")) == "systemd":
                    return child
        time.sleep(0.05)
    pytest.skip(f"systemd-nspawn starts no systemd here: {log.read_text()[-600:]}")


def libraries() -> Path:
    """Of the tests' environment."""
    return Path(sysconfig.get_path("purelib"))


if __name__ == "__main__":
    base()
