"""From the end of a daemon to answers of its standby, or of the same daemon started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from bench.data.outage import TOPIC
from bench.figures import Figure, Goal, Setting
from bench.recovery.daemon import Daemon, session_tables
from bench.recovery.delivery import Trades, create_topics
from bench.recovery.kept import figures_of
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from feeds.codec import decode_message
from feeds.market_data import Answer
from feeds.synthetic import Instrument

Way = Literal["standby", "static member", "new member"]
_NEXT: dict[Way, str] = {"standby": "its standby", "static member": "the same daemon, a static member"}
ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}


@dataclass(frozen=True)
class StandbyPlan:
    """``bars``: of one second in each window. ``session_s``: the group's session timeout."""

    markets: int = 4
    bars: int = 64
    repeats: int = 3
    session_s: int = 6
    settle_s: float = 5.0
    longest_s: float = 120.0


QUICK = StandbyPlan(markets=1, bars=4, repeats=1, settle_s=1.0)


class Took(NamedTuple):
    """Seconds from a daemon's end to the first answer of its successor, and to live ones of all sessions."""

    first: float
    live: float


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Daemons of two processes and the tape model read four markets, 20 trades a second each, from the Kafka
    that `--broker` names, and answer six questions a session to a topic of it. Two are standbys of each other
    (`recovery.standby`). The one that answers is killed (`kill -9`), or stopped. The time runs from the
    signal to the first answer of the other one, and until every session has one from a trade made since. A
    kill is noticed by the group's session timeout alone, which is the limit. Without a standby the same
    daemon is started again at the moment of the signal, or once it has stopped: as a static member
    (`source.kafka.instance`), or as a new member of the group, which is the reference.
    """
    if not run.broker:
        raise MeasurementFailed("name a Kafka with --broker HOST:PORT: the embedded one has no second member")
    return figures(run.sized(StandbyPlan(), QUICK), run.broker, run.threads)


def figures(plan: StandbyPlan, broker: str, threads: int) -> Iterator[Figure]:
    """Of both ends, by who answers next."""
    again = uvloop.run(_measure(plan, broker, threads, "new member"))
    for way in ("standby", "static member"):
        took = uvloop.run(_measure(plan, broker, threads, way))
        setting: Setting = {
            "sessions": plan.markets,
            "bars in a window": plan.bars,
            "session timeout, s": plan.session_s,
            "answers next": _NEXT[way],
        }
        for end in ENDS:
            names = (f"{end} to the first answer", f"{end} to live answers of all")
            goals = dict.fromkeys(names, Goal(1.0)) if way == "standby" else {}
            yield from figures_of(took[end], again[end], setting, "a new member", goals, names)


async def _measure(plan: StandbyPlan, broker: str, threads: int, way: Way) -> dict[str, list[Took]]:
    markets, name = instruments(plan.markets, plan.bars), f"bench.{time.time_ns()}"
    await create_topics(broker, {f"{name}.{TOPIC}": len(markets), name: 1})
    sessions = {market.symbol.lower() for market in markets}
    found: dict[str, list[Took]] = {end: [] for end in ENDS}
    with TemporaryDirectory() as folder:
        text = config_text(plan, broker, name, markets, threads, way)
        daemons = [Daemon(Path(folder) / str(n), text) for n in range(2 if way == "standby" else 1)]
        async with _trading(broker, name, markets, plan.bars), _reading(broker, name) as answers:
            try:
                async with asyncio.timeout(plan.longest_s):
                    for daemon in daemons:
                        daemon.start()
                        await daemon.until("ready", "standby")
                for end in [*ENDS] * plan.repeats:
                    found[end].append(await _end(plan, daemons, answers, sessions, end))
            except TimeoutError:
                logs = "\n".join(daemon.log[-2000:] for daemon in daemons)
                raise MeasurementFailed(f"no answers within {plan.longest_s:.0f} s\n{logs}") from None
            finally:
                for daemon in daemons:
                    daemon.kill()
    return found


async def _end(
    plan: StandbyPlan, daemons: list[Daemon], answers: _Answers, sessions: set[str], end: str
) -> Took:
    """End the first daemon of the list, which answers, and start it again; it becomes the last one."""
    serving = daemons[0]
    async with asyncio.timeout(plan.longest_s):
        await answers.live(sessions, time.time_ns())
        for other in daemons[1:]:
            await other.until("standby")
        await asyncio.sleep(plan.settle_s)
        epochs, since = dict(answers.epochs), time.time_ns()
        serving.send(ENDS[end])
        if len(daemons) == 1:
            await serving.gone()
            serving.start()
        first, live = await asyncio.gather(answers.of_a_new_epoch(epochs), answers.live(sessions, since))
        if len(daemons) > 1:
            await serving.gone()
            serving.start()
        daemons.append(daemons.pop(0))
        for daemon in daemons:
            await daemon.until("ready", "standby")
    return Took((first - since) / 1e9, (live - since) / 1e9)


def config_text(
    plan: StandbyPlan, broker: str, name: str, markets: Sequence[Instrument], threads: int, way: Way
) -> str:
    """The configuration without its ports."""
    return "\n".join(
        [
            *session_tables(markets, plan.bars),
            f"[model]\nthreads = {threads}",
            f'[source]\nkind = "kafka"\nbacklog_policy = "wait"\n[source.kafka]\nbootstrap = "{broker}"',
            f'topics = ["{name}.{TOPIC}"]\ngroup = "{name}"\nsession_timeout = "{plan.session_s}s"',
            f'instance = "{name}"' if way == "static member" else "",
            f'[sink.kafka]\nbootstrap = "{broker}"\ntopic = "{name}"',
            f'[recovery]\ninterval = "0s"\nstandby = {str(way == "standby").lower()}',
            "[process]\nspare_engine = false",
        ]
    )


@dataclass
class _Answers:
    """What was published, as a reader sees it: times are those of this process's wall clock, ns."""

    epochs: dict[str, int] = field(default_factory=dict)
    """Newest by session."""
    as_of: dict[str, int] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, answer: Answer) -> None:
        """Note an answer that was read."""
        self.epochs[answer.session] = max(answer.epoch, self.epochs.get(answer.session, 0))
        self.as_of[answer.session] = max(answer.as_of, self.as_of.get(answer.session, 0))
        self._news.set()
        self._news = asyncio.Event()

    async def of_a_new_epoch(self, before: dict[str, int]) -> int:
        """When the first answer of another engine than ``before`` is there."""
        while all(epoch <= before.get(name, 0) for name, epoch in self.epochs.items()):
            await self._news.wait()
        return time.time_ns()

    async def live(self, sessions: set[str], since: int) -> int:
        """When every session has an answer from a trade made after ``since``."""
        while not all(self.as_of.get(name, 0) >= since for name in sessions):
            await self._news.wait()
        return time.time_ns()


@asynccontextmanager
async def _trading(broker: str, name: str, markets: Sequence[Instrument], bars: int) -> AsyncIterator[None]:
    producer = AIOKafkaProducer(bootstrap_servers=broker)
    await producer.start()
    trades = Trades(producer, f"{name}.{TOPIC}", markets)
    await trades.window(bars)
    going_on = asyncio.create_task(trades.live())
    try:
        yield
    finally:
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
        with suppress(Exception):
            await producer.stop()


@asynccontextmanager
async def _reading(broker: str, topic: str) -> AsyncIterator[_Answers]:
    reader = AIOKafkaConsumer(topic, bootstrap_servers=broker, isolation_level="read_committed")
    await reader.start()
    answers = _Answers()

    async def read() -> None:
        async for record in reader:
            message = decode_message(record.value)
            if isinstance(message, Answer):
                answers.take(message)

    reading = asyncio.create_task(read())
    try:
        yield answers
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await reader.stop()
