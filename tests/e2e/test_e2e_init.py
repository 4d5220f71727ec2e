"""`foretick init` writes a format and a configuration that work: for files, topics and streams."""

import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from websockets.asyncio.server import ServerConnection

from daemon.config.load import load_config
from daemon.config.schema import Config
from feeds.mock_broker import MockBroker
from feeds.zmq_feed import ZmqSink
from tests.kit import START, trade
from tests.kit.daemon import invoke
from tests.kit.kafka_clients import KafkaClients
from tests.kit.venue import venue

ROWS = "time,price,size\n" + "".join(f"{1709632800 + n},10{n % 7}.5,{n}\n" for n in range(1, 60))


def config(folder: Path) -> Config:
    return load_config(folder / "foretick.toml", environment={})


def sent(n: int) -> bytes:
    return json.dumps(
        {"ts": time.time_ns() // 10**6, "sym": "AAA", "price": f"10{n % 7}.5", "size": n + 1}
    ).encode()


def test_a_file(tmp_path: Path) -> None:
    data = tmp_path / "My Ticks.2024.csv"
    data.write_text(ROWS)
    arguments = ("init", str(data), "--out", str(tmp_path / "made"), "--venue", "X", "--symbol", "AAA")
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert "X:AAA" in done.output
    assert "Next: foretick check" in done.output
    made = config(tmp_path / "made")
    assert made.source.replay is not None
    assert made.source.replay.format == str(tmp_path / "made" / "my_ticks.toml")
    (session,) = made.sessions
    assert (session.name, session.symbol, session.price_decimals) == ("aaa", "X:AAA", 1)
    again = invoke(*arguments)
    assert again.exit_code == 2
    assert "--force overwrites" in again.output
    assert invoke(*arguments, "--force").exit_code == 0
    how = ("--to", "inproc", "--speed", "0", "--json", "--set", "bars.interval=5s")
    played = invoke("replay", str(data), "--format", made.source.replay.format, *how)
    assert played.exit_code == 0, played.output
    assert '"symbol":"X:AAA"' in played.stdout


def test_a_file_of_long_numbers_shows_whole_ones(tmp_path: Path) -> None:
    rows = [f"{1709632800 + 60 * n},46319.25,46385.75,46319.25,46377.5,2300413.7295" for n in range(9)]
    (tmp_path / "bars.csv").write_text("\n".join(["time,open,high,low,close,volume", *rows]) + "\n")
    done = invoke(
        "init", str(tmp_path / "bars.csv"), "--out", str(tmp_path), "--venue", "X", "--symbol", "AAA"
    )
    assert all(number in done.output for number in ("46319.25", "46385.75", "46377.5", "2300413.7295"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no such file; a topic needs --bootstrap"),
        ("a,b\n1,2\n", "no trade, quote or bar"),
        ("time,price,size\n" + "1709632800,-1,2\n" * 5, "no record can be read"),
    ],
)
def test_what_cannot_be_understood_says_why(tmp_path: Path, text: str | None, why: str) -> None:
    data = tmp_path / "data.csv"
    if text is not None:
        data.write_text(text)
    done = invoke("init", str(data), "--out", str(tmp_path))
    assert done.exit_code == 2
    assert why in done.output
    assert not (tmp_path / "foretick.toml").exists()


async def test_a_topic_of_json(tmp_path: Path) -> None:
    with MockBroker() as broker:
        broker.create_topic("md.ticks", 2)
        async with KafkaClients(broker.bootstrap, "md.ticks") as clients:
            sink = await clients.open_sink()
            for n in range(40):
                await sink.publish("md.ticks", b"AAA", sent(n), {})
        options = ("--bootstrap", broker.bootstrap, "--venue", "X", "--out", str(tmp_path))
        done = await asyncio.to_thread(invoke, "init", "md.ticks", *options)
    assert done.exit_code == 0, done.output
    made = config(tmp_path)
    assert made.source.kafka is not None
    assert (made.source.kafka.topics, made.sessions[0].symbol) == (("md.ticks",), "X:AAA")
    assert made.source.kafka.format == str(tmp_path / "md.toml")


async def test_a_topic_of_our_own_records_needs_no_format(tmp_path: Path) -> None:
    with MockBroker() as broker:
        broker.create_topic("md.trades.v1", 1)
        async with KafkaClients(broker.bootstrap, "md.trades.v1") as clients:
            sink = await clients.open_sink()
            for n in range(20):
                await sink.publish(
                    "md.trades.v1", b"V:AAA", trade("V:AAA", START + n * 10**9, "10.25", "1"), {}
                )
        options = ("--bootstrap", broker.bootstrap, "--out", str(tmp_path))
        done = await asyncio.to_thread(invoke, "init", "md.trades.v1", *options)
    assert done.exit_code == 0, done.output
    assert "no format is needed" in done.output
    made = config(tmp_path)
    assert made.source.kafka is not None
    assert (made.source.kafka.format, made.sessions[0].price_decimals) == ("", 2)


async def test_a_venues_stream(tmp_path: Path) -> None:
    async def handle(connection: ServerConnection) -> None:
        assert await connection.recv() == "subscribe"
        await connection.send('{"result":null,"id":1}')
        for n in range(2500):
            await connection.send(json.dumps({"e": "tick", **json.loads(sent(n))}))
        await connection.wait_closed()

    async with venue(handle) as url:
        options = ("--subscribe", "subscribe", "--venue", "X", "--out", str(tmp_path), "--seconds", "20")
        done = await asyncio.to_thread(invoke, "init", f"{url}/stream", *options)
    assert done.exit_code == 0, done.output
    made = config(tmp_path)
    assert made.source.websocket is not None
    assert (made.source.websocket.subscribe, made.sessions[0].symbol) == (("subscribe",), "X:AAA")


async def test_a_zeromq_feed(tmp_path: Path) -> None:
    sink = ZmqSink("test", "tcp://127.0.0.1:*")
    await sink.start()

    async def publish() -> None:
        for n in range(100_000):
            await sink.publish("ticks", None, sent(n), {"encoding": b"json"})
            await asyncio.sleep(0.001)

    publishing = asyncio.create_task(publish())
    options = ("--venue", "X", "--out", str(tmp_path), "--seconds", "2")
    done = await asyncio.to_thread(invoke, "init", sink.endpoint, *options)
    publishing.cancel()
    await sink.stop()
    assert done.exit_code == 0, done.output
    made = config(tmp_path)
    assert made.source.zeromq is not None
    assert (made.source.zeromq.endpoint, made.sessions[0].symbol) == (sink.endpoint, "X:AAA")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory, and the URL that serves its files."""
    folder = tmp_path / "web"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield folder, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_file_at_a_url_is_downloaded_and_played(tmp_path: Path, web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "prices.csv").write_text(ROWS)
    out = tmp_path / "out"
    done = invoke("init", f"{url}/prices.csv?day=1", "--out", str(out), "--venue", "V", "--symbol", "AAA")
    assert done.exit_code == 0, done.output
    assert (out / "prices.csv").read_text() == ROWS
    made = config(out).source.replay
    assert made is not None
    assert made.file == str(out / "prices.csv")
    missing = invoke("init", f"{url}/none.csv", "--out", str(tmp_path / "other"))
    assert missing.exit_code == 2
    assert "404" in missing.stderr
    assert not list((tmp_path / "other").iterdir())
