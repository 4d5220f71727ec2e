"""A quiet day: two venues whose hours are ten seconds, so that a day is four minutes.

`V` trades round the clock, much by day and little at night. `X` opens with a rush, has a quiet lunch, closes,
and is silent until its next morning, as its calendar says. The time from trade to trade is by the clock of
alerts: at night V trades once in four seconds of that clock.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from feeds.mock_broker import MockBroker
from tests.e2e.faults.watched import Watched
from tests.kit import trade
from tests.kit.daemon import Daemon, Topics, kafka_toml

DAY_S = 240.0
OPEN_MINUTE, OPEN_MINUTES = 1, 2
"""Of each day: from its second minute on, for two minutes."""
DAYS = 12
RATES: tuple[tuple[float, float, float], ...] = (
    (60, 0.25, 0.0),  # night
    (75, 1.0, 1.5),  # X opens
    (105, 1.0, 1.0),
    (135, 0.7, 0.4),  # lunch
    (180, 1.0, 1.0),
    (240, 0.35, 0.0),  # evening, as on a weekend: X is silent
)
"""Until when, s of the day; trades of V and of X in a second of the clock of alerts."""
SYMBOLS = {"btc": "V:BTC", "stock": "X:STOCK"}
MARGIN_S = 1.5
"""X begins after it has opened, and ends before it closes."""


def midnight(now: datetime) -> datetime:
    """The beginning of the first day: a minute, as calendars have minutes."""
    return now.astimezone(UTC).replace(second=0, microsecond=0)


def calendar(begin: datetime) -> str:
    """The configuration of X's hours, on each of the next days."""
    days = [begin + timedelta(seconds=DAY_S * n, minutes=OPEN_MINUTE) for n in range(DAYS)]
    hours = [f"mon-sun {each:%H:%M}-{each + timedelta(minutes=OPEN_MINUTES):%H:%M}" for each in days]
    shown = ", ".join(f'"{each}"' for each in hours)
    return f'[[quality.calendars]]\nvenue = "X"\nzone = "UTC"\nhours = [{shown}]\n'


def rates(second: float) -> tuple[float, float]:
    """Trades of V and X a second, at a second of the day."""
    v, x = next((v, x) for until, v, x in RATES if second < until)
    opens, closes = OPEN_MINUTE * 60, (OPEN_MINUTE + OPEN_MINUTES) * 60
    return v, x if opens + MARGIN_S <= second < closes - MARGIN_S else 0.0


class QuietMarket:
    """Both venues, while the block lasts. ``faster``: the clock of alerts; ``begin``: of the first day."""

    def __init__(self, topics: Topics, begin: datetime, faster: float) -> None:
        self._topics, self._begin, self._faster = topics, begin.timestamp(), faster
        self._random = random.Random(11)
        self._cents = dict.fromkeys(SYMBOLS.values(), 10_000)
        self._numbers = {symbol: count(1) for symbol in SYMBOLS.values()}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._trade(at, each)) for at, each in enumerate(SYMBOLS.values())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _trade(self, venue: int, symbol: str) -> None:
        while True:
            rate = rates((time.time() - self._begin) % DAY_S)[venue] * self._faster
            if not rate:
                await asyncio.sleep(0.2)
                continue
            self._cents[symbol] += self._random.randint(-4, 4)
            payload = trade(
                symbol, time.time_ns(), f"{self._cents[symbol] / 100:.2f}", seq=next(self._numbers[symbol])
            )
            await self._topics.produce([(symbol, payload)])
            await asyncio.sleep(self._random.expovariate(rate))


@contextlib.asynccontextmanager
async def quiet_day(folder: Path, faster: float) -> AsyncIterator[Watched]:
    """A daemon with the market of a day that has begun."""
    begin = midnight(datetime.now(UTC))
    with MockBroker() as broker:
        for topic in ("md.trades.v1", "answers.v1", "dlq.v1"):
            broker.create_topic(topic)
        more = {"source": 'sequence = "symbol"', "recovery": f'directory = "{folder}"'}
        text = kafka_toml(broker.bootstrap, more=more, sessions=SYMBOLS) + "\n" + calendar(begin)
        with Daemon(folder / "daemon", text) as daemon:
            await daemon.ready(600)
            async with (
                Topics(broker.bootstrap, "md.trades.v1", "answers.v1") as topics,
                QuietMarket(topics, begin, faster).open(),
            ):
                made = Watched(daemon)
                await made.healthy()
                yield made
