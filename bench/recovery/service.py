"""From the end of a whole daemon, or of its gateway, to answers of the same one started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvloop
from aiokafka import AIOKafkaProducer

from bench.data.outage import TOPIC, live, send
from bench.figures import Figure, Setting
from bench.recovery.daemon import Daemon, engine_of, session_tables
from bench.recovery.kept import KEPT, Kept, Took, back, figures_of, place
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from feeds.mock_broker import MockBroker, MockUnavailable
from feeds.synthetic import Instrument, SyntheticTape

_S = 1_000_000_000
End = Literal["gateway killed", "both killed", "stopped"]
ENDS: tuple[End, ...] = ("gateway killed", "both killed", "stopped")


@dataclass(frozen=True)
class ServicePlan:
    """``bars``: of one second in each window. ``session_s``: the group's session timeout."""

    markets: int = 4
    bars: int = 64
    repeats: int = 3
    session_s: int = 6
    settle_s: float = 4.0
    longest_s: float = 180.0
    ends: tuple[End, ...] = ENDS
    kept: tuple[Kept, ...] = KEPT


_QUICK = ServicePlan(markets=1, bars=4, repeats=1, settle_s=2.0)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model reads live trades from the embedded broker, four sessions
    with full windows and six questions each; no engine is spare. Its gateway is killed (`kill -9`), or
    gateway and engine at once, or the daemon is stopped (SIGTERM). It is started again at that moment, or
    once it has stopped. The time runs from the signal to the first answer to a client that asks again and
    again, to the first one that no bar is read again for any more (without the flag `warm_up`), and to the
    moment when every session has an answer read from a trade made since. Snapshots, once a second, are on a
    disk or on a tmpfs; the reference has none, and reads the windows again from the log. Killed members stay
    in the consumer group for the session timeout, which bounds the live answers.
    """
    try:
        yield from figures(run.sized(ServicePlan(), _QUICK), run.threads)
    except MockUnavailable as error:
        raise MeasurementFailed(str(error)) from None


def figures(plan: ServicePlan, threads: int) -> Iterator[Figure]:
    """Of each end and each place of snapshots."""
    found = {kept: uvloop.run(_measure(plan, threads, kept)) for kept in plan.kept}
    for end in plan.ends:
        for kept in plan.kept:
            if kept == "none":
                continue
            setting: Setting = {
                "sessions": plan.markets,
                "bars in a window": plan.bars,
                "what ends": end,
                "snapshots": kept,
            }
            yield from figures_of(found[kept][end], found["none"][end], setting, "from the log alone")


async def _measure(plan: ServicePlan, threads: int, kept: Kept) -> dict[End, list[Took]]:
    markets = instruments(plan.markets, plan.bars)
    names = [market.symbol.lower() for market in markets]
    took: dict[End, list[Took]] = {end: [] for end in plan.ends}
    with MockBroker() as broker, place(kept) as folder:
        broker.create_topic(TOPIC, len(markets))
        text = _config(plan, broker.bootstrap, markets, threads, kept, folder)
        daemon = Daemon(Path(folder) / "daemon", text)
        async with _trading(broker.bootstrap, markets, plan.bars):
            try:
                async with asyncio.timeout(plan.longest_s):
                    began = time.time_ns()
                    daemon.start()
                    await daemon.until("ready")
                    await back(daemon.endpoint, names, began)
                for end in [*plan.ends] * plan.repeats:
                    await asyncio.sleep(plan.settle_s)
                    async with asyncio.timeout(plan.longest_s):
                        took[end].append(await _end(daemon, names, end))
                        await daemon.until("ready")
            except TimeoutError:
                why = f"no live answers within {plan.longest_s:.0f} s\n{daemon.log[-3000:]}"
                raise MeasurementFailed(why) from None
            finally:
                daemon.kill()
    return took


async def _end(daemon: Daemon, names: list[str], end: End) -> Took:
    """End it, start it again and wait until all is back."""
    engine, since = engine_of(daemon.pid), time.time_ns()
    daemon.send(signal.SIGTERM if end == "stopped" else signal.SIGKILL)
    if end == "both killed":
        with suppress(ProcessLookupError):  # it has noticed the end of its gateway
            os.kill(engine, signal.SIGKILL)
    await daemon.gone()
    daemon.start()
    return await back(daemon.endpoint, names, since)


def _config(
    plan: ServicePlan, bootstrap: str, markets: list[Instrument], threads: int, kept: Kept, folder: str
) -> str:
    """The configuration without its ports."""
    return "\n".join(
        [
            *session_tables(markets, plan.bars),
            f"[model]\nthreads = {threads}",
            f'[source]\nkind = "kafka"\nbacklog_policy = "wait"\n[source.kafka]\nbootstrap = "{bootstrap}"',
            f'topics = ["{TOPIC}"]\nsession_timeout = "{plan.session_s}s"',
            '[sink.zeromq]\nendpoint = "tcp://127.0.0.1:*"',
            f'[recovery]\ninterval = "{0 if kept == "none" else 1}s"\ndirectory = "{folder}/snapshots"',
            "[process]\nspare_engine = false",
        ]
    )


@asynccontextmanager
async def _trading(bootstrap: str, markets: list[Instrument], bars: int) -> AsyncIterator[None]:
    """Full windows, and live trades meanwhile."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    templates = [next(iter(SyntheticTape(market, 7).second(0))) for market in markets]
    began = time.time_ns()
    for number, trade in enumerate(templates):
        for bar in range(bars):
            await send(producer, number, trade, began - (bars - bar) * _S)
    await producer.flush()
    going_on = asyncio.create_task(live(producer, templates))
    try:
        yield
    finally:
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
        await producer.stop()
