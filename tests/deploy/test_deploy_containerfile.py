"""The image: hadolint's rules, what goes into it, who runs it. No test builds it: that takes a registry."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from daemon.config.schema import Config
from feeds.durations import parse_duration

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
TEXT = CONTAINERFILE.read_text()


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run(
        [program, "--no-color", path], capture_output=True, text=True, timeout=60, check=False
    )


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    found = hadolint(CONTAINERFILE)
    assert (found.returncode, found.stdout) == (0, "")
    broken = tmp_path / "Containerfile"
    broken.write_text(TEXT.replace("USER 10001:10001", "USER root"))
    assert "DL3002" in hadolint(broken).stdout


def test_no_rule_of_hadolint_is_turned_off() -> None:
    assert "hadolint ignore" not in TEXT
    assert not list(ROOT.glob(".hadolint.*"))


def test_the_build_copies_every_package_and_nothing_that_is_no_part_of_it() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    wanted = {name.rstrip("*") for name in packages["find"]["include"]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    linked = {link.readlink().parts[2] for link in (ROOT / "daemon/install").iterdir() if link.is_symlink()}
    assert linked == {"examples", "systemd"}
    assert kept == wanted | linked | {"LICENSE", "README.md", "pyproject.toml", "requirements.lock"}


def test_libraries_are_those_of_the_lock_with_their_hashes() -> None:
    installs = re.findall(r"^RUN .*pip install (.*)$", TEXT, re.M)
    assert len(installs) == 2
    assert "--require-hashes --requirement requirements.lock" in installs[0]
    assert installs[1].endswith("--no-build-isolation --no-deps .")


def test_it_runs_as_a_user_who_is_not_root_and_owns_only_what_is_mounted() -> None:
    last_stage = TEXT.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last_stage, re.M) == ["10001:10001"]
    assert re.findall(r"--owner=foretick .*? (/.*)$", last_stage, re.M) == ["/var/lib/foretick"]


def test_the_health_check_asks_the_default_port_and_gives_up_before_its_time() -> None:
    (command,) = re.findall(r"urlopen\('http://127\.0\.0\.1:(\d+)/healthz', timeout=(\d+)\)", TEXT)
    assert int(command[0]) == Config().http.port
    (timeout,) = re.findall(r"--timeout=(\w+)", TEXT)
    assert parse_duration(f"{command[1]}s") < parse_duration(timeout)
