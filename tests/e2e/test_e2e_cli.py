"""The commands as typed: replay in three directions, check, ask, demo."""

import asyncio
import os
import re
import shlex
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from click.testing import Result
from transformers import BloomConfig, BloomForCausalLM

from daemon.cli.replay import replay
from daemon.config.load import load_config
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from engine.measurement_cache import Memory
from engine.model import loading, remembered
from engine.model.embedded import build_tokenizer, embedded_directory
from feeds.codec import decode_record
from feeds.kafka_client import quiet_client_log
from feeds.kafka_source import KafkaSource
from feeds.market_data import Answer, AnyRecord
from feeds.mock_broker import MockBroker
from flash.question import PAPER_SIX
from tests.kit import TOPIC
from tests.kit.daemon import FORETICK, command, invoke, logging_put_back
from tests.kit.kafka import REPOSITORY, free_ports
from tests.kit.samples import SAMPLES, Sample, write

INPROC = ("--to", "inproc", "--speed", "0")
LINE = re.compile(
    r"^(\S+) \d{4}-\d\d-\d\dT[\d:.]+Z [\d.]+ v(\d+) (\w+): (.*) "
    r"\((?:probability [01]\.\d{3}, )?gap [\d.]+\)(?: \[(.*)\])?$"
)


@pytest.fixture(params=SAMPLES, ids=lambda sample: sample.form)
def sample(request: pytest.FixtureRequest) -> Sample:
    found: Sample = request.param
    return found


def real_file(sample: Sample) -> Path:
    folder = os.environ.get("FORETICK_DATA")
    if not folder:
        pytest.skip("set FORETICK_DATA to the folder of the recorded files to play them")
    return Path(folder) / sample.real


Replay = Callable[..., tuple[int, str, Gateway]]


@pytest.fixture
def replayed(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Plays a file; returns the exit status, what was printed, and the gateway."""

    def play(path: Path, sample: Sample, until: str | None = None) -> tuple[int, str, Gateway]:
        made: list[Gateway] = []

        def remembered(*arguments: Any, **options: Any) -> Gateway:
            made.append(make_gateway(*arguments, **options))
            return made[-1]

        with logging_put_back():
            status = replay(path, sample.form, "inproc", speed=0.0, until=until, make=remembered)
        return status, capsys.readouterr().out, made[0]

    return play


def bars(gateway: Gateway) -> int:
    (session,) = gateway.config.sessions
    return int(gateway.store.value("foretick_bars_total", session=session.name))


def printed(text: str) -> list[re.Match[str]]:
    return [found for line in text.splitlines() if (found := LINE.match(line))]


@pytest.mark.sampled(2)
def test_a_file_through_the_daemon_is_answered_to_its_last_bar(
    tmp_path: Path, sample: Sample, replayed: Replay
) -> None:
    status, output, gateway = replayed(write(sample, tmp_path), sample)
    assert status == 0
    lines = printed(output)
    assert {line[1] for line in lines} == {sample.symbol}
    assert set(Counter(int(line[2]) for line in lines).values()) == {6}
    assert not any("untrained" in line[5] for line in lines)
    assert ("skewed_clock" in output) == (sample.form == "binance_capture")
    assert output.splitlines()[-1] == f"{len(lines)} answers, 0 malformed lines"
    assert bars(gateway) == sample.bars
    assert gateway.input.runners[0].tracker.outstanding() == 0, (
        "an answer covers every record, the last bar's too"
    )
    assert ("warm_up" in lines[-1][5]) == (sample.bars <= 10)


@pytest.mark.sampled(2)
def test_a_real_file_through_the_daemon(sample: Sample, replayed: Replay) -> None:
    status, output, gateway = replayed(real_file(sample), sample, sample.until)
    assert status == 0
    lines = printed(output)
    assert {line[1] for line in lines} == {sample.symbol}
    assert bars(gateway) == sample.real_bars
    assert gateway.input.runners[0].tracker.outstanding() == 0
    assert output.splitlines()[-1] == f"{len(lines)} answers, 0 malformed lines"


def _replay(path: Path, sample: Sample) -> list[str]:
    return ["replay", str(path), "--format", sample.form]


@pytest.mark.sampled(2)
async def test_a_file_to_kafka_arrives_record_by_record(tmp_path: Path, sample: Sample) -> None:
    quiet_client_log()
    with MockBroker() as broker:
        broker.create_topic(TOPIC)
        arguments = [*_replay(write(sample, tmp_path), sample), "--speed", "0", "--to", "kafka"]
        done = await asyncio.to_thread(command, *arguments, "--bootstrap", broker.bootstrap)
        assert (done.returncode, done.stdout) == (
            0,
            f"{sample.records} records sent, 0 refused, 0 malformed lines\n",
        )
        source = KafkaSource("test", broker.bootstrap, [TOPIC], None)
        await source.start()
        got: list[AnyRecord] = []
        keys = set()
        async with asyncio.timeout(20):
            async for batch in source.batches():
                got += [decode_record(m.payload, m.headers["encoding"].decode()) for m in batch]
                keys |= {m.key for m in batch}
                if len(got) >= sample.records:
                    break
        await source.stop()
    assert keys == {sample.symbol.encode()}
    assert [record.seq for record in got] == list(range(1, sample.records + 1))
    assert [record.ts_event for record in got] == sorted(record.ts_event for record in got)


async def test_a_file_to_zeromq_arrives_record_by_record(tmp_path: Path) -> None:
    sample = SAMPLES[0]
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"md.")
    subscriber.setsockopt(zmq.RECONNECT_IVL, 20)
    subscriber.connect(endpoint)
    try:
        arguments = [*_replay(write(sample, tmp_path), sample), "--speed", "0", "--to", "zmq"]
        sending = asyncio.create_task(asyncio.to_thread(command, *arguments, "--endpoint", endpoint))
        async with asyncio.timeout(60):
            frames = [await subscriber.recv_multipart() for _ in range(sample.records)]
        assert (await sending).returncode == 0
    finally:
        subscriber.close(linger=0)
        context.term()
    assert [msgspec.msgpack.decode(header)["seq"] for _, header, _ in frames] == list(range(1, 8))
    assert [decode_record(payload).seq for *_, payload in frames] == list(range(1, 8))


def test_replay_says_what_it_needs(tmp_path: Path) -> None:
    path = write(SAMPLES[0], tmp_path)
    for arguments, expected in (
        (["--format", "nothing", "--to", "inproc"], "nothing"),
        (["--format", "btc_perp_bars", "--to", "kafka"], "--bootstrap"),
        (["--format", "btc_perp_bars", "--to", "zmq"], "--endpoint"),
        (["--format", "btc_perp_bars", "--to", "inproc", "--from", "yesterday"], "zone"),
        (["--format", "histdata_quotes", "--to", "inproc"], "no record"),
    ):
        done = invoke("replay", str(path), *arguments)
        assert done.exit_code == 2, (arguments, done.stderr)
        assert expected in done.stderr
        assert "Traceback" not in done.stderr


def test_every_symbol_of_a_file_gets_a_session_up_to_a_number(tmp_path: Path) -> None:
    """What is passed over is said, also with JSON, which has stdout for itself."""
    form, tape = tmp_path / "trades.toml", tmp_path / "trades.csv"
    form.write_text(
        'description = "trades"\ncontainer = "csv"\nheader = true\n'
        '[[records]]\nkind = "trade"\nunit = "base"\n'
        'time = { field = "at", format = "epoch-s" }\n'
        'fields = { venue = "venue", symbol = "symbol", price = "price", size = "size" }\n'
    )
    rows = [
        f"{1_723_161_200 + second},{market},{100 + second}.00,1"
        for second in range(20)
        for market in ("V,AAA", "W,AAA", "V,BBB", "V,CCC")
    ]
    tape.write_text("\n".join(["at,venue,symbol,price,size", *rows]))
    done = invoke("replay", str(tape), "--format", str(form), *INPROC, "--symbols", "3", "--json")
    assert done.exit_code == 0, done.stderr
    found = [msgspec.json.decode(line, type=Answer) for line in done.stdout.splitlines()]
    named = {(a.session, a.symbol) for a in found}
    assert named == {("v-aaa", "V:AAA"), ("w-aaa", "W:AAA"), ("bbb", "V:BBB")}
    assert all("replay" in a.flags for a in found)
    assert "20 records of other symbols than V:AAA, W:AAA, V:BBB were skipped\n" in done.stderr
    assert f"{len(found)} answers, 0 malformed lines\n" in done.stderr


def test_a_truncated_file_is_played_to_where_it_breaks_off(tmp_path: Path) -> None:
    sample = SAMPLES[3]
    path = write(sample, tmp_path)
    path.write_bytes(path.read_bytes()[:-12])
    done = invoke(*_replay(path, sample), *INPROC)
    assert done.exit_code == 0, done.stderr
    assert printed(done.stdout)
    assert done.stdout.splitlines()[-1].endswith(" answers, 1 malformed lines")


def test_a_file_without_a_date_takes_it_from_its_name_or_an_argument(tmp_path: Path) -> None:
    (tmp_path / "day.toml").write_text(
        """
        description = "quotes by the time of the day"
        container = "csv"
        header = false
        passed_over = { book_deltas = { field = 0, prefix = "L2" } }
        [[records]]
        kind = "quote"
        venue = "FX"
        symbol = "EURUSD"
        match = { field = 0, prefix = "Q" }
        time = { field = 1, format = "day-ms", zone = "America/New_York", date = "%Y%m%d" }
        fields = { bid = 2, ask = 3 }
        """
    )
    text = "".join(f"Q,{n * 1000},1.1{n},1.2{n}\nL2,{n},x,x\n" for n in range(20))
    for name in ("20200102_quotes.csv", "quotes.csv"):
        (tmp_path / name).write_text(f"{text}Q,99999999,1,1\n")
    play = ("--format", str(tmp_path / "day.toml"), *INPROC)
    done = invoke("replay", str(tmp_path / "20200102_quotes.csv"), *play)
    assert done.exit_code == 0, done.output
    assert "lines without a record: 20 book deltas" in done.stderr
    assert "first malformed line: line 41: timestamp_unit: time: '99999999' is beyond" in done.stderr
    undated = invoke("replay", str(tmp_path / "quotes.csv"), *play)
    assert undated.exit_code == 2
    assert "quotes.csv has no date like %Y%m%d: give the date" in undated.stderr
    dated = invoke("replay", str(tmp_path / "quotes.csv"), *play, "--date", "2020-01-02")
    assert dated.exit_code == 0, dated.output


def test_a_file_that_cannot_be_read_any_more_ends_the_replay_with_a_message(tmp_path: Path) -> None:
    """Address 0 of this process's memory cannot be read."""
    config = tmp_path / "config.toml"
    session = '[[sessions]]\nname = "a"\nsymbol = "V:A"\n'
    config.write_text(f'{session}[process]\nmode = "inproc"\n[http]\nport = 0\n[query]\nendpoint = ""\n')
    done = invoke(*_replay(Path("/proc/self/mem"), SAMPLES[0]), "--to", "inproc", "--config", str(config))
    assert done.exit_code == 2
    assert "OSError: [Errno 5]" in done.stderr


def wrong(done: Result) -> set[str]:
    """The settings that `foretick check` finds fault with."""
    assert done.exit_code == 2
    assert "Traceback" not in done.stderr
    return {line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("WRONG")}


def test_check_passes_what_would_run_and_names_what_would_not(tmp_path: Path) -> None:
    """All three examples: with a broker and free ports, then without."""
    with MockBroker() as broker, socket.create_server(("127.0.0.1", 0)) as taken:
        for topic in ("md.trades.v1", "answers.v1", "dlq.v1"):
            broker.create_topic(topic)
        query, answers, feed, http = free_ports(4)
        sink = f"sink.zeromq.endpoint=tcp://127.0.0.1:{answers}"
        ports = [f"query.endpoint=tcp://127.0.0.1:{query}", sink, f"http.port={http}"]
        kafka = [f"{end}.kafka.bootstrap={broker.bootstrap}" for end in ("source", "sink")]
        good = {
            "kafka": kafka,
            "zeromq": [f"source.zeromq.endpoint=tcp://127.0.0.1:{feed}"],
            "replay": [f"source.replay.file={write(SAMPLES[0], tmp_path)}"],
        }
        for name, settings in good.items():
            done = _check(name, *ports, *settings)
            assert done.exit_code == 0, done.stdout + done.stderr
            assert "WRONG" not in done.stdout
            assert "foretick-tape passes its canary\n" in done.stdout
        assert "12 standing questions over 2 sessions" not in done.stdout  # that one is kafka's
        port = taken.getsockname()[1]
        ports = [f"query.endpoint=tcp://127.0.0.1:{port}", sink, f"http.port={port}"]
        bad = ["source.kafka.topics=nowhere.v1", "model.path=untrained", "scheduler.max_prompt_tokens=5"]
        done = _check("kafka", *ports, *kafka, *bad)
    keys = {"source.kafka.topic", "query.endpoint", "http.port", "scheduler.max_prompt_tokens"}
    assert wrong(done) == keys
    assert "nowhere.v1 does not exist" in done.stdout


def test_check_names_a_missing_model_file_broker_and_format(tmp_path: Path) -> None:
    port, unused = free_ports(2)
    model = f"model.path={tmp_path / 'none'}"
    file = ("source.replay.file=none.csv", "source.replay.format=x")
    done = _check("replay", model, f"http.port={port}", *file)
    assert {"model.path", "source.replay.file", "source.replay.format"} <= wrong(done)
    brokers = [f"{end}.kafka.bootstrap=127.0.0.1:{unused}" for end in ("source", "sink")]
    done = _check("kafka", model, *brokers)
    assert "source.kafka.bootstrap" in wrong(done)
    assert "WRONG source.kafka.bootstrap: no" in done.stdout


def test_check_names_an_architecture_that_cannot_be_served(tmp_path: Path) -> None:
    """BLOOM's positions are ALiBi: position frames cannot re-rotate them."""
    bloom = BloomConfig(vocab_size=2048, hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(bloom).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    done = _check("zeromq", f"model.path={tmp_path}", f"http.port={free_ports(1)[0]}")
    assert wrong(done) >= {"model.path"}
    assert "WRONG model.path: bloom is not supported: its positions are a bias on the scores" in done.stdout


@pytest.mark.parametrize(
    ("typed", "key"), [("check", "pool.blocks"), ("check", "pool.host_blocks"), ("run", "pool.blocks")]
)
def test_a_pool_that_does_not_fit_is_a_message_and_status_2(typed: str, key: str) -> None:
    """It is said before anything is allocated, with what would fit."""
    path, http = REPOSITORY / "examples" / "zeromq.toml", f"http.port={free_ports(1)[0]}"
    arguments = (typed, "--config", str(path), "--set", f"{key}=99999999999", "--set", http)
    if typed == "check":
        done = invoke(*arguments)
        status, said = done.exit_code, done.output
    else:
        ended = command(*arguments)
        status, said = ended.returncode, ended.stdout + ended.stderr
    assert status == 2
    fits = rf"{key}: 99,999,999,999 blocks need [\d,]+ bytes .* are available, .* at most [\d,]+ fit"
    assert re.search(fits, said)
    assert "Traceback" not in said


def test_check_says_how_layers_run_and_whether_that_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loading, remembered):
        monkeypatch.setattr(module, "MEMORY", Memory(lambda: tmp_path))
    said = []
    for _ in range(2):
        done = _check("zeromq", "model.device=cpu", f"http.port={free_ports(1)[0]}")
        assert done.exit_code == 0, done.stdout
        said += [line for line in done.stdout.splitlines() if line.startswith("ok    model.layers: ")]
    first, second = said
    assert first.removesuffix(", measured now") in second
    assert re.search(
        r"compiled layers are [\d.]+ times as fast as transformers' \(.* ms for 1 row, .*\)", first
    )
    assert re.search(rf", remembered from \d{{4}}-\d\d-\d\d in {tmp_path}/\w+\.json$", second)


def _check(example: str, *settings: str) -> Result:
    path = REPOSITORY / "examples" / f"{example}.toml"
    return invoke("check", "--config", str(path), *(w for s in settings for w in ("--set", s)))


def readme_asks() -> list[list[str]]:
    """The commands of the README's section *Asking* that speak with a daemon."""
    section = (REPOSITORY / "README.md").read_text().partition("## Asking")[2].partition("\n## ")[0]
    found = [shlex.split(line) for line in section.splitlines() if line.startswith("foretick ")]
    return [words[1:] for words in found]


def test_the_demo_runs_by_itself_and_the_readme_asks_it(tmp_path: Path) -> None:
    http, query = free_ports(2)
    ports = ("--http-port", str(http), "--query-port", str(query))
    arguments = (FORETICK, "demo", "--seconds", "15", "--keep", str(tmp_path), *ports)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            began = ""
            while "query socket" not in began:
                line = demo.stdout.readline()
                assert line, began
                began += line
            assert f"http://127.0.0.1:{http}/" in began
            endpoint = load_config(tmp_path / "foretick.toml").query.endpoint
            assert endpoint == f"tcp://127.0.0.1:{query}"
            alive = ("ask", "alpha", "trend", "--choice", "UP", "--choice", "DOWN", "--endpoint", endpoint)
            asked_at = time.monotonic()
            while invoke(*alive).exit_code and time.monotonic() < asked_at + 8:
                pass  # its first bars are on their way
            said = [invoke(*words, "--endpoint", endpoint) for words in readme_asks()]
            output, errors = demo.communicate(timeout=120)
        finally:
            demo.kill()
    assert len(said) > 4
    assert [each.output for each in said if each.exit_code] == []
    assert demo.returncode == 0, errors
    expect_demo(began + output)


RIGHT = re.compile(r"│ (\w+) +│ (\S+) +│ +([\d,]+) │ +([\d,]+) │ +([\d,]+) │ +[\d.%]* │")
"""A row of the table of right answers: question, model, answers, undefined, right."""


def test_the_demo_shows_a_language_model_beside_the_tape_model(tmp_path: Path) -> None:
    """Of random weights: its answers count, and what it says in its own words stands among them."""
    model = embedded_directory(tmp_path)
    arguments = ("demo", "--seconds", "12", "--model", str(model), "--http-port", "0", "--query-port", "0")
    done = subprocess.run((FORETICK, *arguments), capture_output=True, text=True, timeout=240, check=True)
    assert f"and {model.name}" in done.stdout
    rows = {(question, name): int(answers) for question, name, answers, *_ in RIGHT.findall(done.stdout)}
    asked = [question.name for question in PAPER_SIX]
    assert list(rows) == [(each, name) for each in asked for name in ("foretick-tape", model.name)]
    assert all(rows[each, model.name] for each in asked)
    assert "comment" in done.stdout
    assert "DEMO:ALPHA, " in done.stdout  # the name behind it is wrapped


def expect_demo(output: str) -> None:
    """What it says, and that it is right."""
    assert "not Apache Kafka" in output
    assert "untrained" not in output
    assert "asked over the query socket" in output
    assert "latency by stage, ms" in output
    counts = {
        name: int(value.replace(",", ""))
        for name, value in re.findall(r"│ ([a-z ]+?) +│ +([\d,]+) │", output)
    }
    assert counts["answers acknowledged"] == counts["answers read back"] > 0
    assert counts["bars"] > 3 * 30  # of the minute before; how many more depends on the machine's speed
    assert counts["records late"] == 0
    right = {}
    for name, model, *columns in RIGHT.findall(output):
        assert model == "foretick-tape"
        answers, undefined, correct = (int(column.replace(",", "")) for column in columns)
        right[name] = answers - undefined, correct
    assert set(right) == {question.name for question in PAPER_SIX}
    judged, exact = right["exact_value"]
    assert 0 < judged <= counts["answers read back"] // 6  # a seventh question was set, and removed
    assert judged - exact <= 3  # the first version of each of three markets may have a single bar
    judged, trend = right["trend"]
    assert trend > 0.8 * judged > 0


def test_the_console_script_is_installed() -> None:
    assert Path(FORETICK).is_file()
    assert command("--version").stdout.startswith("foretick")
