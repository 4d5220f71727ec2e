"""The unit files, judged by systemd's own tools: one daemon, and the template for several of a group."""

import os
import subprocess
from pathlib import Path

import pytest

from daemon.config.load import load_config
from daemon.config.schema import HttpConfig
from feeds.durations import parse_duration
from tests.kit.programs import need

FOLDER = Path(__file__).parents[2] / "systemd"
UNIT, TEMPLATE = FOLDER / "foretick.service", FOLDER / "foretick@.service"
both = pytest.mark.parametrize("unit", [UNIT, TEMPLATE], ids=lambda unit: unit.name)
COMMAND = "/opt/foretick/bin/foretick"


def settings(section: str, unit: Path = UNIT) -> dict[str, list[str]]:
    """The section's keys with all their values, in order."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif current == section and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture(scope="module")
def analyze() -> str:
    return need("systemd-analyze")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def installed(folder: Path, text: str, name: str = UNIT.name) -> str:
    """A copy to verify: verify wants a program that is there, and the file's own name."""
    path = folder / name.replace("@", "@desk-1")
    path.write_text(text.replace(COMMAND, "/bin/true"))
    return str(path)


@both
def test_systemd_understands_every_line(analyze, tmp_path, unit):
    # It exits 0 even on keys it does not know: only its silence counts.
    assert run(analyze, "verify", installed(tmp_path, unit.read_text(), unit.name)).stderr == ""


@pytest.mark.parametrize(("name", "port"), [("http", HttpConfig().port), ("query", 7801)])
def test_sockets_are_those_of_the_defaults_and_start_the_daemon(analyze, tmp_path, name, port):
    unit = FOLDER / f"foretick-{name}.socket"
    found = settings("Socket", unit)
    assert found["FileDescriptorName"] == [name]
    assert found["ListenStream"] == [f"127.0.0.1:{port}"]
    assert found["Service"] == [UNIT.name]
    installed(tmp_path, UNIT.read_text())
    (tmp_path / unit.name).write_text(unit.read_text())
    assert run(analyze, "verify", str(tmp_path / unit.name)).stderr == ""


def test_the_silence_above_means_something(analyze, tmp_path):
    broken = UNIT.read_text().replace("ProtectClock=yes", "ProtectClocks=yes")
    assert "ProtectClocks" in run(analyze, "verify", installed(tmp_path, broken)).stderr


@both
def test_the_exposure_stays_low(analyze, tmp_path, unit):
    path = installed(tmp_path, unit.read_text(), unit.name)
    result = run(analyze, "security", "--offline=true", "--threshold=20", path)
    assert result.returncode == 0, result.stdout[-400:]


def test_it_is_supervised_through_notify_and_watchdog():
    service = settings("Service")
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert int(service["WatchdogSec"][0]) > 0
    assert service["ExecStart"] == [f"{COMMAND} run --config /etc/foretick/foretick.toml"]


def test_it_waits_longer_for_the_stop_than_the_daemon_drains():
    stop_timeout = parse_duration(settings("Service")["TimeoutStopSec"][0] + "s")
    assert stop_timeout >= 2 * load_config(None, {}).process.drain


def test_snapshots_in_the_runtime_directory_outlive_the_process():
    """Over a stop and a start, too, which `restart` would not."""
    service = settings("Service")
    assert service["RuntimeDirectory"] == ["foretick"]
    assert service["RuntimeDirectoryPreserve"] == ["yes"]


@both
def test_zeromq_may_do_what_it_ends_the_process_for_otherwise(unit: Path) -> None:
    """Its threads set the policy that they have, and a socket that binds asks for the interfaces."""
    service = settings("Service", unit)
    allowed, denied, again = service["SystemCallFilter"]
    assert (allowed, denied) == ("@system-service", "~@privileged @resources")
    assert "sched_setscheduler" in again.split()
    assert service["RestrictRealtime"] == ["yes"]
    assert "AF_NETLINK" in service["RestrictAddressFamilies"][0].split()


@both
def test_groups_that_the_unit_names_are_made_and_its_user_is_not(unit: Path) -> None:
    declared = [
        line.split() for line in (FOLDER / "sysusers.conf").read_text().splitlines() if line[0] != "#"
    ]
    assert {kind for kind, *_ in declared} == {"g"}
    assert [name for _, name, _ in declared] == settings("Service", unit)["SupplementaryGroups"][0].split()
    assert settings("Service", unit)["DynamicUser"] == ["yes"]


def test_a_bad_configuration_is_not_started_again():
    assert settings("Service")["RestartPreventExitStatus"] == ["2"]


def test_the_template_is_the_unit_but_for_what_makes_it_one_of_several():
    """What is hardened in one is in the other."""
    ours, of_one = ([line for line in unit.read_text().splitlines() if line] for unit in (TEMPLATE, UNIT))
    more = [line for line in ours if line not in of_one and not line.startswith("#")]
    keys = [line.partition("=")[0] for line in more]
    assert keys == ["Description", "Environment", "EnvironmentFile", "User"]
    assert "EnvironmentFile=-/etc/foretick/%i.environment" in more
    kept = [line for line in of_one if line not in ours and not line.startswith("#")]
    assert [line.partition("=")[0] for line in kept] == ["Description"]


def test_each_instance_is_a_member_with_transactions_of_its_own():
    written = settings("Service", TEMPLATE)["Environment"][0].replace("%i", "desk-1").split()
    variables = dict(each.split("=") for each in written)
    config = load_config(FOLDER.parent / "examples" / "kafka.toml", variables)
    assert config.source.kafka.instance == "desk-1"
    assert config.sink.kafka.transactional_id == "desk-1"
