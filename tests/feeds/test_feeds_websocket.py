"""A venue's stream: connections that end, hang and are refused; pings, logins, and what venues send."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from feeds.codec import MalformedRecord
from feeds.connector import SettingError
from feeds.connectors.websocket import WebSocketConnector
from feeds.file_format import load_format, names
from feeds.market_data import Book, Quote, Trade
from feeds.payloads.format_decoder import FormatDecoder
from feeds.source import ConnectionState, Incoming
from feeds.websocket_source import Stream, WebSocketSource
from tests.kit import until
from tests.kit.kafka import make_certificates
from tests.kit.venue import venue

NOW = 1_767_225_600 * 10**9


@asynccontextmanager
async def reading(source: WebSocketSource) -> AsyncIterator[list[Incoming]]:
    """What a started source yields, while it grows."""
    found: list[Incoming] = []

    async def read() -> None:
        async for batch in source.batches():
            found.extend(batch)

    await source.start()
    task = asyncio.create_task(read())
    try:
        yield found
    finally:
        await asyncio.wait_for(source.stop(), 5)
        await asyncio.wait_for(task, 5)


async def quick(_seconds: float) -> None:
    await asyncio.sleep(0.01)


def payloads(found: list[Incoming]) -> list[bytes]:
    return [each.payload for each in found]


async def test_it_subscribes_and_yields_frames_in_order() -> None:
    async def handle(connection: ServerConnection) -> None:
        assert await connection.recv() == "give me all"
        for n in range(100):
            await connection.send(f"{n}" if n % 2 else b"%d" % n)
        await connection.wait_closed()

    async with venue(handle) as url:
        source = WebSocketSource("venue", Stream(url, ["give me all"]))
        async with reading(source) as found:
            await until(lambda: len(found) == 100)
            assert payloads(found) == [b"%d" % n for n in range(100)]
            assert [(each.topic, each.partition, each.offset) for each in found[:2]] == [
                ("venue", 0, 0),
                ("venue", 0, 1),
            ]
            assert source.connection.state is ConnectionState.UP
            assert (source.lost, source.breaks) == (0, 0)
            assert source.read_until_ns > 0


async def test_a_connection_that_ends_is_opened_again_and_is_a_break() -> None:
    served = 0

    async def handle(connection: ServerConnection) -> None:
        nonlocal served
        served += 1
        if served != 2:  # the second one brings nothing
            await connection.send(f"{served}")
        if served >= 3:
            await connection.wait_closed()

    async with venue(handle) as url:
        source = WebSocketSource("venue", Stream(url), sleep=quick)
        async with reading(source) as found:
            await until(lambda: len(found) == 2)
            assert payloads(found) == [b"1", b"3"]
            assert source.breaks == 1


@pytest.mark.parametrize("by", ["silence", "ping"])
async def test_a_venue_that_hangs_is_left(by: str) -> None:
    connections, left = list[ServerConnection](), asyncio.Event()

    async def handle(connection: ServerConnection) -> None:
        connections.append(connection)
        await connection.send(f"{len(connections)}")
        if by == "ping":
            connection.transport.pause_reading()  # and so it does not answer pings
        await left.wait()

    settings = {"silence_s": 0.2} if by == "silence" else {"silence_s": 0.0, "ping_s": 0.2}
    async with venue(handle, close_timeout=0.1, ping_interval=None) as url:
        source = WebSocketSource("venue", Stream(url, **settings), sleep=quick)  # type: ignore[arg-type]  # floats
        async with reading(source) as found:
            await until(lambda: len(found) >= 2, 10)
            assert source.breaks >= 1
        left.set()
        for each in connections:
            each.transport.abort()


async def test_it_pings_by_a_message_and_the_reply_is_ignored() -> None:
    pings = 0

    async def handle(connection: ServerConnection) -> None:
        nonlocal pings
        async for message in connection:
            assert message == "ping"
            pings += 1
            await connection.send("pong")
            await connection.send(f"{pings}")

    async with venue(handle) as url:
        stream = Stream(url, ping="ping", ping_s=0.05, ignored=frozenset({b"pong"}))
        async with reading(WebSocketSource("venue", stream)) as found:
            await until(lambda: len(found) >= 2)
            assert payloads(found)[:2] == [b"1", b"2"]


async def test_frames_beyond_the_room_are_dropped_and_counted() -> None:
    async def handle(connection: ServerConnection) -> None:
        for n in range(50):
            await connection.send(f"{n}")
        await connection.wait_closed()

    async with venue(handle) as url:
        source = WebSocketSource("venue", Stream(url), waiting=10)
        await source.start()
        await until(lambda: source.lost == 40)
        batch = await anext(source.batches())
        assert payloads(batch) == [b"%d" % n for n in range(40, 50)]
        await source.stop()


async def test_it_waits_for_a_venue_that_is_away_and_can_be_stopped_meanwhile() -> None:
    source = WebSocketSource("venue", Stream("ws://127.0.0.1:1/stream?key=secret"), sleep=quick)
    starting = asyncio.create_task(source.start())
    await until(lambda: source.connection.retries > 2)
    assert source.connection.state is ConnectionState.DOWN
    assert not starting.done()
    await asyncio.wait_for(source.stop(), 5)
    await asyncio.wait_for(starting, 5)


def test_what_is_secret_in_an_address_is_not_shown() -> None:
    assert Stream("wss://venue/stream?key=secret").shown == "wss://venue/stream"


async def test_it_logs_in_by_headers_over_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "broker.pem", tmp_path / "broker.key")

    def guard(connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("X-Key") == "tick tock":
            return None
        return connection.respond(HTTPStatus.UNAUTHORIZED, "who are you?\n")

    async def handle(connection: ServerConnection) -> None:
        await connection.send("welcome")
        await connection.wait_closed()

    headers = tmp_path / "headers"
    headers.touch(0o600)
    headers.write_text("X-Key: tick tock\n")
    async with venue(handle, ssl=context, process_request=guard) as url:
        known = WebSocketConnector(url=url, headers_file=str(headers), ca_file=str(tmp_path / "ca.pem"))
        answers = await asyncio.to_thread(lambda: list(known.check()))
        assert [(each.ok, each.key) for each in answers] == [(True, "url")]
        source = known.open("venue", 1.0)
        assert isinstance(source, WebSocketSource)
        async with reading(source) as found:
            await until(lambda: payloads(found) == [b"welcome"])
        stranger = WebSocketConnector(url=url, ca_file=str(tmp_path / "ca.pem"))
        (refused,) = await asyncio.to_thread(lambda: list(stranger.check()))
        assert (refused.ok, refused.key, "401" in refused.message) == (False, "url", True)
        nameless = stranger.open("venue", 1.0)
        assert isinstance(nameless, WebSocketSource)
        starting = asyncio.create_task(nameless.start())
        await until(lambda: "401" in nameless.connection.why)
        await nameless.stop()
        await starting


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"url": "ws://x", "ca_file": "ca.pem"}, "ca_file"),
        ({"url": "wss://x", "ca_file": "missing"}, "ca_file"),
        ({"url": "ws://x", "headers_file": "missing"}, "headers_file"),
        ({"url": "ws://x", "format": "none"}, "format"),
    ],
)
def test_what_cannot_be_used_is_named(settings: dict[str, str], key: str) -> None:
    failed = [each.key for each in WebSocketConnector(**settings).check() if not each.ok]
    assert failed == [key]


def test_a_line_that_is_no_header_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.touch(0o600)
    file.write_text("secret\n")
    with pytest.raises(SettingError, match="NAME: VALUE"):
        WebSocketConnector(url="ws://x", headers_file=str(file)).open("venue", 1.0)


# What venues send, as their documentation shows it.

FRAMES: dict[str, list[tuple[Any, list[tuple[str, str, str, int, str, str]]]]] = {
    "binance": [
        ({"result": None, "id": 1}, []),
        (
            {"e": "trade", "E": 1672515782136, "s": "BNBBTC", "t": 12345, "p": "0.001", "q": "100",
             "T": 1672515782136, "m": True, "M": True},
            [("BINANCE:BNBBTC", "0.001", "100", 1672515782136 * 10**6, "sell", "12345")],
        ),
        (
            {"stream": "btcusdt@aggTrade", "data": {"e": "aggTrade", "E": 123456789, "s": "BTCUSDT",
             "a": 5933014, "p": "61837.63", "q": "0.5", "f": 100, "l": 105, "T": 1672515782137, "m": False}},
            [("BINANCE:BTCUSDT", "61837.63", "0.5", 1672515782137 * 10**6, "buy", "5933014")],
        ),
        ({"stream": "btcusdt@depth@100ms", "data": {"e": "depthUpdate", "E": 1}}, []),
    ],
    "coinbase": [
        ({"type": "subscriptions", "channels": []}, []),
        (
            {"type": "match", "trade_id": 10, "sequence": 50, "maker_order_id": "ac92",
             "taker_order_id": "132f", "time": "2014-11-07T08:19:27.028459Z", "product_id": "BTC-USD",
             "size": "5.23512", "price": "400.23", "side": "sell"},
            [("COINBASE:BTC-USD", "400.23", "5.23512", 1415348367028459000, "buy", "10")],
        ),
    ],
    "kraken": [
        ({"method": "subscribe", "success": True, "result": {"channel": "trade"}}, []),
        ({"channel": "heartbeat"}, []),
        (
            {"channel": "trade", "type": "update", "data": [
                {"symbol": "MATIC/USD", "side": "sell", "price": 0.5117, "qty": 40.0, "ord_type": "market",
                 "trade_id": 4665906, "timestamp": "2023-09-25T07:49:37.708706Z"},
                {"symbol": "MATIC/USD", "side": "buy", "price": 0.5118, "qty": 2, "ord_type": "limit",
                 "trade_id": 4665907, "timestamp": "2023-09-25T07:49:37.708707Z"},
            ]},
            [("KRAKEN:MATIC/USD", "0.5117", "40", 1695628177708706000, "sell", "4665906"),
             ("KRAKEN:MATIC/USD", "0.5118", "2", 1695628177708707000, "buy", "4665907")],
        ),
    ],
    "okx": [
        ({"event": "subscribe", "arg": {"channel": "trades", "instId": "BTC-USDT"}, "connId": "a4"}, []),
        (
            {"arg": {"channel": "trades", "instId": "BTC-USDT"}, "data": [
                {"instId": "BTC-USDT", "tradeId": "130639474", "px": "42219.9", "sz": "0.12060306",
                 "side": "buy", "ts": "1630048897897", "count": "3"}]},
            [("OKX:BTC-USDT", "42219.9", "0.12060306", 1630048897897 * 10**6, "buy", "130639474")],
        ),
    ],
    "bybit": [
        ({"success": True, "ret_msg": "", "conn_id": "2324d924", "req_id": "", "op": "subscribe"}, []),
        (
            {"topic": "publicTrade.BTCUSDT", "type": "snapshot", "ts": 1672304486868, "data": [
                {"T": 1672304486865, "s": "BTCUSDT", "S": "Buy", "v": "0.001", "p": "16578.50",
                 "L": "PlusTick", "i": "20f43950-d8dd-5b31-9112-a178eb6023af", "BT": False}]},
            [("BYBIT:BTCUSDT", "16578.5", "0.001", 1672304486865 * 10**6, "buy",
              "20f43950-d8dd-5b31-9112-a178eb6023af")],
        ),
    ],
}  # fmt: skip


def test_every_built_in_format_of_messages_is_here() -> None:
    assert set(FRAMES) == set(names(of_messages=True))


@pytest.mark.parametrize("name", FRAMES)
def test_what_a_venue_sends_is_read(name: str) -> None:
    made = FormatDecoder(load_format(name, of_messages=True), 1 << 20)
    for frame, expected in FRAMES[name]:
        sent = Incoming("venue", 0, 0, None, json.dumps(frame).encode(), ts_recv_ns=NOW)
        parts, passed_over = made.parts(sent)
        records = [part.record for part in parts]
        assert not any(isinstance(each, MalformedRecord) for each in records), records
        found = [
            (each.key, str(each.price), str(each.size), each.ts_event, each.side, each.id)
            for each in records
            if isinstance(each, Trade)
        ]
        assert found == expected
        assert passed_over == (not expected)


def test_the_best_levels_of_okx_are_a_book() -> None:
    made = FormatDecoder(load_format("okx", of_messages=True), 1 << 20)
    levels = {
        "asks": [["8476.98", "415", "0", "13"], ["8477", "7", "0", "2"]],
        "bids": [["8476.97", "256", "0", "12"]],
        "instId": "BTC-USDT", "ts": "1597026383085", "seqId": 123456,
    }  # fmt: skip
    frame = json.dumps({"arg": {"channel": "books5", "instId": "BTC-USDT"}, "data": [levels]}).encode()
    ((part,), _) = made.parts(Incoming("venue", 0, 0, None, frame, ts_recv_ns=NOW))
    assert isinstance(part.record, Book)
    found = [
        [(str(price), str(size)) for price, size in side] for side in (part.record.bids, part.record.asks)
    ]
    assert found == [[("8476.97", "256")], [("8476.98", "415"), ("8477", "7")]]
    assert (part.record.key, part.record.ts_event) == ("OKX:BTC-USDT", 1597026383085 * 10**6)


def test_best_quotes_of_binance_have_the_time_of_their_receipt() -> None:
    made = FormatDecoder(load_format("binance", of_messages=True), 1 << 20)
    quote = {"u": 400900217, "s": "BNBUSDT", "b": "25.3519", "B": "31.21", "a": "25.3652", "A": "40.66"}
    frame = json.dumps({"stream": "bnbusdt@bookTicker", "data": quote}).encode()
    ((part,), _) = made.parts(Incoming("venue", 0, 0, None, frame, ts_recv_ns=NOW))
    assert isinstance(part.record, Quote)
    assert (part.record.ts_event, part.record.clock, str(part.record.ask)) == (NOW, "receive", "25.3652")
