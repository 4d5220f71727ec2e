"""From tick to answer on the wall clock: by ticks a second, sessions, and with prompts that keep coming."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import msgspec
import uvloop

from bench.figures import Figure, Goal, Setting, quantiles
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.processes import child
from bench.stream.serving import config, rest, serving, total, windowed
from daemon.api.client import QueryClient
from daemon.api.messages import QueryError
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from feeds.codec import decode_message
from feeds.connector import SinkRoute
from feeds.market_data import Answer
from feeds.source import Incoming
from feeds.synthetic import Instrument
from lab.plan.host_probe import CountingSink
from lab.queued_source import QueuedSource

_S = 1_000_000_000
_SLICE_S = 0.01
_SETTLE_S = 3.0
_QUANTILES = {"P50": (0.5, 1), "P99": (0.99, 100), "P99.9": (0.999, 1000)}
"""And the fewest samples that tell it."""
_COUNTERS = ("foretick_bars_total", "foretick_freshness_misses_total", "foretick_versions_total")
_PROMPT = "The desk asks about a market that no tape shows. " * 20
_RECORD = (
    b'{"type":"trade","venue":"BENCH","symbol":"%b","ts_event":%d,"ts_recv":%d,"seq":%d,"price":"%d.%02d",'
    b'"size":"0.001","side":"buy","id":"1"}'
)


@dataclass(frozen=True)
class TicksPlan:
    """``rates``: ticks a second of all sessions together. ``seconds`` of each condition.

    ``clients`` of the flood; ``window``: bars before the first condition.
    """

    rates: tuple[int, ...] = (1000, 10_000, 100_000)
    sessions: tuple[int, ...] = (1, 10, 100)
    seconds: int = 12
    clients: int = 16
    window: int = 64


_QUICK = TicksPlan(rates=(100,), sessions=(2,), seconds=3, clients=2, window=4)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes with the tape model, bars of a second, six standing questions a session and
    the default objective of three bars. Trades are made on the wall clock in the gateway's process, which
    pays for it. The time runs from the trade that closes a bar to each answer read from a version that ends
    with it; versions that are coalesced have no answers. Then the same with 16 clients, each of which sends
    one prompt after the other; their reference is the row without them, and that of rows without them is the
    lowest rate.
    """
    plan = run.sized(TicksPlan(), _QUICK)
    for sessions in plan.sessions:
        lowest = ""
        before: dict[str, float] = {}
        for rate in plan.rates:
            quiet, flooded = uvloop.run(_measure(plan, rate, sessions, run.threads))
            setting: Setting = {"sessions": sessions, "ticks a second": rate, "prompts": "none"}
            yield from _figures(quiet, setting, lowest, before)
            alone = quantiles_of(quiet)
            setting = setting | {"prompts": f"{plan.clients} clients"}
            yield from _figures(flooded, setting, "without prompts", alone)
            yield Figure("prompts answered a second", flooded.prompts, setting=setting)
            if not lowest:
                lowest, before = f"{rate} ticks a second", alone


@dataclass(frozen=True)
class Found:
    """``took_ns``: from tick to answer. ``kept``, ``answered``: shares of bars. ``rate``: ticks a second."""

    took_ns: list[int]
    kept: float
    answered: float
    rate: float
    prompts: float = 0.0


def quantiles_of(found: Found) -> dict[str, float]:
    """Times from tick to answer in ms, by quantile, where there are enough of them."""
    return {
        name: quantiles(found.took_ns, at)[0] / 1e6
        for name, (at, least) in _QUANTILES.items()
        if len(found.took_ns) >= least
    }


def _figures(
    found: Found, setting: Setting, against: str, reference: Mapping[str, float]
) -> Iterator[Figure]:
    for name, ours in quantiles_of(found).items():
        other = reference.get(name)
        yield Figure(
            f"tick to answer {name}", ours, "ms", setting=setting, n=len(found.took_ns),
            against=against if other else "", reference=other,
            goal=Goal(1.5) if other and name == "P99" else None,
        )  # fmt: skip
    goal = Goal(0.99, "at least", "ours")
    yield Figure("freshness objective met", found.kept, "share of bars", setting=setting, goal=goal)
    yield Figure("bars answered", found.answered, "share of bars", setting=setting)
    yield Figure("ticks a second, taken", found.rate, setting=setting)


async def _measure(plan: TicksPlan, rate: int, sessions: int, threads: int) -> tuple[Found, Found]:
    """Without prompts, then with them."""
    markets = instruments(sessions, 1)
    source, sink = LiveSource(markets, rate, plan.window), AnswerTimes()
    settings = msgspec.structs.replace(
        config(schema.ModelConfig(threads=threads), [windowed(market, plan.window) for market in markets]),
        source=schema.SourceConfig(backlog_policy="skip"),
        sink=schema.SinkConfig(),
    )
    async with serving(settings, source, [SinkRoute(sink, "answers.v1")]) as gateway:
        await rest(gateway)
        source.live.set()
        await asyncio.sleep(_SETTLE_S)
        quiet = await condition(gateway, source, sink, plan.seconds)
        assert gateway.query is not None  # configured by `bench.stream.serving`
        with child(_prompts, gateway.query.endpoint, plan.clients) as pipe:
            await asyncio.sleep(_SETTLE_S)
            pipe.send("how many")
            before = await asyncio.to_thread(pipe.recv)
            flooded = await condition(gateway, source, sink, plan.seconds)
            pipe.send("how many")
            prompts = (await asyncio.to_thread(pipe.recv) - before) / plan.seconds
            pipe.send("stop")
    return quiet, replace(flooded, prompts=prompts)


async def condition(gateway: Gateway, source: LiveSource, sink: AnswerTimes, seconds: int) -> Found:
    """What comes within ``seconds``. Raises MeasurementFailed where nothing does."""

    def counts() -> tuple[float, ...]:
        return time.monotonic(), source.given, *(total(gateway, counter) for counter in _COUNTERS)

    before = counts()
    first = len(sink.seen)
    await asyncio.sleep(seconds)
    seen = sink.seen[first:]
    wall, given, bars, missed, versions = (b - a for a, b in zip(before, counts(), strict=True))
    took = [at - closed for at, symbol, bar in seen if (closed := source.closed.get((symbol, bar)))]
    if not took:
        raise MeasurementFailed("no answer came")
    return Found(took, 1 - missed / bars, min(1.0, versions / bars), given / wall)


class AnswerTimes(CountingSink):
    """Notes when which session had an answer of which bar."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str, int]] = []
        """Now, symbol, second of the newest trade."""

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Note an answer."""
        message = decode_message(payload)
        if isinstance(message, Answer):
            self.seen.append((time.time_ns(), message.symbol.partition(":")[2], message.as_of // _S))


class LiveSource(QueuedSource):
    """A ``window`` of bars; once ``live`` is set, trades of the present, made when they are due."""

    def __init__(self, markets: list[Instrument], rate: int, window: int) -> None:
        super().__init__("live", "dropping")
        self._markets, self._rate, self._window = markets, rate, window
        self.live, self._ended = asyncio.Event(), False
        self._prices = [market.price_ticks * market.tick // 10_000_000 for market in markets]
        """Hundredths."""
        self.given = 0
        self._second = [0] * len(markets)
        self.closed: dict[tuple[str, int], int] = {}
        """When a bar was closed, by symbol and its second."""

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """The window, then 100 batches a second until `stop`."""
        first = (time.time_ns() // _S - self._window - 1) * _S
        for bar in range(self._window + 1):
            yield [self._trade(number, first + bar * _S) for number in range(len(self._markets))]
        await self.live.wait()
        began, before = time.time_ns(), self.given
        while not self._ended:
            await asyncio.sleep(_SLICE_S)
            now = time.time_ns()
            due = (now - began) * self._rate // _S - (self.given - before)
            if due:
                yield [self._trade(self.given % len(self._markets), now) for _ in range(due)]

    async def stop(self) -> None:
        """End."""
        self._ended = True
        self.live.set()

    def price(self, number: int, at: int) -> int:
        """Of the next trade in a market, at Unix ns; hundredths."""
        return self._prices[number] + self.given % 7

    def _trade(self, number: int, at: int) -> Incoming:
        self.given += 1
        price, market = self.price(number, at), self._markets[number]
        if at // _S > self._second[number]:
            self.closed[market.symbol, self._second[number]] = at
            self._second[number] = at // _S
        fields = (market.symbol.encode(), at, at, self.given, price // 100, price % 100)
        return Incoming("live", 0, self.given, market.key.encode(), _RECORD % fields, ts_recv_ns=at)


def _prompts(endpoint: str, clients: int, pipe: Connection) -> None:
    """One prompt after the other in ``clients`` threads, until "stop"."""
    answered = [0] * clients
    ended = threading.Event()

    def run(number: int) -> None:
        with QueryClient(endpoint, timeout_s=30.0) as client:
            turn = 0
            while not ended.is_set():
                turn += 1
                try:
                    client.complete(f"{number}.{turn} {_PROMPT}", max_tokens=4)
                    answered[number] += 1
                except QueryError:
                    ended.wait(0.1)  # refused while tapes are late

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    while pipe.recv() != "stop":
        pipe.send(sum(answered))
    ended.set()
