"""Answers over a recorded file are explained and reproduced from the file itself, without a broker."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from daemon.audit.broker import logs_of
from daemon.audit.file_log import FileLog
from daemon.config.load import load_config
from daemon.config.schema import Config
from daemon.gateway.wiring import make_gateway
from feeds.connector import SettingError, SinkRoute
from feeds.market_data import Answer
from tests.kit import MemorySink
from tests.kit.daemon import invoke
from tests.kit.records import bars_format

BARS = 9

pytestmark = [pytest.mark.sampled(1), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a file of `BARS` bars, one of which cannot be read."""
    folder = tmp_path_factory.mktemp("file")
    rows = [f"2024-08-08T14:{30 + n}:00Z,{10 + n % 3},{13},{9},{11 + n % 2}.25,{n + 1}" for n in range(BARS)]
    (folder / "bars.csv").write_text("\n".join(["time,o,h,l,c,v", *rows[:4], "broken", *rows[4:]]) + "\n")
    (folder / "form.toml").write_text(bars_format("AAA"))
    made = folder / "foretick.toml"
    made.write_text(
        f"""
model = {{ path = "untrained", threads = 1, layers = "torch" }}
bars.interval = "1m"
flash.every_bar = true
process.mode = "inproc"
query.endpoint = ""
http.port = 0
recovery.interval = "0s"
[[sessions]]
name = "aaa"
symbol = "V:AAA"
retention_tokens = 160
[source]
kind = "replay"
[source.replay]
file = "{folder / "bars.csv"}"
format = "{folder / "form.toml"}"
speed = 0
"""
    )
    return made


async def answered(config: Config) -> list[Answer]:
    """What a daemon publishes of the whole file."""
    sink = MemorySink()
    gateway = make_gateway(config, routes=[SinkRoute(sink, "answers")])
    try:
        await asyncio.wait_for(gateway.start(), 400)
        await gateway.finish()
    finally:
        await gateway.stop()
    return [each for each in sink.messages("answers") if isinstance(each, Answer)]


def test_the_file_gives_the_same_answer_again_and_its_window(file: Path) -> None:
    config = load_config(file)
    published = asyncio.run(answered(config))
    newest = [each for each in published if each.question == "trend"][-1]
    assert newest.data_version == BARS
    saved = file.parent / "answer.json"
    saved.write_bytes(msgspec.json.encode(newest))
    told = invoke("reproduce", str(saved), "--config", str(file), "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["says"] == "reproduced"
    shown = invoke("explain", str(saved), "--config", str(file), "--json")
    assert shown.exit_code == 0, shown.output
    explained = json.loads(shown.output)
    closes = [line["text"].split(",")[4] for line in explained["window"]]
    assert closes == [f"{11 + n % 2}.25" for n in range(BARS)][-len(closes) :]
    assert explained["frozen"]["tokens"]
    assert "trend" in explained["question"]["text"]


async def test_a_file_is_read_by_the_numbers_of_its_records(file: Path) -> None:
    ((_, log),) = logs_of(load_config(file)).items()
    assert isinstance(log, FileLog)
    async with log.reader() as reader:
        found = [each.offset async for batch in reader.read(("bars.csv", 0), range(3, 6)) for each in batch]
        at = await reader.offset_at(("bars.csv", 0), 1_723_127_400_000_000_000 + 5 * 60 * 10**9)
    assert found == [3, 4, 5]
    assert at == 5


def test_a_source_that_keeps_nothing_says_so(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="http, which keeps none"):
        logs_of(load_config(file, None, {"source.kind": "http"}))
    missing = invoke("explain", str(tmp_path / "none.json"), "--config", str(file))
    assert missing.exit_code == 3
    assert "none.json: no such file" in missing.stderr
