"""`foretick doctor` on the machine, its disks and the settings, by facts that are made up."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from daemon.config.load import load_config
from daemon.config.schema import Config, HttpConfig, ModelConfig, RecoveryConfig
from daemon.doctor.diagnosis import Diagnosis, Verdict
from daemon.doctor.machine import Machine, judge_machine, read_machine
from daemon.doctor.service_log import judge_log, read_log
from daemon.doctor.smells import SMELLS, judge_settings
from daemon.doctor.storage import MIN_FREE, Directory, judge_directory, read_directories

GPU = "NVIDIA H100 80GB HBM3, 570.86, 81559 MiB, 612 MiB, 41"
WELL = Machine({"foretick": "0.1.0"}, 8, 1.0, 64 << 30, 8 << 30, 65536, (GPU,), True, 0.002)


def verdicts(found: Sequence[Diagnosis]) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in found}


def judged(machine: Machine, config: Config | None = None, running: bool = False) -> dict[str, Verdict]:
    found = list(judge_machine(machine, config or Config(), running))
    assert all(each.step for each in found if each.verdict in ("warning", "problem"))
    return verdicts(found)


def test_a_machine_that_is_well_has_nothing_to_do() -> None:
    assert set(judged(WELL).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changed", "check", "verdict"),
    [
        ({"load": 16.0}, "machine.cpus", "warning"),
        ({"available": 1 << 20}, "machine.memory", "warning"),
        ({"shared": None}, "machine.shm", "problem"),
        ({"shared": 1 << 20}, "machine.shm", "problem"),
        ({"shared": 30 << 20}, "machine.shm", "warning"),
        ({"max_files": 1024}, "machine.files", "warning"),
        ({"max_files": -1}, "machine.files", "ok"),
        ({"cuda": False}, "machine.gpu", "warning"),
        ({"gpus": None, "cuda": False}, "machine.gpu", "ok"),
        ({"clock_error_s": None}, "machine.clock", "skipped"),
        ({"clock_error_s": float("inf")}, "machine.clock", "warning"),
        ({"clock_error_s": 0.5}, "machine.clock", "warning"),
    ],
)
def test_each_fact_has_its_verdict(changed: dict[str, Any], check: str, verdict: Verdict) -> None:
    found = judged(replace(WELL, **changed))
    assert found.pop(check) == verdict
    assert set(found.values()) == {"ok"}


def test_a_gpu_that_is_asked_for_must_be_there() -> None:
    config = Config(model=ModelConfig(device="cuda"))
    for facts in ({"gpus": None}, {"gpus": ()}, {"cuda": False}):
        assert judged(replace(WELL, **facts), config)["machine.gpu"] == "problem"  # type: ignore[arg-type]  # a Machine's
    assert judged(replace(WELL, cuda=False), Config(model=ModelConfig(device="cpu")))["machine.gpu"] == "ok"


def test_a_running_daemon_has_its_ring_already() -> None:
    little = replace(WELL, shared=44 << 20)
    assert judged(little)["machine.shm"] == "warning"
    assert judged(little, running=True)["machine.shm"] == "ok"


def test_the_machine_is_read_without_a_gpu_or_with_one() -> None:
    def missing(command: Sequence[str]) -> str:
        raise FileNotFoundError(command[0])

    found = read_machine(missing)
    assert found.gpus is None
    assert found.cpus >= 1
    assert found.available > 0
    assert found.versions["foretick"]
    assert read_machine(lambda command: f"{GPU}\n{GPU}\n").gpus == (GPU, GPU)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "ok"),
        ({"writable": False}, "warning"),
        ({"free": MIN_FREE - 1}, "problem"),
        ({"free": MIN_FREE - 1, "share": 0.05}, "problem"),
        ({"free": MIN_FREE - 1, "share": 0.5}, "ok"),
        ({"limit": 200 << 30}, "warning"),
        ({"limit": 50 << 30}, "ok"),
    ],
)
def test_a_directory_needs_room_and_this_user(changed: dict[str, Any], verdict: Verdict) -> None:
    found = judge_directory(replace(Directory("cache", "/cache", True, 100 << 30), **changed))
    assert found.verdict == verdict
    assert bool(found.step) == (verdict != "ok")


def test_directories_are_those_that_are_used(tmp_path: Path) -> None:
    snapshots = tmp_path / "not" / "there"
    config = Config(recovery=RecoveryConfig(directory=str(snapshots), max_bytes=1000))
    assert {d.check: d.limit for d in read_directories(config)} == {"cache": 0, "recovery.directory": 1000}
    snapshots.mkdir(parents=True)
    (snapshots / "a").write_bytes(b"x" * 300)
    spilling = structs.replace(config, pool=structs.replace(config.pool, idle_spill=1))
    found = {d.check: d for d in read_directories(spilling)}
    assert found["recovery.directory"].limit == 700
    assert found["pool.spill_dir"].writable


def test_a_directory_behind_a_closed_one_is_skipped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user meets the state directory of a service, which only root may enter."""
    closed, look = tmp_path / "private", Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    config = Config(recovery=RecoveryConfig(directory=str(closed / "snapshots")))
    (found,) = (each for each in read_directories(config) if each.check == "recovery.directory")
    diagnosis = judge_directory(found)
    assert diagnosis.verdict == "skipped"
    assert diagnosis.seen == f"{closed}/snapshots cannot be seen: Permission denied"
    assert "user" in diagnosis.step


def test_a_snapshot_that_is_rotated_meanwhile_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when the directory is listed, and at the first look, not at the next one."""
    (tmp_path / "kept").write_bytes(b"x" * 300)
    (tmp_path / "rotated").write_bytes(b"x" * 200)
    look = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        result = look(path, **options)
        if path.name == "rotated":
            path.unlink()
        return result

    monkeypatch.setattr(Path, "stat", stat)
    config = Config(recovery=RecoveryConfig(directory=str(tmp_path), max_bytes=1000))
    (found,) = (each for each in read_directories(config) if each.check == "recovery.directory")
    assert (found.limit, found.unseen) == (500, "")
    (tmp_path / "dangling").symlink_to("nothing")
    (again,) = (each for each in read_directories(config) if each.check == "recovery.directory")
    assert (again.limit, again.unseen) == (700, "")


SMELLY = """
standing = "none"
[model]
path = "untrained"
[process]
mode = "inproc"
drain = "1m"
[recovery]
interval = "0s"
[scheduler]
stream_share = 0
[log]
level = "debug"
"""


def test_each_unusual_setting_is_found_with_its_step(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(SMELLY)
    found = list(judge_settings(load_config(tmp_path / "f.toml", {})))
    assert [each.check for each in found] == [key for key, *_ in SMELLS]
    assert {each.verdict for each in found} == {"warning"}


def test_passwords_and_brokers_in_the_clear_are_named(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(
        '[source.websocket]\nurl = "wss://desk:pass@venue/ws"\n[source]\nkind = "websocket"\n'
        '[sink.kafka]\nbootstrap = "127.0.0.1:9092, broker:9092"\n'
        '[[sessions]]\nname = "a"\nsymbol = "V:A"\n'
    )
    found = verdicts(list(judge_settings(load_config(tmp_path / "f.toml", {}))))
    assert found == {"source.websocket.url": "warning", "sink.kafka.security": "warning"}


def test_an_exposed_port_is_named_and_a_usual_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(
        '[source.zeromq]\nendpoint = "tcp://127.0.0.1:1"\n[source]\nkind = "zeromq"\n'
        '[sink.zeromq]\nendpoint = "tcp://127.0.0.1:2"\n[[sessions]]\nname = "a"\nsymbol = "V:A"\n'
    )
    config = load_config(tmp_path / "f.toml", {})
    assert verdicts(list(judge_settings(config))) == {"settings": "ok"}
    exposed = structs.replace(config, http=HttpConfig(host="0.0.0.0"))
    assert verdicts(list(judge_settings(exposed))) == {"http.host": "warning"}


def test_the_log_is_judged_by_its_levels() -> None:
    lines = [
        "2026-03-02T10:00:00 host foretick: 2026-03-02 10:00:00,1 gateway INFO    daemon: ready",
        "2026-03-02T10:00:01 host foretick: 2026-03-02 10:00:01,1 gateway WARNING daemon: the last one",
    ]
    assert judge_log(lines[:1]).verdict == "ok"
    found = judge_log([*lines, '{"level": "info", "message": "ERRORS"}'])
    assert (found.verdict, found.seen[:8]) == ("warning", "1 of the")
    assert "the last one" in found.seen
    assert judge_log(['{"level": "error", "message": "m"}']).verdict == "warning"
    assert judge_log(None).verdict == "skipped"


def test_a_unit_without_a_journal_has_no_log() -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        commands.append(command)
        if "lost" in command:
            raise subprocess.CalledProcessError(1, "journalctl")
        return "one\ntwo\n" if "desk" in command else ""

    assert [read_log(unit, run) for unit in ("desk", "other", "lost")] == [("one", "two"), None, None]
    assert all(command[0] == "journalctl" for command in commands)
