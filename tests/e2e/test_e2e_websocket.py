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
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from msgspec import Raw
from msgspec.json import encode
from websockets.asyncio.server import ServerConnection

from daemon.config.schema import BarsConfig, SourceConfig
from feeds.connectors.websocket import WebSocketConnector
from feeds.durations import Duration
from ingest.bars import Bars
from tests.kit import SECOND, inproc_config, until
from tests.kit.inproc import running
from tests.kit.venue import venue

Bar = tuple[Decimal, ...]


class Trade(NamedTuple):
    """What a venue says of a trade."""

    number: int
    at_ms: int
    price: str
    size: str

    @property
    def iso(self) -> str:
        return datetime.fromtimestamp(self.at_ms // 1000, UTC).strftime(
            f"%Y-%m-%dT%H:%M:%S.{self.at_ms % 1000:03}Z"
        )


FRAMES: dict[str, tuple[str, Callable[[Trade], Any]]] = {
    "binance": ("BTCUSDT", lambda each: {
        "e": "trade", "E": each.at_ms, "s": "BTCUSDT", "t": each.number, "p": each.price, "q": each.size,
        "T": each.at_ms, "m": True,
    }),
    "bybit": ("BTCUSDT", lambda each: {
        "topic": "publicTrade.BTCUSDT", "type": "snapshot", "ts": each.at_ms, "data": [
            {"T": each.at_ms, "s": "BTCUSDT", "S": "Buy", "v": each.size, "p": each.price,
             "i": f"20f4-{each.number}"}
        ],
    }),
    "coinbase": ("BTC-USD", lambda each: {
        "type": "match", "trade_id": each.number, "sequence": 7 * each.number, "time": each.iso,
        "product_id": "BTC-USD", "size": each.size, "price": each.price, "side": "sell",
    }),
    "kraken": ("BTC/USD", lambda each: {
        "channel": "trade", "type": "update", "data": [
            {"symbol": "BTC/USD", "side": "sell", "price": Raw(each.price.encode()),
             "qty": Raw(each.size.encode()), "trade_id": each.number, "timestamp": each.iso}
        ],
    }),
    "okx": ("BTC-USDT", lambda each: {
        "arg": {"channel": "trades", "instId": "BTC-USDT"}, "data": [
            {"instId": "BTC-USDT", "tradeId": str(each.number), "px": each.price, "sz": each.size,
             "side": "buy", "ts": str(each.at_ms)}
        ],
    }),
}  # fmt: skip
"""By venue: a symbol, and the frame of a trade."""
REPLIES = {
    "binance": {"result": None, "id": 1},
    "bybit": {"success": True, "op": "subscribe"},
    "coinbase": {"type": "subscriptions", "channels": []},
    "kraken": {"method": "subscribe", "success": True},
    "okx": {"event": "subscribe", "connId": "a4"},
}
"""To a subscription."""


def generated(seconds: int, rng: Random) -> list[Trade]:
    """Trades up to now, a few each second."""
    begin, found = int(time.time()) - seconds, list[Trade]()
    for second in range(seconds):
        for at_ms in sorted(rng.sample(range(1000), rng.randrange(2, 6))):
            price = f"{60000 + rng.randrange(1000)}.{rng.randrange(100):02}"
            size = f"0.{rng.randrange(1, 10**5):05}"
            found.append(Trade(len(found), (begin + second) * 1000 + at_ms, price, size))
    return found


def captured(data: Path, seconds: int) -> list[Trade]:
    """The first trades of a capture."""
    found = list[Trade]()
    with gzip.open(data / "binance_spot_btcusdt_20240808_raw.gz", "rt") as lines:
        for line in lines:
            document = json.loads(line.partition(" ")[2])
            if document.get("stream") == "btcusdt@trade":
                said = document["data"]
                found.append(Trade(said["t"], said["T"], said["p"], said["q"]))
                if found[-1].at_ms - found[0].at_ms > seconds * 1000:
                    return found
    return found


def bars_of(trades: Sequence[Trade]) -> dict[int, Bar]:
    """Open, high, low, close and volume by second, in plain decimals, by event time and number."""
    by_second = defaultdict[int, list[Trade]](list)
    for each in sorted(trades, key=lambda each: (each.at_ms, each.number)):
        by_second[each.at_ms // 1000].append(each)
    found = {}
    for second, own in by_second.items():
        prices, sizes = [Decimal(each.price) for each in own], [Decimal(each.size) for each in own]
        found[second] = prices[0], max(prices), min(prices), prices[-1], sum(sizes, Decimal())
    return found


def seen(rows: Bars) -> dict[int, Bar]:
    """The same of bars that the engine made: of a corrected one, the newest."""
    return {
        int(row["ts_open"]) // SECOND: tuple(Decimal(int(row[name])) / 10**9 for name in "ohlcv")
        for row in rows
    }


class Unreliable:
    """Sends a frame of each trade.

    Connections end, frames are late, swapped with a neighbour, or come twice.
    """

    def __init__(self, of: str, trades: Sequence[Trade], rng: Random) -> None:
        self._frames, self._rng = [encode(FRAMES[of][1](each)).decode() for each in trades], rng
        self._reply = json.dumps(REPLIES[of])
        self._at = 0
        self.connections = 0
        self.done = False

    async def __call__(self, connection: ServerConnection) -> None:
        await connection.recv()  # the subscription
        self.connections += 1
        await connection.send(self._reply)
        self._at = max(0, self._at - self._rng.randrange(20))  # what it had sent comes again
        until_ = self._at + self._rng.randrange(20, 120)
        while self._at < len(self._frames):
            if self._at >= until_ and self.connections < 8:
                await (await connection.ping())  # what was sent has arrived: what comes again may be nothing
                connection.transport.abort()
                return
            group = list(self._frames[self._at : self._at + 2])
            self._at += len(group)
            if self._rng.random() < 0.2:
                group.reverse()
            for each in group:
                for _ in range(1 + (self._rng.random() < 0.1)):
                    await connection.send(each)
            if self._rng.random() < 0.05:
                await asyncio.sleep(0.05)
        self.done = True
        await connection.wait_closed()


CASES = [("binance", 60, 0), ("binance", 60, 1), *((each, 30, 2) for each in FRAMES if each != "binance")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("of", "seconds", "seed"), CASES)
async def test_bars_are_right_whatever_the_venue_does(of: str, seconds: int, seed: int) -> None:
    rng = Random(seed)
    await expect_bars(of, generated(seconds, rng), rng)


@pytest.mark.skipif("FORETICK_DATA" not in os.environ, reason="FORETICK_DATA names no recorded data")
async def test_bars_of_captured_frames_are_right() -> None:
    await expect_bars("binance", captured(Path(os.environ["FORETICK_DATA"]), 60), Random(0))


async def expect_bars(of: str, trades: list[Trade], rng: Random) -> None:
    server, made = Unreliable(of, trades, rng), dict[int, Bar]()
    symbol = FRAMES[of][0]
    async with venue(server) as url:
        connector = WebSocketConnector(url=url, format=of, subscribe=('{"method":"SUBSCRIBE"}',))
        config = inproc_config(
            (f"{of.upper()}:{symbol}",),
            source=SourceConfig(kind="websocket", websocket=connector),  # type: ignore[call-arg]  # by connectors
            bars=BarsConfig(interval=Duration(SECOND), lateness=Duration(5 * SECOND)),
        )
        (session,) = [each.name for each in config.sessions]
        watch = lambda _session, rows: made.update(seen(rows))  # noqa: E731
        async with running(config, [], watch=watch) as daemon:
            expected = bars_of(trades)
            closed = max(expected) - 7
            await until(lambda: server.done and bool(made) and max(made) >= closed, 60)
            wanted = {second: bar for second, bar in expected.items() if second <= closed}
            found = {second: bar for second, bar in made.items() if second in wanted}
            assert found == wanted
            assert daemon.count("source_breaks", source="websocket") == server.connections - 1 > 0
            assert daemon.count("records_passed_over", source="websocket") == server.connections
            assert daemon.count("records_duplicate", session=session) > 0
            flags = {flag for each in daemon.answers(session) for flag in each.flags}
            assert "gap" in flags
