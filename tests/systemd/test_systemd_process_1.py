"""The service under a real systemd: installed from the wheel, started, reloaded, restarted, hung, stopped.

The commands are those that the pages show. Run by `make systemd`. The first run makes the machine's root and
compiles the kernels; later ones find both.
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from tests.deploy.distributions import ROOT, build_wheel
from tests.docs.shown_commands import block
from tests.systemd.container import CACHE, LIBRARIES, Container, container, libraries

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

UNIT = "foretick.service"
PROGRAM = "/opt/foretick/bin/foretick"
START_S = 900.0
"""Above the unit's own limit: kernels are compiled at the first start."""
CONFIG = """
standing = "paper_six"
[bars]
interval = "1s"
[source]
kind = "http"
[[sessions]]
name = "aaa"
symbol = "V:AAA"
[process]
spare_engine = false
"""
ADDED = '[[sessions]]\nname = "bbb"\nsymbol = "V:BBB"\n'
ASK = """
import json, ssl, sys, urllib.request
address, key, *body = sys.argv[1:]
context = ssl._create_unverified_context()  # it made the certificate itself
data = body[0].encode() if body else None
headers = {"content-type": "application/x-ndjson", "authorization": f"Bearer {key}"}
request = urllib.request.Request(address, data, headers)
with urllib.request.urlopen(request, timeout=120, context=context) as reply:
    sys.stdout.write(reply.read().decode())
"""
VISIT = """
import os, time, urllib.request
while not os.path.exists("/run/visited"):
    try:
        with urllib.request.urlopen("http://127.0.0.1:7800/healthz", timeout=300) as reply:
            print(reply.status, flush=True)
    except OSError as error:
        print(error, flush=True)
    time.sleep(0.1)
"""
INSTALL = f"""
set -e
python3 -m venv --without-pip /opt/foretick
PYTHONPATH={LIBRARIES} /opt/foretick/bin/python -m pip install --quiet --disable-pip-version-check \
    --no-deps --no-index --no-compile --ignore-installed /opt/wheel/*.whl
site=$(echo /opt/foretick/lib/python3.*/site-packages)
echo {LIBRARIES} >$site/libraries.pth
# numba looks at the time of a source before it takes what an earlier run has compiled
find $site -type f -exec touch --date=@0 {{}} +
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """One on which `foretick install` has run, from the wheel; systemd tells all it is told."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = folder / build_wheel(folder).name
    (shown := folder / "shown").mkdir()
    wheel.rename(shown / wheel.name)
    (kernels := CACHE / "kernels").mkdir(parents=True, exist_ok=True)
    binds = {shown: "/opt/wheel", libraries(): LIBRARIES, ROOT / "deploy": "/opt/deploy"}
    with container(binds, {kernels: "/var/cache/private/foretick"}) as made:
        made.run("sh", "-c", INSTALL, timeout_s=300)
        made.run("systemctl", "log-level", "debug")
        made.write("/etc/foretick/foretick.toml", CONFIG)
        # the first start compiles kernels, beside whatever else the machine does
        made.write(
            "/etc/systemd/system/foretick.service.d/slow.conf", "[Service]\nTimeoutStartSec=infinity\n"
        )
        sockets = "systemctl enable --now foretick-http.socket foretick-query.socket"
        *install, start = (
            line for line in block("docs/operations.md", "systemd-sysusers") if "pip" not in line
        )
        for line in (*install[1:], sockets, start):  # the first one makes the environment
            shell(made, line)
        yield made


def shell(machine: Container, line: str) -> str:
    """What a line of a page prints, run as root. The cache is the daemon's, where all is compiled."""
    settings = "PATH=/opt/foretick/bin:$PATH FORETICK_CACHE=/var/cache/private/foretick"
    return machine.run("sh", "-c", f"export {settings}; {line}", timeout_s=START_S)


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.2)


def ask(machine: Container, path: str, *body: str, key: str = "", scheme: str = "http") -> str:
    return machine.run("python3", "-c", ASK, f"{scheme}://127.0.0.1:7800{path}", key, *body, timeout_s=180)


def told(machine: Container, state: str) -> bool:
    """Whether systemd got this state from the daemon."""
    return any(state in line for line in messages(machine))


def messages(machine: Container) -> list[str]:
    return [line for line in machine.journal(UNIT).splitlines() if "Got notification message" in line]


def sessions(machine: Container) -> list[str]:
    return [each["name"] for each in json.loads(ask(machine, "/v1/sessions"))["sessions"]]


def test_the_installed_units_are_understood_and_little_exposed(machine: Container) -> None:
    for unit in (UNIT, "foretick-http.socket", "foretick-query.socket"):
        done = machine.try_("systemd-analyze", "verify", "--man=no", f"/etc/systemd/system/{unit}")
        assert (done.returncode, done.stderr) == (0, "")
    machine.run("systemd-analyze", "security", "--threshold=20", UNIT)


def test_it_is_ready_and_answers_what_is_pushed(machine: Container) -> None:
    assert machine.shown(UNIT, "ActiveState") == "active"
    assert machine.shown(UNIT, "StatusText") == "1 sessions"
    assert all(told(machine, state) for state in ("READY=1", "STATUS=starting: loading the model"))
    bars = "\n".join(
        json.dumps(
            {
                "type": "bar",
                "venue": "V",
                "symbol": "AAA",
                "ts_event": at,
                "ts_recv": at,
                "interval_ns": 10**9,
            }
            | dict.fromkeys(("open", "high", "low", "close"), f"{100 + n % 3}")
            | {"volume": "1"}
        )
        for n in range(8)
        for at in [1_700_000_000 * 10**9 + n * 10**9]
    )
    assert json.loads(ask(machine, "/v1/data?replay=true", bars))["accepted"] == 8
    until(lambda: bool(json.loads(ask(machine, "/v1/answers?session=aaa"))["answers"]))


def test_its_user_is_dynamic_and_owns_its_directories_only(machine: Container) -> None:
    pid = machine.shown(UNIT, "MainPID")
    user = machine.run("stat", "--format=%u", f"/proc/{pid}").strip()
    assert 61184 <= int(user) <= 65519
    assert machine.run("stat", "--format=%u", "/var/lib/private/foretick").strip() == user
    status = machine.run("cat", f"/proc/{pid}/status")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


def test_a_reload_is_told_and_takes_sessions_over(machine: Container) -> None:
    before = machine.shown(UNIT, "MainPID")
    machine.write("/etc/foretick/foretick.toml", CONFIG + ADDED)
    machine.run("systemctl", "reload", "foretick")
    until(lambda: sessions(machine) == ["aaa", "bbb"])
    until(lambda: machine.shown(UNIT, "StatusText") == "2 sessions")
    assert told(machine, "RELOADING=1")
    assert "Changed reload -> running" in machine.journal(UNIT)
    assert machine.shown(UNIT, "ActiveState") == "active"
    assert machine.shown(UNIT, "MainPID") == before


def test_a_restart_refuses_nobody(machine: Container) -> None:
    """The sockets of systemd hold the port while there is no daemon."""
    visitor = machine.start("python3", "-c", VISIT)
    before = machine.shown(UNIT, "MainPID")
    machine.run("systemctl", "restart", "foretick", timeout_s=START_S)
    assert machine.shown(UNIT, "MainPID") != before
    time.sleep(2)
    machine.write("/run/visited", "")
    seen = visitor.communicate(timeout=300)[0].split("\n")[:-1]
    assert len(seen) > 5
    assert set(seen) == {"200"}
    assert told(machine, "STOPPING=1")
    assert sessions(machine) == ["aaa", "bbb"]


def test_a_daemon_that_hangs_is_started_again_by_the_watchdog(machine: Container) -> None:
    before, restarts = machine.shown(UNIT, "MainPID"), int(machine.shown(UNIT, "NRestarts"))
    assert told(machine, "WATCHDOG=1")
    machine.run("sh", "-c", f"kill -STOP {before}")
    until(lambda: int(machine.shown(UNIT, "NRestarts")) == restarts + 1)
    until(lambda: machine.shown(UNIT, "ActiveState") == "active", START_S)
    assert "Watchdog timeout (limit 20s)!" in machine.journal(UNIT)
    assert machine.shown(UNIT, "MainPID") != before


def test_secrets_come_by_load_credential(machine: Container) -> None:
    """The drop-in of the package, less the brokers' login: an HTTPS key and the query socket's pair."""
    example = machine.run("cat", "/etc/foretick/credentials.conf")
    drop_in = "".join(line for line in example.splitlines(True) if "kafka" not in line.lower())
    machine.write("/etc/systemd/system/foretick.service.d/credentials.conf", drop_in)
    files = "-keyout /etc/foretick/credentials/tls.key -out /etc/foretick/tls.pem"
    kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 2"
    shell(machine, f"openssl req -x509 {kind} {files}")
    shell(machine, "cd /etc/foretick/credentials && foretick keys daemon")
    _, key, _, *table = machine.run(PROGRAM, "keys", "--api", "desk").splitlines()
    machine.write("/etc/foretick/tenants.toml", "\n".join(table))
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "foretick", timeout_s=START_S)
    assert "aaa" in ask(machine, "/v1/sessions", key=key.removeprefix("# "), scheme="https")
    shown = machine.run(
        "sh", "-c", f"stat --format='%a %n' /run/credentials/{UNIT} /run/credentials/{UNIT}/*"
    )
    assert [line.split()[0][-1] for line in shown.splitlines()] == ["0"] * 3, "others see nothing"
    machine.run("rm", "/etc/systemd/system/foretick.service.d/credentials.conf")
    machine.run("systemctl", "daemon-reload")


def test_a_configuration_that_cannot_be_used_is_not_started_again(machine: Container) -> None:
    """Exit status 2 is the end of it."""
    machine.write("/etc/foretick/foretick.toml", "[sessionz]\n")
    done = machine.try_("systemctl", "restart", "foretick", timeout_s=START_S)
    assert done.returncode != 0
    assert (machine.shown(UNIT, "ExecMainStatus"), machine.shown(UNIT, "NRestarts")) == ("2", "0")
    assert "sessionz" in machine.journal(UNIT)


def test_a_backup_is_restored(machine: Container) -> None:
    """All that is not in Kafka, on a machine that has lost it."""
    machine.write("/etc/foretick/foretick.toml", CONFIG)
    shell(machine, "systemctl restart foretick")
    shell(machine, "systemctl stop foretick foretick-http.socket foretick-query.socket")
    before = shell(machine, "cd /var/lib/private/foretick && find . -type f | sort")
    assert "./snapshots/" in before
    for line in block("docs/upgrades.md", "tar --create"):
        shell(machine, f"cd /run && {line}")
    lost = "/etc/foretick /var/lib/private/foretick /etc/systemd/system/foretick.service.d"
    shell(machine, f"rm -r {lost}")
    *restore, start = block("docs/upgrades.md", "tar --extract")
    for line in restore:
        shell(machine, f"cd /run && {line}")
    assert shell(machine, "cd /var/lib/private/foretick && find . -type f | sort") == before
    assert shell(machine, "stat --format=%a /etc/foretick/credentials").strip() == "700"
    shell(machine, start)
    assert machine.shown(UNIT, "ActiveState") == "active"
    assert "the progress of earlier sessions" not in machine.journal(UNIT)


def test_a_build_is_checked_and_takes_over(machine: Container) -> None:
    """The commands of an upgrade."""
    before = machine.shown(UNIT, "MainPID")
    for line in block("docs/upgrades.md", "systemctl restart foretick"):
        shell(machine, line)
    assert machine.shown(UNIT, "MainPID") != before


def test_it_stops_with_nothing_left_and_is_removed(machine: Container) -> None:
    machine.run("systemctl", "disable", "--now", "foretick-http.socket", "foretick-query.socket", "foretick")
    assert (machine.shown(UNIT, "Result"), machine.shown(UNIT, "ExecMainStatus")) == ("success", "0")
    machine.run(PROGRAM, "install", "--undo", timeout_s=120)
    assert machine.try_("test", "-e", f"/etc/systemd/system/{UNIT}").returncode == 1


PACKAGE = f"""
systemctl disable --now foretick foretick-http.socket foretick-query.socket
set -e
rm -rf /opt/foretick /etc/foretick /etc/systemd/system/foretick*
mkdir /run/package
PYTHONPATH={LIBRARIES} /opt/deploy/debian/build /opt/wheel/*.whl /run/package
dpkg --install /run/package/*.deb
site=$(echo /opt/foretick/lib/python3.*/site-packages)
echo {LIBRARIES} >$site/libraries.pth
find $site -type f -exec touch --date=@0 {{}} +
"""


def test_the_debian_package_is_installed_started_and_removed(machine: Container) -> None:
    """By dpkg with its scripts, in the bare system; it is without libraries, which are the tests'."""
    shell(machine, PACKAGE)
    assert machine.shown(UNIT, "FragmentPath").endswith(f"/lib/systemd/system/{UNIT}")
    assert machine.shown(UNIT, "ActiveState") == "inactive", "the package starts nothing"
    machine.write("/etc/foretick/foretick.toml", CONFIG)
    shell(machine, "systemctl enable --now foretick")
    assert sessions(machine) == ["aaa"]
    shell(machine, "dpkg --remove foretick")
    assert machine.shown(UNIT, "ActiveState") == "inactive"
    assert shell(machine, "cat /etc/foretick/foretick.toml") == CONFIG
    shell(machine, "dpkg --purge foretick")
    assert machine.try_("test", "-e", "/etc/foretick").returncode == 1
