"""`foretick history`: which answers it writes, each of them once, and what the three kinds of files hold."""

import asyncio
import csv
import errno
import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from feeds.market_data import Answer, DataUpdated, Latency
from feeds.mock_broker import MockBroker
from tests.daemon.audit.broker import run_fill
from tests.kit.daemon import invoke
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics

SECOND = 1_000_000_000
NOON = 1_723_161_600 * SECOND


class Topic(NamedTuple):
    """Where answers are. ``is_real``: on an Apache Kafka."""

    bootstrap: str
    name: str
    is_real: bool


def answer(n: int, session: str = "aaa", question: str = "trend", **more: Any) -> Answer:
    fields: dict[str, Any] = {
        "session": session,
        "symbol": "V:AAA",
        "question": question,
        "question_hash": "q",
        "data_version": n,
        "as_of": NOON + n * SECOND,
        "text": "UP",
        "choice": "UP",
        "probability": 0.9,
        "choice_set": ("UP", "FLAT"),
        "logit_gap": 1.25,
        "flags": ("late", "gap"),
        "answer_id": f"{session}{question}{n}",
        "epoch": 1,
        "sequence": n,
        "model": "m",
        "model_revision": "r",
        "latency": Latency(),
        "reused_tokens": 1,
        "computed_tokens": 2,
        "published_at": NOON + n * SECOND + 5,
    }
    return Answer(**(fields | more))


@pytest.fixture(scope="module", params=["mock", pytest.param("real", marks=pytest.mark.kafka)])
def topic(request: pytest.FixtureRequest) -> Iterator[Topic]:
    """Six answers, one of them twice, and messages of other kinds between them."""
    event = DataUpdated(session="aaa", data_version=1, as_of=NOON, bars=1)
    odd = answer(4, probability=None, choice_set=None, choice=None, flags=(), text='say, "what"')
    others = [answer(2, "bbb"), answer(3, question="high")]
    written = [answer(1), event, b"{", answer(1), answer(2), *others, odd, answer(5)]
    if request.param == "mock":
        with MockBroker() as broker:
            broker.create_topic("answers")
            run_fill(broker.bootstrap, "answers", written)
            yield Topic(broker.bootstrap, "answers", is_real=False)
        return
    real: RealKafka = request.getfixturevalue("real_kafka")
    name = f"answers-{uuid.uuid4().hex[:8]}"
    asyncio.run(create_topics(real.bootstrap, {name: 1}))
    run_fill(real.bootstrap, name, written)
    yield Topic(real.bootstrap, name, is_real=True)


def history(topic: Topic, *arguments: str) -> list[dict[str, str]]:
    done = invoke("history", topic.name, "--bootstrap", topic.bootstrap, *arguments)
    assert done.exit_code == 0, done.output
    return list(csv.DictReader(io.StringIO(done.stdout)))


def test_each_answer_is_a_line_once(topic: Topic) -> None:
    rows = history(topic)
    found = [(row["session"], row["question"], int(row["data_version"])) for row in rows]
    assert found == [
        ("aaa", "trend", 1),
        ("aaa", "trend", 2),
        ("bbb", "trend", 2),
        ("aaa", "high", 3),
        ("aaa", "trend", 4),
        ("aaa", "trend", 5),
    ]
    assert rows[0]["choice_set"] == "UP FLAT"
    assert (rows[4]["text"], rows[4]["probability"], rows[4]["flags"]) == ('say, "what"', "", "")


def test_filters_are_by_session_question_and_the_time_of_the_data(topic: Topic) -> None:
    def versions(*arguments: str) -> list[int]:
        return [int(row["data_version"]) for row in history(topic, *arguments)]

    assert versions("--session", "bbb") == [2]
    assert versions("--session", "bbb", "--session", "aaa", "--question", "high") == [3]
    assert versions("--until", "2024-08-09T00:00:03Z") == [1, 2, 2]
    if topic.is_real:  # the mock broker does not look up times
        assert versions("--since", "2024-08-09T00:00:03Z", "--until", "2024-08-09T00:00:05Z") == [3, 4]
    assert versions("--since", "1h") == []
    assert versions("--until", "1970-01-01T00:00:00Z") == []
    at = ("history", topic.name, "--bootstrap", topic.bootstrap)
    assert "0 answers: --since and --until are" in invoke(*at, "--since", "1h").stderr
    assert "0 answers\n" in invoke(*at, "--session", "none").stderr
    if topic.is_real:
        assert len(versions("--since", "1970-01-01T00:00:30Z")) == 6


def test_json_lines_and_parquet_hold_the_same(topic: Topic, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    for name in ("a.jsonl", "a.parquet", "a.csv"):
        done = invoke("history", topic.name, "--bootstrap", topic.bootstrap, "--output", str(tmp_path / name))
        assert (done.exit_code, done.stderr) == (0, "6 answers\n"), done.output
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "a.parquet")
    for name in ("as_of", "published_at"):
        assert str(table.schema.field(name).type) == "timestamp[ns, tz=UTC]"
        table = table.set_column(table.column_names.index(name), name, table[name].cast("int64"))
    rows = table.to_pylist()
    assert len(lines) == len(rows) == 6
    for line, row in zip(lines, rows, strict=True):
        assert row == line
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "--output", "a.xls"), ".csv, .jsonl, .parquet"),
        (("nothing",), "has no topic 'nothing'"),
        (("nothing", "--since", "yesterday"), "yesterday"),
    ],
)
def test_what_cannot_be_is_one_sentence(topic: Topic, arguments: tuple[str, ...], message: str) -> None:
    done = invoke("history", *arguments, "--bootstrap", topic.bootstrap)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert invoke("history", "answers").exit_code == 2


def test_a_reader_that_has_enough_is_no_error(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    async def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("daemon.cli.history._written", closed)
    assert invoke("history", topic.name, "--bootstrap", topic.bootstrap).stderr == ""
