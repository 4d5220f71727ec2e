"""`foretick backfill`: over a topic and over a file, to Parquet and to a topic; and what it refuses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from feeds.codec import decode_message
from feeds.market_data import Answer
from feeds.mock_broker import MockBroker
from tests.daemon.audit.broker import FORM, run_everything, run_fill
from tests.kit import SECOND, START, trade
from tests.kit.daemon import invoke

pytestmark = pytest.mark.timeout(600)
KEY = "V:AAA"
SECONDS = 20
FROM = "2024-08-08T23:54:20Z"
"""Five seconds behind START."""
TO = "2024-08-08T23:54:30Z"


def priced(n: int) -> str:
    return f"{10_000 + (n * 7) % 13}.50"


def config_of(folder: Path, name: str, source: str, sink: str = "") -> str:
    file = folder / f"{name}.toml"
    file.write_text(
        f"""
standing = "none"
[model]
path = "untrained"
threads = 1
[[sessions]]
name = "aaa"
symbol = "{KEY}"
retention_records = 6
[[sessions]]
name = "bbb"
symbol = "V:BBB"
[[questions]]
name = "trend"
text = "Is the price going UP or DOWN?"
choices = ["UP", "DOWN"]
sessions = ["aaa"]
[source]
{source}
{sink}
"""
    )
    return str(file)


@pytest.fixture(scope="module")
def broker() -> Iterator[MockBroker]:
    """Twenty seconds of trades in a topic of two partitions, one of which has another symbol."""
    with MockBroker() as running:
        running.create_topic("in", 2)
        for topic in ("answers.v1", "past.v1", "other.v1"):
            running.create_topic(topic, 1)
        of_ours = [trade(KEY, START + n * SECOND, priced(n)) for n in range(SECONDS)]
        of_others = [trade("V:ZZZ", START + n * SECOND, "1.00") for n in range(SECONDS)]
        run_fill(running.bootstrap, "in", of_ours, b"a")
        run_fill(running.bootstrap, "in", of_others, b"b")
        yield running


@pytest.fixture
def on_kafka(broker: MockBroker, tmp_path: Path) -> str:
    kafka = f'kafka = {{ bootstrap = "{broker.bootstrap}", topics = ["in"] }}'
    sink = f'[sink]\nkafka = {{ bootstrap = "{broker.bootstrap}", topic = "answers.v1" }}'
    return config_of(tmp_path, "kafka", f'kind = "kafka"\n{kafka}', sink)


@pytest.fixture
def on_file(tmp_path: Path) -> str:
    (tmp_path / "form.toml").write_text(FORM)
    rows = [f"{START + n * SECOND},AAA,{priced(n)},1" for n in range(SECONDS)]
    (tmp_path / "trades.csv").write_text("\n".join(["time,symbol,price,size", *rows]) + "\n")
    replay = f'file = "{tmp_path / "trades.csv"}", format = "{tmp_path / "form.toml"}"'
    return config_of(tmp_path, "file", f'kind = "replay"\nreplay = {{ {replay} }}')


def backfill(config: str, *more: str, question: str = "trend", session: str = "aaa") -> Result:
    times = () if "--from" in more else ("--from", FROM, "--to", TO)
    return invoke("backfill", question, "--config", config, "--session", session, *times, *more)


def refused(done: Result) -> str:
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_a_topic_and_a_file_make_the_same_rows(on_kafka: str, on_file: str, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")

    def rows(config: str, name: str) -> list[dict[str, object]]:
        done = backfill(config, "--output", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        assert done.stderr.startswith("aaa: 10 answers; 1")
        (file,) = (tmp_path / name).iterdir()
        return list(pq.read_table(file).to_pylist())

    of_file, of_topic = rows(on_file, "of_file"), rows(on_kafka, "of_topic")
    assert [each["data_version"] for each in of_file] == list(range(6, 16))
    for one, other in zip(of_file, of_topic, strict=True):
        assert isinstance(one["flags"], list)
        assert "replay" in one["flags"]
        one["flags"].remove("replay")
        assert one == other
        assert one["flags"][-1] == "backfill"
        assert one["published_at"] is None
    again = backfill(on_file, "--output", str(tmp_path / "of_file"))
    assert again.exit_code == 0
    assert again.stderr.startswith("aaa: 0 answers behind version 15; ")


def test_a_topic_gets_each_answer_once(broker: MockBroker, on_kafka: str, tmp_path: Path) -> None:
    def published() -> list[Answer]:
        messages = (decode_message(each.payload) for each in run_everything(broker.bootstrap, "past.v1"))
        return [each for each in messages if isinstance(each, Answer)]

    first = backfill(on_kafka, "--topic", "past.v1")
    assert first.exit_code == 0, first.output
    found = published()
    assert [each.data_version for each in found] == list(range(6, 16))
    assert all("backfill" in each.flags and each.published_at and each.inputs for each in found)
    more = backfill(on_kafka, "--topic", "past.v1", "--from", FROM, "--to", "2024-08-08T23:54:32Z")
    assert more.exit_code == 0, more.output
    assert [each.data_version for each in published()] == list(range(6, 18))
    assert "publishes to answers.v1" in refused(backfill(on_kafka, "--topic", "answers.v1"))
    assert "another question" in refused(
        backfill(on_kafka, "--topic", "past.v1", "--choices", "YES,NO", question="High?")
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--from", TO, "--to", FROM), "is not before --to"),
        (("--from", FROM, "--to", FROM), "is not before --to"),
        (("--from", "yesterday"), "--from"),
        (
            ("--from", "2020-01-01T00:00:00Z", "--to", "2020-01-02T00:00:00Z"),
            "begins with data of 2024-08-08",
        ),
        (("--from", "2025-01-01T00:00:00Z", "--to", "2025-01-02T00:00:00Z"), "nothing is in the range"),
        (("--file", "a.csv"), "goes with --format"),
        (("--topic", "past.v1"), "name a directory, or a topic"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    more: tuple[str, ...], says: str, on_file: str, tmp_path: Path
) -> None:
    assert says in refused(backfill(on_file, "--output", str(tmp_path / "out"), *more))
    assert not list((tmp_path / "out").glob("*"))


def test_names_that_are_not_known_are_told(on_file: str, tmp_path: Path) -> None:
    out = ("--output", str(tmp_path / "out"))
    assert "no standing question 'down' (trend)" in refused(backfill(on_file, *out, question="down"))
    assert "no session 'zzz'" in refused(backfill(on_file, *out, session="zzz"))
    new = ("--choices", "YES,NO")
    assert "no bar of V:BBB" in refused(backfill(on_file, *out, *new, question="High?", session="bbb"))
    missing = refused(backfill(on_file, *out, "--set", f"source.replay.file={tmp_path / 'none.csv'}"))
    assert "none.csv" in missing


def test_without_the_extra_nothing_begins(
    on_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {"pyarrow", *(name for name in sys.modules if name.startswith("pyarrow."))}:
        monkeypatch.setitem(sys.modules, name, None)
    says = refused(backfill(on_file, "--output", str(tmp_path / "out")))
    assert "pip install 'foretick[parquet]'" in says
    assert not (tmp_path / "out").exists()


def test_other_sources_have_no_past(tmp_path: Path) -> None:
    config = config_of(tmp_path, "none", 'kind = "none"')
    assert "a history is read from Kafka, or from one recorded file" in refused(
        backfill(config, "--output", str(tmp_path / "out"))
    )
