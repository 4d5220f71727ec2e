"""A daemon in this process with a real engine and no broker: its trades and its answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from daemon.api.client import QueryClient
from daemon.api.messages import Ask, AskReply
from daemon.config.schema import Config
from daemon.gateway.answer_cache import SessionState
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from daemon.ledger import ledger
from daemon.tenants import LOCAL, Client
from engine.step import Chunk, Executor, SampledToken
from feeds.connector import SinkRoute
from feeds.market_data import Answer
from feeds.source import Incoming, Source
from regions.ephemeral import Fork
from tests.kit import SECOND, START, MemorySink, QueueSource, incoming, trade, until
from tests.kit.http import Reply, request

ANSWERS, UPDATES, DEAD = "answers.v1", "updates.v1", "dlq.v1"


class Tape:
    """Trades second by second, with running offsets."""

    def __init__(self, *symbols: str) -> None:
        self.symbols = symbols
        self.seconds = 0
        """How many seconds `next` has given."""
        self._offset = 0

    def next(self, trades: int = 4) -> list[Incoming]:
        """The trades of the next second."""
        self.seconds += 1
        return self.second(self.seconds - 1, trades)

    def second(self, n: int, trades: int = 4) -> list[Incoming]:
        """``trades`` trades of each symbol in second ``n``."""
        batch = []
        for i in range(trades):
            for symbol in self.symbols:
                price = f"{100 + (n * 7 + i * 3) % 11}.{n % 10}5"
                batch.append(self.message(trade(symbol, START + n * SECOND + i * 1000, price, f"{i + 1}")))
        return batch

    def message(self, payload: bytes) -> Incoming:
        self._offset += 1
        return incoming(payload, self._offset - 1)


class Recorder:
    """Runs an engine's passes, each at least ``pass_s`` long, and records their forks."""

    def __init__(self, pass_s: float = 0.0) -> None:
        self.passes: list[list[tuple[int, int]]] = []
        """By pass: (version, tokens) of every fork in it."""
        self._pass_s = pass_s
        self._engine: Executor

    def __call__(self, engine: Executor) -> Recorder:
        self._engine = engine
        return self

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        forks = [c for c in batch if isinstance(c.target, Fork)]
        self.passes.append([(c.target.version, len(c.tokens)) for c in forks])
        time.sleep(self._pass_s)
        return self._engine.execute(batch)


@dataclass
class RunningDaemon:
    """A daemon in this process, and what it reads and publishes."""

    gateway: Gateway
    source: QueueSource
    sink: MemorySink
    tape: Tape

    @property
    def port(self) -> int:
        """Of HTTP."""
        return self.gateway.http.port

    @property
    def endpoint(self) -> str:
        """Of the query socket."""
        assert self.gateway.query is not None, "configured"
        return self.gateway.query.endpoint

    @property
    def host(self) -> Any:
        """The engine's `Host`, where it runs in this process."""
        return self.gateway.engine._client._host  # type: ignore[union-attr]

    def state(self, session: str = "aaa") -> SessionState:
        return self.gateway.sessions.states[session]

    def feed(self, seconds: int = 1, trades: int = 4) -> None:
        """Put the tape's next seconds; a bar closes with the first trade of the next one."""
        self.source.put(*(self.tape.next(trades) for _ in range(seconds)))

    def put(self, *payloads: bytes) -> None:
        """Put records behind those of the tape."""
        self.source.put([self.tape.message(payload) for payload in payloads])

    async def advance(self, bars: int = 1) -> None:
        """Close this many more bars of the tape's sessions, each once the one before is answered."""
        configured = self.gateway.config.sessions
        names = [each.name for each in configured if each.symbol in self.tape.symbols]
        for _ in range(bars):
            wanted = {name: self.state(name).version + 1 for name in names}
            self.feed(1 if self.tape.seconds else 2)
            await until(
                lambda wanted=wanted: all(self.answered(*each) for each in wanted.items()), 60, "answers"
            )

    def answered(self, session: str, version: int) -> bool:
        """Whether all questions are answered of this version or a newer one, and the answers published."""
        state = self.state(session)
        asked = len(state.questions)
        if state.version < version or len(state.answers_of(state.questions, version)) < asked:
            return False
        return len({a.question for a in self.answers(session) if a.data_version >= version}) == asked

    def answers(self, session: str = "aaa") -> list[Answer]:
        """What was published, in order."""
        return [a for a in self.sink.messages(ANSWERS) if isinstance(a, Answer) and a.session == session]

    def count(self, name: str, **labels: str) -> int:
        """The counter `foretick_NAME_total`."""
        return int(self.value(f"{name}_total", **labels))

    def value(self, name: str, **labels: str) -> float:
        """The counter or gauge `foretick_NAME`."""
        return self.gateway.store.value(f"foretick_{name}", **labels)

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a client of its own."""

        def work() -> Any:
            with QueryClient(self.endpoint) as client:
                return getattr(client, method)(*arguments, **options)

        return await asyncio.to_thread(work)

    async def http(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        return await request(self.port, method, path, body, headers)

    async def ask_engine(self, asked: Ask) -> AskReply:
        """The engine's reply, also where a ready answer would do."""
        state = self.state(asked.session)
        answers, state.answers = state.answers, {}
        try:
            found = self.gateway.generations.ask(asked, Client(LOCAL, ""))
        finally:
            state.answers = answers
        assert callable(found)
        return await found()


@contextlib.asynccontextmanager
async def running(
    config: Config,
    source: Source | Sequence[Source] | None = None,
    tape: Tape | None = None,
    *,
    ready: str = "",
    signals: str = "",
    **wiring: Any,
) -> AsyncIterator[RunningDaemon]:
    """A daemon that has started, stopped at the end unless the test did; then its books must balance.

    By default it reads a `QueueSource`, with an empty ``source`` those of the configuration. The tape is of
    all its symbols. ``ready``, ``signals``: topics of those; ``wiring``: of `make_gateway`.
    """
    sources = [*source] if isinstance(source, Sequence) else [source or QueueSource()]
    symbols = dict.fromkeys(each for session in config.sessions for each in session.symbols)
    sink = MemorySink()
    routes = [SinkRoute(sink, ANSWERS, UPDATES, DEAD, ready, signals)]
    given = sources if len(sources) > 1 else next(iter(sources), None)
    gateway = make_gateway(config, source=given, routes=routes, **wiring)
    try:
        await asyncio.wait_for(gateway.start(), 180)
        first = next(iter(sources), QueueSource())
        yield RunningDaemon(gateway, first, sink, tape or Tape(*symbols))  # type: ignore[arg-type]  # mostly
    finally:
        if not gateway.stopping:  # the test did not release it
            await gateway.stop()
            check_balance(gateway)


def check_balance(gateway: Gateway) -> None:
    """Every record that was read is in a bar, or dropped for a reason that is counted."""
    found = ledger(gateway.store)
    missing = [each.unaccounted for each in found.sessions]
    assert not found.read.unaccounted, found
    assert min(missing, default=0) >= 0, found
    # what the ring lost may be of a symbol that several sessions read
    assert sum(missing) <= found.lost * len(missing), found
