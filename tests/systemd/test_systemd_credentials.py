"""The example of `LoadCredential=`: systemd reads it, and the daemon reads what systemd then shows it.

No test starts a unit: that takes systemd as process 1. What it does is done by hand: a copy of each file for
the daemon's user alone, in a directory that is named in the environment and is read-only.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from feeds.curve import make_keys
from tests.kit.kafka import make_certificates
from tests.kit.programs import need

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "credentials.conf"
SECRETS = "/etc/foretick/credentials"
DYNAMIC = 61184
"""The first user id that systemd gives a unit with `DynamicUser=`."""
READ = """
import json, os, sys
from daemon.config.load import load_config
from daemon.gateway.credentials import query_keys, tls_of
from feeds.connector import SettingError

config, user = load_config(sys.argv[1]), int(sys.argv[2])
if user != os.geteuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
try:
    login = [each.kafka.security.client_options() for each in (config.source, config.sink)]
    print(json.dumps({
        "login": [[each["sasl_plain_username"], each["sasl_plain_password"]] for each in login],
        "tls": tls_of(config.http).key_file,
        "pair": query_keys(config.query).public.decode(),
    }))
except SettingError as error:
    print(json.dumps({"refused": str(error)}))
"""


def settings(key: str) -> list[str]:
    lines = (line.partition("=") for line in EXAMPLE.read_text().splitlines())
    return [value for name, _, value in lines if name == key]


CREDENTIALS = dict(each.split(":") for each in settings("LoadCredential"))
ENVIRONMENT = dict(each.split("=", 1) for line in settings("Environment") for each in line.split())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that all users can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the files of the example, and the public parts of two: tls.pem, daemon.public."""
    path = tmp_path_factory.mktemp("credentials")
    make_certificates(path)
    (path / "broker.key").rename(path / "tls.key")
    (path / "broker.pem").rename(path / "tls.pem")
    make_keys(path / "daemon")
    (path / "kafka").write_text("desk\ntick tock\n")
    return path


def shown(secrets: Path, folder: Path, user: int, mode: int = 0o400) -> Path:
    """The credentials as systemd shows them to the daemon of this user."""
    target = folder / "foretick.service"
    target.mkdir()
    for name, path in CREDENTIALS.items():
        shutil.copyfile(secrets / Path(path).name, target / name)
        (target / name).chmod(mode)
        os.chown(target / name, user, user if user != os.geteuid() else -1)
    os.chown(target, user, user if user != os.geteuid() else -1)
    target.chmod(0o500)
    return target


def read(credentials: Path, certificate: Path, user: int, **variables: str) -> dict[str, object]:
    """What a process of ``user`` reads by the example, with another folder for `/etc/foretick`."""
    folder = credentials.parent
    config = folder / "foretick.toml"
    shutil.copyfile(ROOT / "examples" / "kafka.toml", config)
    shutil.copyfile(certificate, folder / "tls.pem")
    own = {
        key: value.replace("%d", str(credentials)).replace("/etc/foretick", str(folder))
        for key, value in ENVIRONMENT.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, config, str(user)],
        cwd=ROOT,
        env={**os.environ, **own, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture
def user() -> int:
    """A dynamic one, if this process may become it."""
    return DYNAMIC if os.geteuid() == 0 else os.geteuid()


@pytest.mark.parametrize("mode", [0o400, 0o440], ids=["owned", "by access list"])
def test_the_daemon_reads_login_key_and_pair_as_its_own_user(
    secrets: Path, folder: Path, user: int, mode: int
) -> None:
    """Files are the user's, or root's with an access list, which shows as the group's permission."""
    credentials = shown(secrets, folder, user, mode)
    found = read(credentials, secrets / "tls.pem", user, CREDENTIALS_DIRECTORY=str(credentials))
    assert found == {
        "login": [["desk", "tick tock"]] * 2,
        "tls": str(credentials / "tls.key"),
        "pair": (secrets / "daemon.public").read_text().strip(),
    }


def test_the_same_files_are_refused_where_systemd_does_not_guard_them(
    secrets: Path, folder: Path, user: int
) -> None:
    credentials = shown(secrets, folder, user, 0o440)
    found = read(credentials, secrets / "tls.pem", user, CREDENTIALS_DIRECTORY="")
    assert "mode 0440" in str(found["refused"])


def test_every_secret_is_in_the_directory_that_is_closed_and_is_used() -> None:
    assert all(path.startswith(f"{SECRETS}/") for path in CREDENTIALS.values())
    used = {value.removeprefix("%d/") for value in ENVIRONMENT.values() if value.startswith("%d/")}
    assert used == CREDENTIALS.keys()


@pytest.mark.parametrize("unit", ["foretick.service", "foretick@.service"])
def test_systemd_understands_the_example_as_a_drop_in(tmp_path: Path, unit: str) -> None:
    """It says nothing, and of the same file with a wrong key it does."""
    text = (ROOT / "systemd" / unit).read_text().replace("/opt/foretick/bin/foretick", "/bin/true")
    path = tmp_path / unit.replace("@", "@desk-1")
    path.write_text(text)
    drop_in = tmp_path / f"{path.name}.d" / "credentials.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(EXAMPLE.read_text())
    assert verified(path) == ""
    drop_in.write_text(EXAMPLE.read_text().replace("LoadCredential=kafka", "LoadCredentials=kafka"))
    assert "LoadCredentials" in verified(path)


def verified(unit: Path) -> str:
    command = [need("systemd-analyze"), "verify", str(unit)]
    environment = {**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return done.stderr
