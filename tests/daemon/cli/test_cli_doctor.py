"""`foretick doctor`: what it prints, and its exit status."""

import json
from pathlib import Path

import pytest

from daemon.cli import doctor
from daemon.cli.doctor import shown
from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis
from daemon.doctor.examination import Facts
from daemon.doctor.machine import Machine
from daemon.doctor.running import Daemon
from daemon.top.scrape import parse
from tests.kit.daemon import invoke

MACHINE = Machine({"foretick": "0.1.0"}, 2, 0.5, 1 << 34, 1 << 30, 1 << 16, None, False, 0.001)
WELL = parse("foretick_engine_up 1\n").values
DOWN = parse("foretick_engine_up 0\n").values
CONFIG = (
    '[source]\nkind = "zeromq"\n[source.zeromq]\nendpoint = "tcp://127.0.0.1:1"\n'
    '[sink.zeromq]\nendpoint = "tcp://127.0.0.1:2"\n[[sessions]]\nname = "a"\nsymbol = "V:A"\n'
)


def written(folder: Path, text: str = CONFIG) -> str:
    (folder / "f.toml").write_text(text)
    return str(folder / "f.toml")


def seen(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    """Let the command see these facts: a daemon that runs, whose model is not loaded a second time."""

    def gather(config: Config, unit: str) -> Facts:
        return Facts(MACHINE, (), (), daemon, (f"{unit} INFO ready",))

    monkeypatch.setattr(doctor, "gather", gather)


@pytest.mark.parametrize(("after", "status"), [(WELL, 0), (DOWN, 1)])
def test_the_exit_status_is_1_where_there_is_a_problem(
    after: dict[object, float], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, Daemon("alive", "/healthz 200", True, before=WELL, after=after))  # type: ignore[arg-type]  # samples
    done = invoke("doctor", "--config", written(tmp_path))
    assert done.exit_code == status, done.output
    assert done.stdout.splitlines()[0] == "ok      versions: foretick 0.1.0"
    assert ("PROBLEM metrics.engine_up: below 1" in done.stdout) == (status == 1)
    assert done.stdout.splitlines()[-1].endswith(f"{status} problem, 0 skipped")


def test_json_holds_every_member_and_every_worry_has_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, Daemon("alive", "/healthz 200", True, before=DOWN, after=DOWN))
    done = invoke("doctor", "--config", written(tmp_path), "--json", "--unit", "desk")
    found = [Diagnosis(**each) for each in json.loads(done.stdout)]
    assert {each.check for each in found} >= {"versions", "machine.clock", "daemon", "log", "check"}
    assert all(each.step for each in found if each.verdict in ("warning", "problem"))


def test_what_check_finds_is_found_and_has_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, Daemon("alive", "/healthz 200", True, before=WELL, after=WELL))
    text = CONFIG.replace(
        "[sink", '[source.zeromq.registry]\nurl = "http://desk:pa55word@127.0.0.1:1"\n[sink', 1
    )
    done = invoke("doctor", "--config", written(tmp_path, text))
    assert done.exit_code == 1
    assert "PROBLEM source.zeromq.registry.url" in done.stdout
    assert "pa55word" not in done.output


def test_a_file_that_cannot_be_read_ends_with_status_2(tmp_path: Path) -> None:
    wrong = written(tmp_path, "[http]\nprot = 1\n")
    for path, named in (("/no/such/file", "/no/such/file"), (wrong, "http.prot")):
        done = invoke("dump", "--config", path)
        assert (done.exit_code, done.stdout) == (2, "")
        done = invoke("doctor", "--config", path, "--json")
        assert done.exit_code == 2
        (found,) = json.loads(done.stdout)
        assert (found["check"], found["verdict"]) == ("configuration", "problem")
        assert named in found["seen"]
        assert "foretick check" in found["step"]


def test_the_next_step_stands_below_with_its_page() -> None:
    assert shown(Diagnosis("a.b", "ok", "fine")) == "ok      a.b: fine"
    lines = shown(Diagnosis("a", "problem", "down", "start it", "operations.md#doctor")).splitlines()
    assert lines == ["PROBLEM a: down", "        next: start it (docs/operations.md#doctor)"]
