"""The wheel and the sdist: what they hold, and `foretick install` from an unpacked wheel."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.distributions import ROOT, build, copy
from tests.kit.archives import unpack

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = {
    "daemon/api/live/*": "daemon/api/live",
    "dashboards/*.json": "dashboards",
    "dashboards/*.toml": "dashboards",
    "dashboards/*.yml": "dashboards",
    "engine/model/foretick-tape/*": "engine/model/foretick-tape",
    "examples/*.conf": "daemon/install",
    "examples/*.toml": "daemon/install",
    "feeds/formats/*.toml": "feeds/formats",
    "feeds/formats/messages/*.toml": "feeds/formats/messages",
    "scheduler/profiles/*.json": "scheduler/profiles",
    "systemd/*": "daemon/install",
}
"""Where the wheel has the files of the repository that are no code."""


@dataclass(frozen=True)
class Built:
    """Files of both by name, those of the sdist without its own folder; ``wheel`` is where it is unpacked."""

    wheel: Path
    of_wheel: dict[str, bytes]
    of_sdist: dict[str, bytes]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both, built from a copy of the tracked files, without what earlier builds left in the checkout."""
    folder = tmp_path_factory.mktemp("built")
    build(copy(folder / "source"), folder, "wheel", "sdist")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    unpacked = folder / "wheel"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
        of_wheel = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as archive_of_all:
        files = [each for each in archive_of_all.getmembers() if not each.isdir()]
        assert all(each.isreg() for each in files), "a link in it leads nowhere"
    unpack(sdist, folder / "unpacked")
    of_sdist = {each.name: (folder / "unpacked" / each.name).read_bytes() for each in files}
    return Built(unpacked, of_wheel, {name.partition("/")[2]: data for name, data in of_sdist.items()})


def data() -> dict[str, bytes]:
    """Every file that is no code, by its name in the wheel."""
    return {
        f"{target}/{path.name}": path.read_bytes()
        for pattern, target in DATA.items()
        for path in ROOT.glob(pattern)
        if path.is_file()
    }


def test_the_wheel_has_units_examples_dashboards_formats_profiles_and_the_model(built: Built) -> None:
    assert {"daemon/install/foretick.service", "daemon/install/foretick@.service"} < data().keys()
    assert {"daemon/install/kafka.toml", "daemon/install/credentials.conf"} < data().keys()
    assert {name: built.of_wheel.get(name) for name in data()} == data()


def test_the_wheel_has_the_packages_and_nothing_else(built: Built) -> None:
    packages = {each.rstrip("*") for each in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    information = f"foretick-{PROJECT['project']['version']}.dist-info"
    assert {name.partition("/")[0] for name in built.of_wheel} == packages | {information}
    others = {name for name in built.of_wheel if not name.endswith(".py")} - data().keys()
    assert {name.partition("/")[0] for name in others} == {information}
    ours = {str(path.relative_to(ROOT)) for package in packages for path in (ROOT / package).rglob("*.py")}
    assert {name for name in built.of_wheel if name.endswith(".py")} == ours


def test_the_sdist_has_what_the_wheel_is_built_from_the_examples_and_the_lock(built: Built) -> None:
    metadata = re.compile(r"foretick-[\d.]+\.dist-info/")
    assert {name for name in built.of_wheel if not metadata.match(name)} <= built.of_sdist.keys()
    assert built.of_sdist["requirements.lock"] == (ROOT / "requirements.lock").read_bytes()
    assert built.of_sdist["examples/node/desk.mjs"] == (ROOT / "examples/node/desk.mjs").read_bytes()
    assert not any(name.startswith(("tests/", "docs/")) for name in built.of_sdist)


def test_a_wheel_of_the_sdist_has_the_same_files(built: Built, tmp_path: Path) -> None:
    source = built.wheel.parent / "unpacked" / f"foretick-{PROJECT['project']['version']}"
    build(source, tmp_path, "wheel")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        again = {name: archive.read(name) for name in archive.namelist()}
    assert again.keys() == built.of_wheel.keys()
    assert {name for name in again if again[name] != built.of_wheel[name]} <= {
        name for name in again if name.endswith(".dist-info/RECORD")
    }


def test_the_installed_wheel_installs_its_own_unit_and_configuration(built: Built, tmp_path: Path) -> None:
    program = "/opt/foretick/bin/foretick"
    code = "from daemon.cli.main import main; import daemon; print(daemon.__file__); main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "install", "--root", tmp_path, "--program", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(built.wheel)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{built.wheel}/daemon/")
    unit = (tmp_path / "etc/systemd/system/foretick.service").read_bytes()
    assert unit == (ROOT / "systemd/foretick.service").read_bytes()
    config = (tmp_path / "etc/foretick/foretick.toml").read_bytes()
    assert config == (ROOT / "examples/kafka.toml").read_bytes()
