"""A venue's stream through the whole daemon: bars are those of an independent computation, whatever it does.

The venue is a server on loopback. It drops the connection, sends again what it had sent, delays, swaps frames
and sends some twice; with ``FORETICK_DATA`` also of frames that were captured.
"""

import asyncio
import gzip
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection

from daemon.config.schema import BarsConfig, SourceConfig
from feeds.connectors.websocket import WebSocketConnector
from feeds.durations import Duration
from ingest.bars import Bars
from tests.kit import SECOND, inproc_config, until
from tests.kit.inproc import running
from tests.kit.venue import venue

SYMBOL = "BINANCE:BTCUSDT"
Bar = tuple[Decimal, ...]
Frame = dict[str, Any]


def frame(number: int, at_ms: int, price: str, size: str) -> Frame:
    return {
        "e": "trade",
        "E": at_ms,
        "s": "BTCUSDT",
        "t": number,
        "p": price,
        "q": size,
        "T": at_ms,
        "m": True,
    }


def generated(seconds: int, rng: Random) -> list[Frame]:
    """Trades up to now, a few each second."""
    begin, frames = int(time.time()) - seconds, list[Frame]()
    for second in range(seconds):
        for at_ms in sorted(rng.randrange(1000) for _ in range(rng.randrange(2, 6))):
            price = f"{60000 + rng.randrange(1000)}.{rng.randrange(100):02}"
            size = f"0.{rng.randrange(1, 10**5):05}"
            frames.append(frame(len(frames), (begin + second) * 1000 + at_ms, price, size))
    return frames


def captured(data: Path, seconds: int) -> list[Frame]:
    """The first trades of a capture."""
    found = list[Frame]()
    with gzip.open(data / "binance_spot_btcusdt_20240808_raw.gz", "rt") as lines:
        for line in lines:
            document = json.loads(line.partition(" ")[2])
            if document.get("stream") == "btcusdt@trade":
                found.append(document["data"])
                if found[-1]["T"] - found[0]["T"] > seconds * 1000:
                    return found
    return found


def bars_of(frames: Sequence[Frame]) -> dict[int, Bar]:
    """Open, high, low, close and volume by second, in plain decimals, by event time and number."""
    by_second = defaultdict[int, list[Frame]](list)
    for each in sorted(frames, key=lambda each: (each["T"], each["t"])):
        by_second[each["T"] // 1000].append(each)
    found = {}
    for second, own in by_second.items():
        prices, sizes = [Decimal(each["p"]) for each in own], [Decimal(each["q"]) for each in own]
        found[second] = prices[0], max(prices), min(prices), prices[-1], sum(sizes, Decimal())
    return found


def seen(rows: Bars) -> dict[int, Bar]:
    """The same of bars that the engine made: of a corrected one, the newest."""
    return {
        int(row["ts_open"]) // SECOND: tuple(Decimal(int(row[name])) / 10**9 for name in "ohlcv")
        for row in rows
    }


class Unreliable:
    """Sends ``frames``; connections end, frames are late, swapped with a neighbour, or come twice."""

    def __init__(self, frames: Sequence[Frame], rng: Random) -> None:
        self._frames, self._rng = frames, rng
        self._at = 0
        self.connections = 0
        self.done = False

    async def __call__(self, connection: ServerConnection) -> None:
        await connection.recv()  # the subscription
        self.connections += 1
        await connection.send('{"result":null,"id":1}')
        self._at = max(0, self._at - self._rng.randrange(20))  # what it had sent comes again
        until_ = self._at + self._rng.randrange(20, 120)
        while self._at < len(self._frames):
            if self._at >= until_ and self.connections < 8:
                connection.transport.abort()
                return
            group = list(self._frames[self._at : self._at + 2])
            self._at += len(group)
            if self._rng.random() < 0.2:
                group.reverse()
            for each in group:
                for _ in range(1 + (self._rng.random() < 0.1)):
                    await connection.send(json.dumps(each))
            if self._rng.random() < 0.05:
                await asyncio.sleep(0.05)
        self.done = True
        await connection.wait_closed()


CASES = [("generated", 0), ("generated", 1)] + [("captured", 0)] * ("FORETICK_DATA" in os.environ)


@pytest.mark.parametrize(("of", "seed"), CASES)
async def test_bars_are_right_whatever_the_venue_does(of: str, seed: int) -> None:
    rng = Random(seed)
    frames = generated(60, rng) if of == "generated" else captured(Path(os.environ["FORETICK_DATA"]), 60)
    server, made = Unreliable(frames, rng), dict[int, Bar]()
    async with venue(server) as url:
        connector = WebSocketConnector(url=url, format="binance", subscribe=('{"method":"SUBSCRIBE"}',))
        config = inproc_config(
            (SYMBOL,),
            source=SourceConfig(kind="websocket", websocket=connector),  # type: ignore[call-arg]  # by connectors
            bars=BarsConfig(interval=Duration(SECOND), lateness=Duration(5 * SECOND)),
        )
        watch = lambda _session, rows: made.update(seen(rows))  # noqa: E731
        async with running(config, [], watch=watch) as daemon:
            expected = bars_of(frames)
            closed = max(expected) - 7
            await until(lambda: server.done and bool(made) and max(made) >= closed, 60)
            wanted = {second: bar for second, bar in expected.items() if second <= closed}
            found = {second: bar for second, bar in made.items() if second in wanted}
            assert found == wanted
            assert daemon.count("source_breaks", source="websocket") == server.connections - 1 > 0
            assert daemon.count("records_passed_over", source="websocket") == server.connections
            assert daemon.count("records_duplicate", session="btcusdt") > 0
            flags = {flag for each in daemon.answers("btcusdt") for flag in each.flags}
            assert "gap" in flags
