"""Plug-ins: the example package, installed beside the daemon, and packages that cannot be used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from support import plugins
from support.plugins import PluginError

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/plugin/wave.toml"
MAIN = ("-c", "from daemon.cli.main import main; main()")
FREE = ("http.port=0", "query.endpoint=tcp://127.0.0.1:*", "model.layers=torch")
SET = tuple(word for each in FREE for word in ("--set", each))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the example is installed as any package is, without a network."""
    folder = tmp_path_factory.mktemp("plugin")
    source = folder / "source"
    shutil.copytree(ROOT / "examples/plugin", source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--no-index", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run([*pip, *target], check=True, timeout=120)
    return folder / "site"


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}


def foretick(folder: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command with the packages of ``folder``."""
    return subprocess.run(
        [sys.executable, *MAIN, *arguments],
        cwd=cwd, env=environment(folder), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_check_names_the_plug_in_and_accepts_its_tables(installed: Path, tmp_path: Path) -> None:
    done = foretick(installed, "check", "--config", str(CONFIG), *SET, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    adds = "format wave_csv, questions wave, sink jsonl, source wave"
    assert f"ok    plug-in: foretick-wave 0.1.0: {adds}" in done.stdout
    assert "ok    questions: 2 standing questions over 1 sessions" in done.stdout
    assert "ok    sink.jsonl.file" in done.stdout
    wrong = foretick(
        installed, "check", "--config", str(CONFIG), "--set", "source.wave.trades=1", cwd=tmp_path
    )
    assert (wrong.returncode, "source.wave.trades" in wrong.stderr) == (2, True)
    without = foretick(tmp_path, "check", "--config", str(CONFIG), cwd=tmp_path)
    assert (without.returncode, "Traceback" in without.stderr) == (2, False)


def test_its_format_is_read_by_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "ticks.csv").write_text("time,price,size\n1700000000,100.5,2\n1700000001,100.25,1\n")
    program = (
        "from pathlib import Path\n"
        "from feeds.file_format import load_format, names\n"
        "from feeds.recorded_file import read_records\n"
        "assert 'wave_csv' in names() and 'wave_csv' in names(of_messages=True)\n"
        "for record in read_records(Path('ticks.csv'), load_format('wave_csv')):\n"
        "    print(record.symbol, record.price)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment(installed), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["A 100.5", "A 100.25"], done.stderr


@pytest.mark.timeout(400)
def test_a_daemon_of_two_processes_reads_its_source_asks_its_questions_and_fills_its_sink(
    installed: Path, tmp_path: Path
) -> None:
    spare = ("--set", "process.spare_engine=false", "--set", f"recovery.directory={tmp_path}")
    daemon = subprocess.Popen(
        [sys.executable, *MAIN, "run", "--config", str(CONFIG), *SET, *spare],
        cwd=tmp_path, env=environment(installed), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        answers = tmp_path / "answers.jsonl"
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and daemon.poll() is None:
            lines = answers.read_bytes().splitlines(keepends=True) if answers.exists() else []
            if len(found := [json.loads(line) for line in lines if line.endswith(b"\n")]) >= 4:
                break
            time.sleep(0.2)
        assert daemon.poll() is None
        assert {each["question"] for each in found} == {"turn", "half"}
        assert {each["symbol"] for each in found} == {"WAVE:A"}
        assert all(each["choice"] in ("YES", "NO", "UPPER", "LOWER") for each in found)
    finally:
        daemon.send_signal(signal.SIGTERM)
        _, said = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, said


# Packages that cannot be used.


Package = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Makes a package with these lines of entry points and this code, which this process finds."""

    def make(name: str, group: str, line: str, code: str = "value = 1") -> Path:
        where = tmp_path / f"{name.replace('-', '_')}-2.0.dist-info"
        where.mkdir()
        (where / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (where / "entry_points.txt").write_text(f"[{group}]\n{line}\n")
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(code)
        plugins._every.cache_clear()
        return tmp_path

    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._every.cache_clear()
    yield make
    plugins._every.cache_clear()


def is_one(found: object) -> TypeGuard[int]:
    return found == 1


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("kafka = acme_feed:value", "", "acme-feed has the source 'kafka', which foretick has already"),
        ("Wave = acme_feed:value", "", "acme-feed has the source 'Wave': a name is of"),
        ("wave-1 = acme_feed:value", "", "acme-feed has the source 'wave-1': a name is of"),
        (
            "wave = acme_feed:value",
            "1 / 0",
            "cannot be loaded (acme_feed:value): ZeroDivisionError: division",
        ),
        ("wave = acme_feed:value", "raise OSError('one\\ntwo')", "OSError: one two"),
        ("wave = acme_feed:value", "import nowhere", "No module named 'nowhere'"),
        ("wave = acme_feed:other", "value = 1", "has no attribute 'other'"),
        ("wave = acme_feed", "value = 1", "acme-feed is no SourceConnector (acme_feed)"),
    ],
    ids=["ours", "capital", "hyphen", "raises", "two_lines", "lacks", "nothing", "kind"],
)
def test_what_cannot_be_used_is_one_sentence_that_names_the_package(
    package: Package, line: str, code: str, told: str
) -> None:
    package("acme-feed", plugins.SOURCES, line, code)
    with pytest.raises(PluginError) as refused:
        plugins.load(plugins.SOURCES, {"kafka"}, "SourceConnector", is_one)
    assert told in str(refused.value)
    assert "acme-feed" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_packages_cannot_have_one_name(package: Package) -> None:
    for name in ("acme-feed", "other-feed"):
        package(name, plugins.SOURCES, f"wave = {name.replace('-', '_')}:value")
    with pytest.raises(PluginError, match=r"(acme|other)-feed has already"):
        plugins.load(plugins.SOURCES, (), "SourceConnector", is_one)


def test_what_is_used_is_loaded_and_listed(package: Package) -> None:
    package("acme-feed", plugins.SOURCES, "wave = acme_feed:value")
    assert plugins.load(plugins.SOURCES, {"kafka"}, "one", is_one) == {"wave": 1}
    assert plugins.installed() == (plugins.Plugin("acme-feed", "2.0", ("source wave",)),)


def test_without_plug_ins_there_are_only_our_own_commands() -> None:
    assert plugins.installed() == ()
    assert {"bench", "train"} <= plugins.own(plugins.COMMANDS).keys()


CONNECTOR = (
    "from feeds.connector import SourceConnector\nclass C(SourceConnector, frozen=True):\n    'One.'\n"
)


@pytest.mark.parametrize(
    ("group", "line", "code", "told"),
    [
        (plugins.SOURCES, "wave = acme_feed:C", "raise ValueError('too old')", "ValueError: too old"),
        (plugins.SOURCES, "kafka = acme_feed:C", CONNECTOR, "'kafka', which foretick has already"),
        (plugins.SOURCES, "kind = acme_feed:C", CONNECTOR, "'kind'"),
        (plugins.SINKS, "wave = acme_feed:C", CONNECTOR, "no SinkConnector"),
        (plugins.QUESTIONS, "wave = acme_feed:C", CONNECTOR, "no sequence of questions"),
        (plugins.COMMANDS, "run = acme_feed:C", CONNECTOR, "'run', which foretick has already"),
    ],
    ids=["raises", "ours", "a_key", "sink", "questions", "command"],
)
def test_commands_end_with_status_2_and_no_traceback(
    package: Package, tmp_path: Path, group: str, line: str, code: str, told: str
) -> None:
    folder = package("acme-feed", group, line, code)
    done = foretick(folder, "check", "--config", str(CONFIG), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert told in sentence
    assert "acme-feed" in sentence or "a plug-in" in sentence
