"""From the engine's end to answers again: with a spare engine or without, from snapshots or the log alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from bench.data.outage import TOPIC, Fresh, live, send
from bench.figures import Figure, Goal, Setting
from bench.recovery.daemon import engine_of
from bench.recovery.kept import NAMES, Kept, Took, back, figures_of, place
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config, session_of
from daemon.config import schema
from daemon.gateway.engine_manager import RESTART_AFTER_S
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.durations import Duration
from feeds.mock_broker import MockBroker, MockUnavailable
from feeds.synthetic import SyntheticTape

_S = 1_000_000_000


@dataclass(frozen=True)
class RestartPlan:
    """``bars``: of one second in each window. ``rounds``: of the row with a goal, and ``repeats`` of the
    others. ``spare_s``: until a spare engine is ready.
    """

    markets: int = 4
    bars: int = 64
    rounds: int = 10
    repeats: int = 3
    spare_s: float = 15.0
    longest_s: float = 120.0


QUICK = RestartPlan(markets=1, bars=4, rounds=1, repeats=1, spare_s=8.0)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes and the tape model reads live trades from the embedded broker, four sessions
    with full windows and six questions each. Its engine is killed (`kill -9`). The time runs from there to
    the first answer to a client that asks again and again, to the first one that no bar is read again for any
    more (without the flag `warm_up`), and to the moment when every session has an answer read from a trade
    made since, for which a bar of a second must begin and end. Snapshots, once a second, are on a disk or on
    a tmpfs, or there are none. The reference starts a new process and reads the windows again.
    """
    try:
        yield from figures(run.sized(RestartPlan(), QUICK), run.threads)
    except MockUnavailable as error:
        raise MeasurementFailed(str(error)) from None


def figures(plan: RestartPlan, threads: int) -> Iterator[Figure]:
    """Of each way to be ready."""
    setting: Setting = {"sessions": plan.markets, "bars in a window": plan.bars}
    slow = uvloop.run(_measure(plan, threads, plan.repeats, spare=False, kept="none"))
    rows: tuple[tuple[bool, Kept], ...] = (
        (False, "on disk"),
        (True, "none"),
        (True, "in memory"),
        (True, "on disk"),
    )
    for spare, kept in rows:
        goals = {NAMES[0]: Goal(2.0, of="ours")} if spare and kept == "on disk" else {}
        rounds = plan.rounds if goals else plan.repeats
        found = uvloop.run(_measure(plan, threads, rounds, spare=spare, kept=kept))
        how = {"spare": "yes" if spare else "no", "snapshots": kept}
        yield from figures_of(found, slow, {**setting, **how}, "without either", goals)


async def _measure(plan: RestartPlan, threads: int, rounds: int, *, spare: bool, kept: Kept) -> list[Took]:
    """Of each kill."""
    markets = instruments(plan.markets, plan.bars)
    with MockBroker() as broker, place(kept) as folder:
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
            recovery=schema.RecoveryConfig(schema.OFF if kept == "none" else Duration(_S), folder),
            source=schema.SourceConfig(
                kind="kafka", backlog_policy="wait", kafka=KafkaSourceConnector(broker.bootstrap, (TOPIC,))
            ),
            sink=schema.SinkConfig(),
        )
        names = [session.name for session in settings.sessions]
        sink = Fresh(set(names), began)
        # every kill as the first one: engines that live for less than a minute wait longer
        gateway = make_gateway(
            settings,
            routes=[SinkRoute(sink, "answers.v1")],
            spare_after_s=0.0,
            restart_after_s=RESTART_AFTER_S[:1],
        )
        trading = asyncio.create_task(live(producer, templates))
        found = list[Took]()
        try:
            await gateway.start()
            await asyncio.wait_for(sink.all.wait(), plan.longest_s)
            for _ in range(rounds):
                await asyncio.sleep(plan.spare_s)
                found.append(await _killed(gateway, names, plan.longest_s))
        except TimeoutError:
            raise MeasurementFailed(f"no live answers within {plan.longest_s:.0f} s") from None
        finally:
            trading.cancel()
            await asyncio.gather(trading, return_exceptions=True)
            await gateway.stop()
            await producer.stop()
        return found


async def _killed(gateway: Gateway, names: list[str], longest_s: float) -> Took:
    assert gateway.query is not None  # configured by `bench.stream.serving`
    since = time.time_ns()
    os.kill(engine_of(os.getpid()), signal.SIGKILL)
    async with asyncio.timeout(longest_s):
        return await back(gateway.query.endpoint, names, since)
