"""The Debian package, without libraries: what it holds, and dpkg installs and removes it in a bare root."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.distributions import ROOT, build_wheel
from tests.kit.programs import need

PROGRAM = "opt/foretick/bin/foretick"
NAMES = ("foretick.service", "foretick@.service", "foretick-http.socket", "foretick-query.socket")
UNITS = {f"usr/lib/systemd/system/{name}" for name in NAMES}
CONFIG = "etc/foretick/foretick.toml"


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this tree's wheel; what `foretick install` needs comes from the tests' environment."""
    need("dpkg")
    folder = tmp_path_factory.mktemp("debian")
    wheel = build_wheel(folder)
    libraries = sysconfig.get_path("purelib")
    run(ROOT / "deploy/debian/build", wheel, folder, PYTHON=sys.executable, PYTHONPATH=libraries)
    (found,) = folder.glob("foretick_*.deb")
    return found


def listed(package: Path) -> dict[str, str]:
    """Permissions and owner by path."""
    rows = (line.split(maxsplit=5) for line in run(need("dpkg-deb"), "--contents", package).splitlines())
    return {row[5].partition(" -> ")[0].strip("./"): f"{row[0]} {row[1]}" for row in rows}


def test_it_holds_an_environment_units_and_the_configuration(package: Path) -> None:
    found = listed(package)
    assert {PROGRAM, CONFIG, "usr/lib/sysusers.d/foretick.conf", *UNITS} < found.keys()
    assert found["etc/foretick/credentials"] == "drwx------ root/root"
    assert {each.rpartition(" ")[2] for each in found.values()} == {"root/root"}
    assert "etc/foretick/installed.json" not in found
    assert not any("__pycache__" in name for name in found)
    kept = run(need("dpkg-deb"), "--info", package, "conffiles").split()
    assert kept == ["/etc/foretick/credentials.conf", f"/{CONFIG}"]


def test_dpkg_installs_and_removes_it_in_a_bare_root(package: Path, tmp_path: Path) -> None:
    """Without its scripts' systemd, and without Python, on which it depends."""
    for name in ("updates", "info", "triggers"):
        (tmp_path / "var/lib/dpkg" / name).mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").touch()
    dpkg = [
        need("dpkg"),
        f"--root={tmp_path}",
        "--force-not-root",
        "--force-depends",
        "--force-script-chrootless",
    ]
    run(*dpkg, "--install", package)
    script = (tmp_path / PROGRAM).read_text()
    assert script.startswith("#!/opt/foretick/bin/python")
    unit = (tmp_path / "usr/lib/systemd/system/foretick.service").read_text()
    assert f"\nExecStart=/{PROGRAM} run --config /{CONFIG}\n" in unit
    scripts = [path for path in (tmp_path / "opt/foretick/bin").iterdir() if not path.is_symlink()]
    first = {line for path in scripts if (line := path.read_text().partition("\n")[0]).startswith("#!")}
    assert {line for line in first if not line.startswith("#!/opt/foretick/bin/python")} == set()
    (tmp_path / CONFIG).write_text("# mine\n")
    (bytecode := tmp_path / "opt/foretick/lib/__pycache__").mkdir()
    (bytecode / "written.pyc").touch()
    run(*dpkg, "--remove", "foretick")
    assert (tmp_path / CONFIG).read_text() == "# mine\n"
    assert not any((tmp_path / name).exists() for name in ("opt/foretick", *UNITS))
    run(*dpkg, "--purge", "foretick")
    assert not (tmp_path / "etc/foretick").exists()


def test_removal_disables_sockets_and_each_instance(package: Path, tmp_path: Path) -> None:
    """The scripts, with a systemctl that only writes down what it is asked: disable takes no patterns."""
    run(need("dpkg-deb"), "--control", package, tmp_path / "scripts")
    root, called = tmp_path / "root", tmp_path / "called"
    (root / "run/systemd/system").mkdir(parents=True)
    (root / "opt/foretick").mkdir(parents=True)
    (wants := root / "etc/systemd/system/multi-user.target.wants").mkdir(parents=True)
    for unit in ("foretick@desk-1.service", "foretick@desk-2.service", "other@a.service"):
        (wants / unit).symlink_to("/usr/lib/systemd/system/any@.service")
    (systemctl := tmp_path / "bin/systemctl").parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$*" >>{called}\nexit 1\n')
    systemctl.chmod(0o755)
    environment = {"DPKG_ROOT": str(root), "PATH": f"{systemctl.parent}:{os.environ['PATH']}"}
    for script in ("prerm", "postrm"):
        run(tmp_path / "scripts" / script, "remove", **environment)
    commands = called.read_text().splitlines()
    disabled = {unit for each in commands if each.startswith("disable ") for unit in each.split()[1:]}
    instances = {"foretick@desk-1.service", "foretick@desk-2.service"}
    assert disabled - {"--now"} == {NAMES[0], NAMES[2], NAMES[3]} | instances
    assert "stop foretick@*.service" in commands
    assert commands[-1] == "daemon-reload"
    called.unlink()
    for script in ("prerm", "postrm"):
        run(tmp_path / "scripts" / script, "upgrade", **environment)
    assert not called.exists()
