"""`foretick replay` for people: what it prints of an answer and at the end, and what it refuses."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from daemon.cli.replay import AnswerPrinter
from daemon.cli.replay_summary import answered_line
from daemon.config.schema import SessionConfig
from daemon.ledger import ledger
from feeds.market_data import Answer
from ingest.bar_kernel import BAR
from metrics.store import MetricStore
from tests.kit.daemon import invoke
from tests.kit.records import bars_format

NANO = 10**9
OPENED = 1_723_127_400 * NANO  # 2024-08-08T14:30:00Z
AAA = SessionConfig(name="aaa", symbol="V:AAA", price_decimals=2)
ROWS = "time,o,h,l,c,v\n2024-08-08T14:30:00Z,1,1,1,1,1\n"


def answer(**members: Any) -> Answer:
    plain: dict[str, Any] = {"session": "aaa", "symbol": "V:AAA", "question": "up", "question_hash": "0",
                             "text": "YES", "choice": "YES", "logit_gap": 1.5, "data_version": 3,
                             "as_of": OPENED + 59 * NANO + 250_000_000, "probability": 0.75,
                             "model": "m", "model_revision": "r", "latency": {},
                             "reused_tokens": 0, "computed_tokens": 0,
                             "answer_id": f"aaa:0:{OPENED}"} | members  # fmt: skip
    return msgspec.convert({"type": "answer", **plain, "untrained": False}, Answer)


async def printed(*answers: Answer, closes: dict[int, int]) -> list[str]:
    """The lines of ``answers``, of a session with these closes (in 1e-9) by the openings of bars."""
    lines: list[str] = []
    printer = AnswerPrinter(lines.append)
    bars = np.zeros(len(closes), BAR)
    bars["ts_open"], bars["c"] = list(closes), list(closes.values())
    printer.watch(AAA, bars)
    for each in answers:
        await printer.publish("answers", None, msgspec.json.encode(each), {})
    return lines


async def test_a_line_has_the_bar_s_time_and_close_and_the_probability() -> None:
    (line,) = await printed(answer(), closes={OPENED: 101_380_000_000, OPENED - NANO: 1})
    assert line == "V:AAA 2024-08-08T14:30:00Z 101.38 v3 up: YES (probability 0.750, gap 1.500)\n"


async def test_a_bar_that_was_not_seen_has_the_time_of_its_newest_record() -> None:
    (line,) = await printed(answer(), closes={OPENED + NANO: 1})
    assert line.startswith("V:AAA 2024-08-08T14:30:59.250Z v3 up: YES (")


async def test_a_line_of_a_signal_names_the_answers_that_caused_it() -> None:
    lines: list[str] = []
    printer = AnswerPrinter(lines.append)
    cause = {"session": "aaa", "question": "up", "answer_id": "i", "data_version": 3, "text": "YES"}
    named = {"session": "aaa", "name": "turn", "owner": "aaa", "signal_id": "s", "symbol": "V:AAA"}
    signal = {"type": "signal", "data_version": 3, "as_of": OPENED, "bar": OPENED, "close": None}
    signal |= named | {"answers": [cause]}
    await printer.publish("signals", None, msgspec.json.encode(signal), {})
    assert lines == ["V:AAA 2024-08-08T14:30:00Z v3 SIGNAL turn (aaa up: YES)\n"]
    assert printer.count == 0


def test_the_end_says_how_many_bars_were_read_answered_passed_by_and_late() -> None:
    store = MetricStore.local({"session": ["aaa", "bbb"], "source": ["replay"]})
    for session, bars, joined in (("aaa", 10, 3), ("bbb", 5, 0)):
        store.inc("foretick_bars_total", bars, session=session)
        store.inc("foretick_flash_coalesced_total", joined, session=session)
    store.inc("foretick_records_late_total", 4, session="aaa")
    said = answered_line(store, ledger(store))
    assert said.startswith("15 bars read: 12 answered, 3 passed by, 4 records late; ")
    assert "--every-bar" in said


WRONG: dict[str, tuple[list[str], str]] = {
    "no file": (["{}/none.csv"], "cannot read {}/none.csv: No such file or directory"),
    "brokers": (["{}/bars.csv", "--to", "kafka", "--bootstrap", "kafka..corp"], "'kafka..corp' is no broker"),
    "endpoint": (["{}/bars.csv", "--to", "zmq", "--endpoint", "nonsense"], "is no endpoint: write tcp"),
    "taken": (["{}/bars.csv", "--to", "zmq", "--endpoint", "tcp://127.0.0.1:{port}"], "already in use"),
    "date": (["{}/bars.csv", "--date", "tomorrow"], "--date tomorrow is no day such as 2024-08-08"),
    "span": (
        ["{}/bars.csv", "--from", "2024-08-09T00:00:00Z", "--until", "2024-08-08T00:00:00Z"],
        "is not before --until 2024-08-08T00:00:00Z: nothing would be played",
    ),
    "bars": (["{}/bars.csv", "--bars", "{}/none/bars.csv"], "--bars: cannot write {}/none/bars.csv: No such"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_played_is_one_sentence_and_status_2(name: str, tmp_path: Path) -> None:
    (tmp_path / "bars.csv").write_text(ROWS)
    (tmp_path / "form.toml").write_text(bars_format("UP"))
    arguments, said = WRONG[name]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [each.replace("{}", str(tmp_path)).replace("{port}", port) for each in arguments]
        target = [] if "--to" in given else ["--to", "inproc"]
        done = invoke("replay", *given, "--format", str(tmp_path / "form.toml"), *target)
    assert done.exit_code == 2, done.output
    assert said.replace("{}", str(tmp_path)) in done.stderr
    assert "Traceback" not in done.output
    assert len(done.stderr.splitlines()) <= 4
