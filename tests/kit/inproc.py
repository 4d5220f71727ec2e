"""A daemon in this process with a real engine and no broker: its trades and its answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from daemon.api.client import QueryClient
from daemon.api.messages import Ask, AskReply
from daemon.config.schema import Config
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from daemon.ledger import ledger
from daemon.tenants import LOCAL, Client
from engine.step import Chunk, Executor, SampledToken
from feeds.connector import SinkRoute
from feeds.market_data import Answer
from feeds.source import Incoming, Source
from regions.ephemeral import Fork
from tests.kit import SECOND, START, MemorySink, incoming, trade

ANSWERS, UPDATES, DEAD = "answers.v1", "updates.v1", "dlq.v1"


class Tape:
    """Trades second by second, with running offsets."""

    def __init__(self, *symbols: str) -> None:
        self._symbols = symbols
        self._offset = 0

    def second(self, n: int, trades: int = 4) -> list[Incoming]:
        """``trades`` trades of each symbol in second ``n``."""
        batch = []
        for i in range(trades):
            for symbol in self._symbols:
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


@contextlib.asynccontextmanager
async def running(
    config: Config,
    source: Source,
    sink: MemorySink,
    executor: Callable[[Executor], Executor] | None = None,
    ready: str = "",
) -> AsyncIterator[Gateway]:
    routes = [SinkRoute(sink, ANSWERS, UPDATES, DEAD, ready)]
    gateway = make_gateway(config, source=source, routes=routes, executor=executor)
    try:
        await asyncio.wait_for(gateway.start(), 180)
        yield gateway
    finally:
        if not gateway.stopping:  # the test did not release it
            await gateway.stop()
            check_balance(gateway)


def check_balance(gateway: Gateway) -> None:
    """Every record that was read is in a bar, or dropped for a reason that is counted."""
    found = ledger(gateway.store)
    if not found.lost:
        assert found.unaccounted == {}, found


def answers(sink: MemorySink, session: str = "aaa") -> list[Answer]:
    return [a for a in sink.messages(ANSWERS) if isinstance(a, Answer) and a.session == session]


async def ask_gateway(gateway: Gateway, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of a client of its own."""
    assert gateway.query is not None
    endpoint = gateway.query.endpoint

    def work() -> Any:
        with QueryClient(endpoint) as client:
            return getattr(client, method)(*arguments, **options)

    return await asyncio.to_thread(work)


def count(gateway: Gateway, name: str, **labels: str) -> int:
    return int(gateway.store.value(f"foretick_{name}_total", **labels))


async def ask_engine(gateway: Gateway, request: Ask) -> AskReply:
    """The engine's reply, also where a ready answer would do."""
    state = gateway.sessions.state(request.session)
    answers, state.answers = state.answers, {}
    try:
        found = gateway.generations.ask(request, Client(LOCAL, ""))
    finally:
        state.answers = answers
    assert callable(found)
    return await found()
