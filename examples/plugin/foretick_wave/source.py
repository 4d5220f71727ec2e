"""`[source.wave]`: trades at prices on a sine wave."""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated

from feeds.connector import SourceConnector, about
from feeds.durations import Duration, parse_duration
from feeds.source import CommitPoint, ConnectionState, Incoming, Kind, Partition


class WaveConnector(SourceConnector, frozen=True):
    """Trades at prices on a sine wave."""

    symbol: Annotated[str, about("symbol of the trades, of the venue WAVE", min_length=1)] = "A"
    every: Annotated[Duration, about("time from one trade to the next")] = parse_duration("1s")
    trades: Annotated[int, about("trades in one wave", ge=2)] = 60

    def open(self, name: str, stop_timeout_s: float) -> "Wave":
        """The source, not started."""
        return Wave(name, self)


class Wave:
    """The source. It keeps nothing, so what is not read is lost."""

    kind: Kind = "dropping"
    lost = 0

    def __init__(self, name: str, settings: WaveConnector) -> None:
        self.name, self.state, self._settings = name, ConnectionState.STOPPED, settings

    async def start(self) -> None:
        """Connect."""
        self.state = ConnectionState.UP

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """One trade at a time, until it is stopped."""
        number = 0
        while self.state is ConnectionState.UP:
            now = time.time_ns()
            price = 100 + 10 * math.sin(2 * math.pi * number / self._settings.trades)
            trade = {"type": "trade", "venue": "WAVE", "symbol": self._settings.symbol, "size": "1"}
            payload = json.dumps(trade | {"ts_event": now, "ts_recv": now, "price": f"{price:.2f}"}).encode()
            yield [Incoming(self.name, 0, number, None, payload, {}, now)]
            number += 1
            await asyncio.sleep(self._settings.every / 1e9)

    def pause(self) -> None:
        """A source that keeps nothing cannot pause."""

    def resume(self) -> None:
        """It never paused."""

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        """There is nothing to read again."""

    async def stop(self) -> None:
        """Disconnect; `batches` ends."""
        self.state = ConnectionState.STOPPED
