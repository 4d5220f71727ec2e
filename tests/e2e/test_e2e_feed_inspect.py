"""`foretick feed inspect` listens beside a daemon: rates, gaps and faults by symbol, and what is refused."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result

from feeds.mock_broker import MockBroker
from feeds.zmq_feed import ZmqSink
from tests.kit import trade
from tests.kit.daemon import invoke
from tests.kit.kafka_clients import KafkaClients

Send = Callable[[str, bytes], Awaitable[None]]
SESSION = '[[sessions]]\nname = "a"\nsymbol = "V:AAA"\n'


async def inspected(config: Path, send: Send, *options: str) -> Result:
    """What is printed while trades of two symbols come, every fifth quote is crossed, and one is refused."""

    async def publish() -> None:
        for n in range(100_000):
            now = time.time_ns()
            await send("V:AAA", trade("V:AAA", now, f"10{n % 3}.5"))
            bid = "10.5" if n % 5 else "11.5"
            await send("V:BBB", trade("V:BBB", now, type="quote", bid=bid, ask="11"))
            if n % 10 == 0:
                await send("V:AAA", trade("V:AAA", now, "1").replace(b'"1"', b'"x"', 1))
            await asyncio.sleep(0.01)

    publishing = asyncio.create_task(publish())
    done = await asyncio.to_thread(
        invoke, "feed", "inspect", "--config", str(config), "--seconds", "3", *options
    )
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    return done


def check(done: Result, name: str) -> None:
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith(f"source {name}: ")
    assert lines[1].split()[:2] == ["symbol", "records"]
    rows = {line.split()[0]: line for line in lines[2:4]}
    assert rows.keys() == {"V:AAA", "V:BBB"}
    assert " crossed " in rows["V:BBB"]
    assert rows["V:AAA"].endswith(" -")
    assert "refused, price " in done.output


async def test_a_zeromq_feed(tmp_path: Path) -> None:
    sink = ZmqSink("test", "tcp://127.0.0.1:*")
    await sink.start()

    async def send(key: str, payload: bytes) -> None:
        await sink.publish("ticks", None, payload, {"encoding": b"json"})

    file = tmp_path / "foretick.toml"
    file.write_text(f'[source]\nkind = "zeromq"\n[source.zeromq]\nendpoint = "{sink.endpoint}"\n{SESSION}')
    check(await inspected(file, send), "zeromq")
    missing = await inspected(file, send, "--source", "other")
    assert missing.exit_code == 2
    assert "no source 'other'" in missing.output
    await sink.stop()
    silent = await asyncio.to_thread(invoke, "feed", "inspect", "--config", str(file), "--seconds", "0.2")
    assert silent.exit_code == 1
    assert "0 records" in silent.output


async def test_a_topic_without_joining_the_group(tmp_path: Path) -> None:
    """From now on, and nothing is committed for the group."""
    with MockBroker() as broker:
        broker.create_topic("md.trades.v1", 2)
        async with KafkaClients(broker.bootstrap, "md.trades.v1") as clients:
            sink = await clients.open_sink()

            async def send(key: str, payload: bytes) -> None:
                await sink.publish("md.trades.v1", key.encode(), payload, {})

            file = tmp_path / "foretick.toml"
            kafka = f'[source]\nkind = "kafka"\n[source.kafka]\nbootstrap = "{broker.bootstrap}"\n'
            file.write_text(kafka + SESSION)
            check(await inspected(file, send), "kafka")


@pytest.mark.parametrize("kind", ["http", "none"])
def test_what_cannot_be_listened_to_says_why(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "foretick.toml"
    file.write_text(f'[source]\nkind = "{kind}"\n{SESSION}')
    done = invoke("feed", "inspect", "--config", str(file))
    assert done.exit_code == 2
    assert ("pushed to the daemon" if kind == "http" else "no source is configured") in done.output
