"""Every command that a page shows is run here, or named below with the reason why it is not.

All `foretick` commands pass the CLI's own parser, whether they are run or not.
"""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from daemon.cli.main import main
from tests.docs.shown_commands import ROOT, Shown, shown
from tests.kit.daemon import FORETICK, Daemon, invoke
from tests.kit.kafka import free_ports
from tests.kit.programs import need

START_S = 600.0
"""Of a daemon, beside whatever else the machine does."""
KAFKA = "it takes a broker with topics; tests/kafka and tests/daemon/audit run the command on one"
SYSTEMD = "`make systemd` runs it, in a machine of its own"
INDEX = "it installs from the package index, gigabytes of it"
HOURS = "it takes hours"
PROFILE = "it takes minutes, for a number; tests/bench runs smaller ones"
CLUSTER = "it takes a cluster or a registry; tests/deploy renders what it applies"
NOT_RUN = {
    r"make (run|test|lint|sbom)": "they make the environment that this test runs in; the target exists",
    r"pip install (pre-commit|\"|'|\./)|\. \.venv|/opt/foretick/bin/pip|hf download": INDEX,
    r"pip wheel": "tests/deploy and tests/daemon/api build both wheels",
    r"deploy/debian/build .*--requirement": "2.6 GB; tests/deploy builds the package without its libraries",
    r"python3 -m venv /opt|/opt/foretick/bin/foretick|systemctl|systemd-sysusers": SYSTEMD,
    r"tar|foretick .*/etc/foretick": SYSTEMD,
    r"podman|kubectl": CLUSTER,
    r"kafka-topics\.sh|foretick (dlq|history|explain|reproduce|backfill)": KAFKA,
    r"foretick .*(broker:9092|examples/kafka\.toml)": KAFKA,
    r"foretick (check|plan) (?!.*--partitions).*--group": KAFKA,
    r"foretick (train|calibrate|evaluate)": HOURS,
    r"foretick teach": "it takes minutes; tests/training/test_training_teach.py runs a short one",
    r"foretick questions install": "it takes a pack; tests/e2e/test_e2e_packs.py installs one",
    r"foretick profile": PROFILE,
    r"foretick simulate .*crawler": HOURS,
    r"foretick plan .*--search": "it simulates many loads, for minutes; the same command without it is run",
    r"foretick demo --forever": "tests/e2e/test_e2e_cli.py runs the demo, and explains an answer of it",
    r"foretick top": "it takes a terminal; tests/daemon/top has one",
    r"foretick dashboards build$": "it writes this checkout; with --check it is run",
    r"foretick dashboards push": "it takes Grafana",
    r"foretick check .*models/my-model": "it takes a model of yours",
    r".*foretick\.example": "it takes a machine of that name; the same commands are run against this one",
    r"FORETICK_TEST_DEVICE=cuda": "it takes a GPU",
    r"cd /|export ": "it sets up the shell for the commands below it, which say themselves what they are",
}
"""By the beginning of commands, why they are not run here."""
RUN = {
    "files": r"foretick (--help|init|check|run|replay|feed test|keys|plan|feasible|simulate|dashboards)",
    "alpha": r"foretick (ask|questions)|curl -sN? http://127\.0\.0\.1:7800/",
}
"""By the surroundings in which they are run, the beginning of commands."""


def reason(command: Shown) -> str:
    return next((why for begin, why in NOT_RUN.items() if re.match(begin, command.line)), "")


def surroundings(command: Shown) -> str:
    """Where it is run; "" for nowhere."""
    if reason(command):
        return ""
    return next((name for name, begin in RUN.items() if re.match(begin, command.line)), "")


def commands(where: str) -> list[Shown]:
    return list(dict.fromkeys(each for each in shown() if surroundings(each) == where))


def test_every_command_is_run_or_has_a_reason() -> None:
    assert [each for each in commands("") if not reason(each)] == []
    assert len(commands("files")) > 15
    assert len(commands("alpha")) > 6


def test_every_reason_is_needed() -> None:
    lines = [each.line for each in shown()]
    assert [begin for begin in NOT_RUN if not any(re.match(begin, line) for line in lines)] == []


def parsed(words: list[str], folder: Path) -> None:
    """Parse as the CLI does: unknown options, missing arguments, values of another type are errors."""
    context, command = click.Context(main, info_name="foretick"), click.Command("")
    command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command = found
        context = click.Context(command, parent=context, info_name=name)
    if words != ["--help"]:
        with contextlib.chdir(folder):
            command.make_context(context.info_name, words)


@pytest.mark.parametrize(
    "command",
    sorted({e.line: e for e in shown() if "foretick" in e.line.split()[0]}.values(), key=lambda e: e.line),
    ids=lambda command: f"{command.page}-{command.line[:40]}",
)
def test_the_command_line_parses_it(command: Shown, files: Path) -> None:
    if command.words[0].rpartition("/")[2] == "foretick":
        parsed(command.words[1:], files)


def prices(number: int) -> str:
    """Open, high, low and close of a bar."""
    return f"{100 + number % 7}.25,{100 + number % 7}.75,{99 + number % 7}.50,{100 + number % 7}.50"


def made(folder: Path) -> Path:
    """A directory with the files that the pages name, made of what they show."""
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    form, config = re.findall(r"```toml\n(.*?)^```", quickstart, re.M | re.S)
    for name in ("bars.toml", "my_format.toml"):
        (folder / name).write_text(form)
    (folder / "acme.toml").write_text(config)
    shutil.copy(ROOT / "feeds/formats/histdata_quotes.toml", folder / "ticks.toml")
    shutil.copy(ROOT / "examples/kafka.toml", folder / "foretick.toml")
    shutil.copytree(ROOT / "examples", folder / "examples")
    own = re.findall(r"```toml\n(.*?)^```", (ROOT / "docs/questions.md").read_text(), re.M | re.S)
    (folder / "near_high.toml").write_text(own[0])
    (folder / "up_20bp.toml").write_text(own[2])
    (folder / "model.gguf").touch()
    times = [(14 + n // 60, n % 60) for n in range(90)]
    bars = [f"2024-08-08T{h}:{m:02}:00Z,{prices(n)},{n % 5 + 1}" for n, (h, m) in enumerate(times)]
    for name in ("bars.csv", "trades.csv"):
        (folder / name).write_text("\n".join(["time,open,high,low,close,volume", *bars, ""]))
    days = [f"08/08/2024 {h}:{m:02},{prices(n)},0" for n, (h, m) in enumerate(times)]
    (folder / "prices.csv").write_text("\n".join(["Date,Open,High,Low,Close,Volume", *days, ""]))
    ticks = [
        f"20240808 140000{n * 10:03},1.0{n:02},1.1{n:02},0" for n in range(90)
    ]  # played as fast as it was
    (folder / "ticks.csv").write_text("\n".join([*ticks, ""]))
    (folder / "trace.jsonl").write_text('{"text": "abcd", "arrival": 0}\n{"text": "abce", "arrival": 1}\n')
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the parser, which looks whether some of them are there."""
    folder = made(tmp_path_factory.mktemp("files"))
    (folder / "model").mkdir()
    for name in ("ca.pem", "desk.key", "requests.jsonl"):
        (folder / name).touch()
    return folder


class Ports:
    """Free ones in place of those that the pages name."""

    def __init__(self) -> None:
        self._of = dict(zip(("7800", "7801", "7802", "7803"), map(str, free_ports(4)), strict=True))
        self.http, self.query = self._of["7800"], self._of["7801"]

    def in_(self, text: str) -> str:
        """The text with them."""
        return re.sub(r"(?<=127\.0\.0\.1:)780[0-3]\b", lambda found: self._of[found[0]], text)

    def environment(self) -> dict[str, str]:
        """As a daemon reads them."""
        return {"FORETICK_HTTP__PORT": self.http, "FORETICK_QUERY__ENDPOINT": f"tcp://127.0.0.1:{self.query}"}


def run_until_ready(words: list[str], folder: Path) -> None:
    """`foretick run`: it gets ready, drains at SIGTERM, and leaves nothing behind."""
    log = folder / "log"
    with log.open("wb") as output:
        daemon = subprocess.Popen([FORETICK, *words], cwd=folder, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while "ready: " not in log.read_text():
            assert daemon.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0, log.read_text()
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.sampled(4)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", sorted({each.page for each in commands("files")}))
def test_commands_about_files_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, where each may need what the one before has written."""
    folder, ports = made(tmp_path), Ports()
    for path in folder.rglob("*.toml"):
        path.write_text(ports.in_(path.read_text()))
    monkeypatch.chdir(folder)
    for name, value in ports.environment().items():
        monkeypatch.setenv(name, value)
    if page == "docs/simulation.md":
        assert invoke("simulate", "--requests", "9", "--save-trace", "requests.jsonl").exit_code == 0
    if page == "examples/README.md":  # its file is of another format
        rows = [f"2022-01-05T00:{n:02}:00Z,{prices(n)},1" for n in range(30)]
        (folder / "bars.csv").write_text("\n".join(["timestamp,open,high,low,close,volume", *rows, ""]))
    for each in commands("files"):
        if each.page != page:
            continue
        words = [ports.in_(word) for word in each.words[1:]]
        if words[0] == "run":
            run_until_ready(words, folder)
        else:
            done = invoke(*words)
            assert done.exit_code == 0, f"{each.line}\n{done.output[-1500:]}{done.exception!r}"


CONFIG = """
standing = "paper_six"
[[sessions]]
name = "alpha"
symbol = "DEMO:ACME"
[[sessions]]
name = "acme"
symbol = "DEMO:ACME"
[bars]
interval = "1m"
[source]
kind = "http"
"""


@pytest.fixture(scope="module")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Ports]]:
    """A daemon with the sessions of the pages, and bars."""
    ports, folder = Ports(), tmp_path_factory.mktemp("alpha")
    query = f'[query]\nendpoint = "tcp://127.0.0.1:{ports.query}"\n'
    with Daemon(folder, CONFIG + query, {"STATE_DIRECTORY": str(folder / "state")}) as daemon:
        deadline = time.monotonic() + START_S
        while daemon.get("/readyz")[0] != 200:
            assert daemon.poll() is None, daemon.log
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.1)
        at = [1_723_125_600_000_000_000 + n * 60 * 10**9 for n in range(40)]
        common = {"type": "bar", "venue": "DEMO", "symbol": "ACME", "interval_ns": 60 * 10**9, "volume": "1"}
        names = ("open", "high", "low", "close")
        bars = [
            common | {"ts_event": t, "ts_recv": t} | dict(zip(names, prices(n).split(","), strict=True))
            for n, t in enumerate(at)
        ]
        url = f"http://127.0.0.1:{daemon.http_port}/v1/data?replay=true"
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(bars).encode(), headers)) as reply:
            assert json.load(reply)["accepted"] == 40
        while '"question":"trend"' not in daemon.get("/v1/answers?session=alpha")[1]:
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.1)
        yield daemon, ports
        daemon.terminate(60)


@pytest.mark.timeout(1200)
def test_commands_to_a_running_daemon_run(alpha: tuple[Daemon, Ports], tmp_path: Path) -> None:
    daemon, ports = alpha
    assert need("curl")
    for each in commands("alpha"):
        if each.words[0] == "foretick":
            done = invoke(*each.words[1:], "--endpoint", f"tcp://127.0.0.1:{ports.query}")
            assert done.exit_code == 0, f"{each.line}\n{done.output}{done.exception!r}"
            continue
        line = each.words
        most = ["--max-time", "3"] if "-sN" in line else ["--fail"]
        words = [word.replace("127.0.0.1:7800", f"127.0.0.1:{daemon.http_port}") for word in line]
        done = subprocess.run(
            [need("curl"), *most, *words[1:]], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == (28 if "-sN" in line else 0), f"{each.line}\n{done.stdout}{done.stderr}"
        assert done.stdout or "-sN" in line
