"""Frames of a venue's stream to bars, beside a bare client of the same frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import uvloop
from msgspec.structs import replace
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

import ingest
from bench.figures import Figure, Setting, rate
from bench.run import MeasurementFailed, SuiteRun
from bench.stream import processes
from bench.stream.kafka import make_ingest
from bench.stream.processes import child, new_ring
from daemon.config.schema import SourceConfig
from feeds import columns
from feeds.connectors.websocket import WebSocketConnector

_SYMBOLS = 16
_TIMEOUT_S = 120.0
_DEFAULTS = SourceConfig()


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Trades in Binance's form from a server in a process of its own, as fast as they are taken: through the
    source, the format and the ring into bars as token ids in another process. The bare client receives and
    decodes the same frames by websockets and msgspec.
    """
    frames, repeats = run.sized((50_000, 3), (600, 1))
    ingest.warm_up()
    columns.warm_up()
    ours: list[float] = []
    bare: list[float] = []
    with child(_serve, frames) as pipe:
        url = f"ws://127.0.0.1:{pipe.recv()}"
        for _ in range(repeats):
            bare.append(uvloop.run(_bare(url, frames)))
            ours.append(uvloop.run(_bars(url, frames)))
        pipe.send("stop")
    setting: Setting = {"frames": frames, "symbols": _SYMBOLS}
    reference = rate("frames a second", frames, bare, "").ours
    found = rate("frames a second", frames, ours, "")
    yield replace(found, setting=setting, against="bare client", reference=reference)


def _frames(count: int) -> list[bytes]:
    """Trades of a second of event time for each hundred."""
    began = (time.time_ns() // 10**9 - count // 100 - 60) * 1000
    return [
        msgspec.json.encode(
            {
                "e": "trade", "E": began + 10 * n, "s": f"S{n % _SYMBOLS:02}", "t": n, "T": began + 10 * n,
                "p": f"{100 + n % 13}.{n % 100:02}", "q": "0.001", "m": n % 2 == 0, "M": True,
            }
        )
        for n in range(count)
    ]  # fmt: skip


def _serve(count: int, pipe: Connection) -> None:
    frames = _frames(count)

    async def send(connection: ServerConnection) -> None:
        for frame in frames:
            await connection.send(frame.decode())
        await connection.wait_closed()

    async def run() -> None:
        async with serve(send, "127.0.0.1", 0, compression=None) as server:
            pipe.send("ready")
            pipe.send(next(iter(server.sockets)).getsockname()[1])
            await asyncio.to_thread(pipe.recv)

    uvloop.run(run())


async def _bare(url: str, frames: int) -> float:
    """Seconds."""
    async with connect(url, compression=None) as connection, asyncio.timeout(_TIMEOUT_S):
        began = time.perf_counter()
        for _ in range(frames):
            msgspec.json.decode(await connection.recv(decode=False))
        return time.perf_counter() - began


async def _bars(url: str, frames: int) -> float:
    """Seconds until all frames are in bars. Raises MeasurementFailed where one is not."""
    symbols = [f"BINANCE:S{n:02}" for n in range(_SYMBOLS)]
    connector = WebSocketConnector(url=url, format="binance", max_waiting=frames)
    payloads = connector.payloads(_DEFAULTS.max_message_bytes)
    source = connector.open("websocket", 1.0)
    capacity = _DEFAULTS.ring_capacity
    with new_ring(capacity) as ring, child(processes.bars, ring.name, symbols, frames) as pipe:
        began = time.monotonic_ns()
        await source.start()
        taking = asyncio.create_task(make_ingest(source, ring, symbols, payloads=payloads).run())
        async with asyncio.timeout(_TIMEOUT_S):
            ended, bars, _ = await asyncio.to_thread(pipe.recv)
        await source.stop()
        await taking
    if source.lost or not bars:
        raise MeasurementFailed(f"{source.lost} frames were lost, {bars} bars made")
    return float(ended - began) / 1e9
