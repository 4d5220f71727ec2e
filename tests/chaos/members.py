"""Daemons that share a group's sessions, fed and asked without a pause while some of them come and go."""

import asyncio
import contextlib
import itertools
import re
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from aiokafka.partitioner import DefaultPartitioner

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, Ask, AskReply, ErrorReply, QueryError
from daemon.config.schema import UNTRAINED
from feeds.kafka_sink import KafkaSink
from tests.chaos.feed import TRADES, as_of, bar
from tests.chaos.moves import Move
from tests.chaos.reading import Tail
from tests.kit import until_slowly
from tests.kit.daemon import Daemon, kafka_toml
from tests.kit.forked import ForkedDaemon
from tests.kit.kafka import KafkaServer, create_topics

PARTITIONS = 10
QUESTIONS = {"up": ("YES", "NO"), "calm": ("YES", "NO")}
"""Choices by name. Free text might be left out where the next bar is there."""
SETTLED_S = 240.0
"""Longest wait for a group: daemons start, sessions time out, a broker comes back meanwhile."""
STOP_S = 60.0
EXIT_LIMIT = 10
PACE_S = 0.25
"""From one bar to the next."""
AHEAD, AHEAD_OF_ALL = 24, 1500
"""Most bars of a session that wait for answers, and of all: a slow machine is not flooded."""
ANSWERED_S = 60.0
"""A client that tries again, at any daemon, has its answer within this."""
_LEFT = "messages were left unpublished; their inputs will be read again"
TRY_S = 5.0
"""Of each try."""


def symbols_of(sessions: int, partitions: int = PARTITIONS) -> dict[str, str]:
    """VENUE:SYMBOL by session; all partitions have equally many."""
    every, found, held = list(range(partitions)), dict[str, str](), Counter[int]()
    for n in itertools.count():
        symbol = f"V:S{n}"
        partition = DefaultPartitioner()(symbol.encode(), every, every)
        if held[partition] * partitions < sessions:
            held[partition] += 1
            found[f"s{n}"] = symbol
        if len(found) == sessions:
            return found


def offsets_of(symbols: Mapping[str, str], bars: int, partitions: int = PARTITIONS) -> dict[str, range]:
    """Where the records of each session's first ``bars`` bars are, in its partition.

    Those of one partition take turns, record by record, in the order of ``symbols``.
    """
    every, shared = list(range(partitions)), dict[int, list[str]]()
    for name, symbol in symbols.items():
        shared.setdefault(DefaultPartitioner()(symbol.encode(), every, every), []).append(name)
    return {
        name: range(turn, bars * TRADES * len(names), len(names))
        for names in shared.values()
        for turn, name in enumerate(names)
    }


class Answered:
    """The answers topic while it grows: up to which bar each session is answered."""

    def __init__(self, bootstrap: str, topic: str, sessions: Mapping[str, str]) -> None:
        self._tail = Tail(bootstrap, topic)
        self._newest = {(name, question): -1 for name in sessions for question in QUESTIONS}
        self._seen = 0

    async def __aenter__(self) -> "Answered":
        await self._tail.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tail.stop()

    def to(self) -> int:
        """Event time (ns) up to which all sessions are answered; -1 before the first bar."""
        news = self._tail.ordered[self._seen :]
        self._seen += len(news)
        for each in news:
            key = each.answer.session, each.answer.question
            self._newest[key] = max(self._newest[key], each.answer.as_of)
        return min(self._newest.values())

    def behind(self, at_ns: int) -> list[str]:
        """Sessions that are not answered up to ``at_ns``."""
        return sorted({name for (name, _), newest in self._newest.items() if newest < at_ns})


@dataclass
class Asked:
    """What clients met: ``unanswered``: queries that no daemon answered within `ANSWERED_S`."""

    queries: int = 0
    unanswered: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Tries that failed, by code."""
    slowest_s: float = 0.0


class Members:
    """A group's daemons on topics of their own. It outlives event loops: see `running`.

    ``exactly_once``: each has a transactional id of its own.
    """

    def __init__(
        self,
        broker: KafkaServer,
        folder: Path,
        sessions: Mapping[str, str],
        *,
        exactly_once: bool,
        partitions: int = PARTITIONS,
        snapshots: bool = True,
    ) -> None:
        self.partitions, self._snapshots = partitions, snapshots
        self.broker, self.sessions, self.exactly_once = broker, sessions, exactly_once
        self.suffix = f".{uuid.uuid4().hex[:8]}"
        self.trades, self.answers = f"md.trades.v1{self.suffix}", f"answers.v1{self.suffix}"
        self.group = f"foretick{self.suffix}"
        self.daemons: list[Daemon] = []
        """Those that are members, the oldest first; also one that hangs."""
        self.moves: list[Move] = []
        self.left: list[Daemon] = []
        """Those that were members once."""
        self.exits: list[str] = []
        """Of daemons that ended by themselves."""
        self._folder, self._count = folder, 0
        self._hung: Daemon | None = None
        self._endpoints: dict[Daemon, str] = {}
        self.reader: Answered | None = None
        self._sink: KafkaSink | None = None

    async def create(self) -> None:
        """Create the topics."""
        topics = {self.trades: self.partitions, self.answers: 1, f"dlq.v1{self.suffix}": 1}
        await create_topics(self.broker.bootstrap, topics)

    def close(self) -> None:
        """Kill what runs."""
        for each in self.daemons:
            each.signal(signal.SIGKILL)
            each.wait(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[None]:
        """Within this block records can be sent, and answers are read."""
        self._sink = KafkaSink("test-trades", self.broker.bootstrap)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._sink.stop)
            await self._sink.start()
            self.reader = await stack.enter_async_context(
                Answered(self.broker.bootstrap, self.answers, self.sessions)
            )
            yield

    async def send(self, n: int, sessions: Mapping[str, str] | None = None) -> None:
        """Send bar ``n`` of these sessions, or of all."""
        assert self._sink is not None, "only within `clients`"
        sink, records = self._sink, bar(n, sessions or self.sessions)
        sent = [sink.publish(self.trades, key.encode(), value, {}) for key, value in records]
        await asyncio.wait_for(asyncio.gather(*sent), SETTLED_S)

    # Coming and going.

    def add(self, count: int = 1) -> None:
        """Start daemons."""
        for _ in range(count):
            self._count += 1
            config = self._config(self._count)
            daemon = ForkedDaemon(self._folder / f"daemon{self._count}", config).__enter__()
            (self._endpoints[daemon],) = re.findall(r'endpoint = "(tcp://[^"]+)"', config)
            self.daemons.append(daemon)

    def begin(self, why: str, *, planned: bool) -> None:
        """What changes hands from now on does so because of this."""
        self.moves.append(Move(time.time_ns(), why, planned))

    async def leave(self, daemon: Daemon, *, kill: bool) -> None:
        """End a daemon."""
        self.begin("kill" if kill else "terminate", planned=not kill)
        self.daemons.remove(daemon)
        self.left.append(daemon)
        daemon.signal(signal.SIGKILL if kill else signal.SIGTERM)
        status = await asyncio.to_thread(daemon.wait, STOP_S)
        # it cannot commit while the broker is away, and one that only begins to start just ends
        away = self.moves[-1].why == "broker"
        # a short drain may end before the transaction: a dead member keeps the group from being formed, or
        # the machine is busy
        ended = status in (0, -signal.SIGTERM) or (status == 1 and _LEFT in daemon.log)
        assert kill or away or ended, f"status {status}\n{daemon.log[-3000:]}"

    async def hang(self, daemon: Daemon, while_it_does: Callable[[], Awaitable[None]]) -> None:
        """A daemon hangs, and goes on afterwards."""
        self.begin("hang", planned=False)
        daemon.signal(signal.SIGSTOP)
        self._hung = daemon
        try:
            await while_it_does()
        finally:
            self._hung = None
            daemon.signal(signal.SIGCONT)

    async def bounce_broker(self, *, kill: bool) -> None:
        self.begin("broker", planned=False)
        await asyncio.to_thread(self.broker.kill if kill else self.broker.stop)
        await asyncio.to_thread(self.broker.start)

    def revive(self) -> None:
        """Replace what ended by itself."""
        for each in [each for each in self.daemons if each.poll() is not None]:
            self.exits.append(f"{each.poll()}: {each.log[-2000:]}")
            assert len(self.exits) <= EXIT_LIMIT, self.exits[-1]
            self.daemons.remove(each)
            self.left.append(each)
            self.add()

    # Waiting.

    def all_hold(self) -> bool:
        """Whether each daemon is ready and has partitions."""
        self.revive()
        return all(
            each.get("/readyz")[0] == 200 and "foretick_consumer_lag_records{" in each.get("/metrics")[1]
            for each in self.daemons
            if each is not self._hung
        )

    async def answered(self, n: Callable[[], int]) -> None:
        """Wait until all sessions are answered up to the bar that ``n`` tells now."""
        assert self.reader is not None, "only within `clients`"
        wanted, reader = as_of(n()), self.reader

        def there() -> bool:
            self.revive()
            return reader.to() >= wanted

        try:
            await until_slowly(there, SETTLED_S, "answers of all sessions")
        except TimeoutError as error:
            error.add_note(f"behind: {reader.behind(wanted)}")
            for each in self.daemons:
                error.add_note(f"{each.get('/readyz')}, its log:\n{each.log[-3000:]}")
            raise

    # Clients.

    async def ask(self, asked: Asked, rng: Random) -> None:
        """One query after another, each to any daemon; one that fails is tried again, at any daemon."""
        open_to: dict[Daemon, AsyncQueryClient] = {}
        async with AsyncExitStack() as stack:
            for number in itertools.count():
                session, began = rng.choice(list(self.sessions)), time.monotonic()
                asked.queries += 1
                while True:
                    daemon = rng.choice(self.daemons) if self.daemons else None
                    if daemon is not None:
                        if daemon not in open_to:
                            client = AsyncQueryClient(self._endpoints[daemon], TRY_S)
                            open_to[daemon] = await stack.enter_async_context(client)
                        if not (code := await _try(open_to[daemon], session, number)):
                            break
                        asked.refused[code] += 1
                    if time.monotonic() - began > ANSWERED_S:
                        asked.unanswered.append(f"{session}: {dict(asked.refused)}")
                        break
                    await asyncio.sleep(0.05)
                asked.slowest_s = max(asked.slowest_s, time.monotonic() - began)
                await asyncio.sleep(0.1)

    def _config(self, member: int) -> str:
        once = f'delivery = "exactly_once"\ntransactional_id = "foretick{self.suffix}-{member}"'
        more = {
            "model": f'path = "{UNTRAINED}"',
            "source": 'backlog_policy = "wait"',
            "source.kafka": 'session_timeout = "6s"',
            "sink.kafka": once if self.exactly_once else "",
            "process": 'mode = "inproc"',
            "recovery": f'directory = "{self._folder / "snapshots"}"\ninterval = "{int(self._snapshots)}s"',
        }
        config = kafka_toml(self.broker.bootstrap, self.suffix, self.sessions, more, top='standing = "none"')
        for name, choices in QUESTIONS.items():
            listed = ", ".join(f'"{each}"' for each in choices)
            config += f'\n[[questions]]\nname = "{name}"\ntext = "{name}?"\nchoices = [{listed}]'
        return config


async def _try(client: AsyncQueryClient, session: str, number: int) -> str:
    """Why a daemon has no answer for a session; "" if it has."""
    ready = number % 2
    request = Ask(1, session, "up?", choices=QUESTIONS["up"]) if ready else Answers(1, session)
    try:
        reply = await client.request(request)
    except QueryError as error:
        return error.code
    match reply:
        case ErrorReply():
            return reply.code
        case AnswersReply(answers=()):
            return "empty"
        case AskReply() | AnswersReply():
            return ""
        case _:
            raise AssertionError(f"not asked for: {reply}")
