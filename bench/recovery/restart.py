"""From the engine's end to answers again: with a spare engine or without, from snapshots or the log alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import uvloop
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from bench.data.outage import TOPIC, Fresh, live, send
from bench.figures import Figure, Goal, Setting
from bench.recovery.snapshots import QUESTION
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config, session_of
from daemon.api.async_client import AsyncQueryClient
from daemon.api.messages import Ask, AskReply
from daemon.config import schema
from daemon.front.engine_manager import RESTART_AFTER_S
from daemon.front.server import Front
from daemon.front.wiring import make_front
from feeds.connector import Route
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.durations import Duration
from feeds.mock_broker import MockBroker, MockUnavailable
from feeds.synthetic import SyntheticTape

_S = 1_000_000_000
_AGAIN_S = 0.01


@dataclass(frozen=True)
class RestartPlan:
    """``bars``: of one second in each window. ``spare_s``: until a spare engine is ready."""

    markets: int = 4
    bars: int = 64
    repeats: int = 2
    spare_s: float = 15.0
    longest_s: float = 120.0


QUICK = RestartPlan(markets=1, bars=4, repeats=1, spare_s=8.0)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model reads live trades from the embedded broker, four sessions
    with full windows and six questions each. Its engine is killed (`kill -9`). The time runs from there to
    the first answer to a client that asks again and again, and to the moment when every session has an answer
    read from a trade made since, for which a bar of a second must begin and end. The reference starts a new
    process and reads the windows again.
    """
    try:
        yield from figures(run.sized(RestartPlan(), QUICK), run.threads)
    except MockUnavailable as error:
        raise MeasurementFailed(str(error)) from None


def figures(plan: RestartPlan, threads: int) -> Iterator[Figure]:
    """Of each way to be ready."""
    setting: Setting = {"sessions": plan.markets, "bars in a window": plan.bars}
    slow = uvloop.run(_measure(plan, threads, spare=False, snapshots=False))
    for spare, snapshots in ((False, True), (True, False), (True, True)):
        found = uvloop.run(_measure(plan, threads, spare=spare, snapshots=snapshots))
        for name, took, reference in zip(
            ("first answer to a client", "live answers of every session"), found, slow, strict=True
        ):
            first = name.startswith("first")
            yield Figure(
                name,
                median(took),
                unit="s",
                setting={
                    **setting,
                    "spare": "yes" if spare else "no",
                    "snapshots": "yes" if snapshots else "no",
                },
                against="without either",
                reference=median(reference),
                goal=Goal(2.0, of="ours") if spare and snapshots and first else None,
                n=len(took),
                low=max(took),
                high=min(took),
            )


async def _measure(
    plan: RestartPlan, threads: int, *, spare: bool, snapshots: bool
) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the first answer to a client, and to live answers of every session."""
    markets = instruments(plan.markets, plan.bars)
    with MockBroker() as broker, TemporaryDirectory() as folder:
        broker.create_topic(TOPIC, len(markets))
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        await producer.start()
        began = time.time_ns()
        templates = []
        for number, market in enumerate(markets):
            trade = next(iter(SyntheticTape(market, 7).second(0)))
            templates.append(trade)
            for bar in range(plan.bars):
                await send(producer, number, trade, began - (plan.bars - bar) * _S)
        await producer.flush()
        settings = config(
            schema.ModelConfig(threads=threads),
            [replace(session_of(market), retention_records=plan.bars) for market in markets],
        )
        settings = replace(
            settings,
            process=replace(settings.process, spare_engine=spare),
            recovery=schema.RecoveryConfig(Duration(_S) if snapshots else schema.OFF, folder),
            source=schema.SourceConfig(
                kind="kafka", behind="wait", kafka=KafkaSourceConnector(broker.bootstrap, (TOPIC,))
            ),
            sink=schema.SinkConfig(),
        )
        names = [session.name for session in settings.sessions]
        sink = Fresh(set(names), began)
        # every kill as the first one: engines that live for less than a minute wait longer
        front = make_front(
            settings,
            routes=[Route(sink, "answers.v1")],
            spare_after_s=0.0,
            restart_after_s=RESTART_AFTER_S[:1],
        )
        trading = asyncio.create_task(live(producer, templates))
        first, found = list[float](), list[float]()
        try:
            await front.start()
            await asyncio.wait_for(sink.all.wait(), plan.longest_s)
            for _ in range(plan.repeats):
                await asyncio.sleep(plan.spare_s)
                answered, all_live = await _killed(front, sink, names, plan.longest_s)
                first.append(answered)
                found.append(all_live)
        except TimeoutError:
            raise MeasurementFailed(f"no live answers within {plan.longest_s:.0f} s") from None
        finally:
            trading.cancel()
            await asyncio.gather(trading, return_exceptions=True)
            await front.stop()
            await producer.stop()
        return first, found


async def _killed(front: Front, sink: Fresh, names: list[str], longest_s: float) -> tuple[float, float]:
    # the oldest child that is an engine
    engines = [pid for pid in _children() if "daemon.engine.process" in _command(pid)]
    since = time.time_ns()
    sink.expect(set(names), since)
    os.kill(min(engines), signal.SIGKILL)
    async with asyncio.timeout(longest_s):
        first = await _asked(front, names[0], since)
        await sink.all.wait()
    return first, (time.time_ns() - since) / _S


async def _asked(front: Front, session: str, since: int) -> float:
    """Ask until there is an answer; seconds since then."""
    assert front.query is not None  # configured by `bench.stream.serving`
    async with AsyncQueryClient(front.query.endpoint) as client:
        while True:
            reply = await client.request(Ask(0, session, QUESTION, 1))
            if isinstance(reply, AskReply):
                return (time.time_ns() - since) / _S
            await asyncio.sleep(_AGAIN_S)


def _children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
