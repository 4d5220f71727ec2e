"""What the daemon spends beside the device, measured on itself with the embedded model.

A few sessions get a bar at once, again and again, each round after all answers to the one before. What a
round takes beyond its forward passes is the host's: so much a pass, so much an answer.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from daemon.config import schema
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.source import Incoming
from lab.plan.messages import trade
from lab.queued_source import QueuedSource
from scheduler.costs import CostModel

SESSIONS = (1, 8)
"""Sizes of the rounds: an answer costs what more sessions take longer."""
RECORDS = 2000
_WINDOW = 16
_NAME = "rounds"
_SECONDS = "foretick_stage_seconds"
_SECOND = 10**9
_LONGEST_S = 60.0
"""Longest wait for one round."""


class HostFailed(RuntimeError):
    """The daemon did not answer in time, so its costs are unknown."""


class _Round(NamedTuple):
    """Medians over the rounds of one size: seconds beside the passes, passes, answers."""

    host_s: float
    passes: float
    answers: float


def with_host(costs: CostModel, config: schema.Config, *, rounds: int = 30) -> CostModel:
    """The profile with the host's costs on this machine, in the process mode of ``config``.

    Raises HostFailed.
    """
    found = [asyncio.run(_measured(_config(config, n), n, rounds)) for n in SESSIONS]
    few, many = (each[0] for each in found)
    columns = np.array([[each.passes, each.answers] for each in (few, many)])
    seconds = np.array([few.host_s, many.host_s])
    step, answer = np.linalg.lstsq(columns, seconds, rcond=None)[0].tolist()
    if answer < 0:
        step, answer = float(seconds.mean() / columns[:, 0].mean()), 0.0
    if step < 0:
        step, answer = 0.0, float((seconds / columns[:, 1]).mean())
    return replace(costs, step_s=step, step_row_s=0.0, answer_s=answer, record_s=found[0][1])


def _config(config: schema.Config, sessions: int) -> schema.Config:
    return schema.Config(
        recovery=schema.RecoveryConfig(interval=schema.OFF),
        model=schema.ModelConfig(threads=config.model.threads),
        sessions=tuple(
            schema.SessionConfig(
                f"s{n}", f"PLAN:S{n}", retention_records=_WINDOW, divergence_every=schema.OFF
            )
            for n in range(sessions)
        ),
        source=schema.SourceConfig(backlog_policy="wait"),
        sink=schema.SinkConfig(),
        query=schema.QueryConfig("tcp://127.0.0.1:*"),
        http=schema.HttpConfig(port=0),
        process=schema.ProcessConfig(mode=config.process.mode, spare_engine=False),
    )


async def _measured(config: schema.Config, sessions: int, rounds: int) -> tuple[_Round, float]:
    """One size: a round, and seconds of a record."""
    source, sink = QueuedSource(_NAME), CountingSink()
    gateway = make_gateway(config, source=source, routes=[SinkRoute(sink, "answers")])
    symbols = [session.symbol for session in config.sessions]
    newest = time.time_ns() // _SECOND * _SECOND - (_WINDOW + rounds + 2) * _SECOND
    samples: list[tuple[float, float]] = []
    try:
        await gateway.start()
        answers = 6 * sessions
        for number in range(_WINDOW + rounds):
            before = _spent(gateway)
            began = time.perf_counter()
            arrived = sink.expect(answers if number else 0)
            at, price = newest + number * _SECOND, 20_000 + number % 7
            trades = [trade(symbol, at, price) for symbol in symbols]
            source.put(_records(trades, number * len(symbols)))
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await arrived.wait()
            except TimeoutError:
                raise HostFailed(f"a round was not answered within {_LONGEST_S:g} s") from None
            took = time.perf_counter() - began
            await asyncio.sleep(0.01)  # its last pass is counted by then
            after = _spent(gateway)
            if number >= _WINDOW:
                samples.append((took - (after[0] - before[0]), after[1] - before[1]))
        record_s = await _record_s(gateway, source, symbols[0], newest + (_WINDOW + rounds) * _SECOND)
    finally:
        await gateway.stop()
    host, passes = (median(column) for column in zip(*samples, strict=True))
    return _Round(host, passes, answers), record_s


async def _record_s(gateway: Gateway, source: QueuedSource, symbol: str, at: int) -> float:
    """Seconds of the gateway for a record that closes no bar."""
    batch = [trade(symbol, at + n, 20_000) for n in range(RECORDS)]
    before = gateway.store.value("foretick_records_total", source=source.name)
    pushed = gateway.store.count(_SECONDS, stage="ring_wait")
    began = time.perf_counter()
    source.put(_records(batch, RECORDS))
    deadline = began + _LONGEST_S
    while gateway.store.count(_SECONDS, stage="ring_wait") < pushed + RECORDS:
        if time.perf_counter() > deadline:
            read = gateway.store.value("foretick_records_total", source=source.name) - before
            raise HostFailed(f"{read:g} of {RECORDS} records were read within {_LONGEST_S:g} s")
        await asyncio.sleep(0.002)
    return (time.perf_counter() - began) / RECORDS


def _spent(gateway: Gateway) -> tuple[float, float]:
    """Seconds in passes, and passes, so far."""
    return (
        gateway.store.total_seconds(_SECONDS, stage="forward"),
        gateway.store.value("foretick_batches_total"),
    )


def _records(payloads: Sequence[bytes], first: int) -> list[Incoming]:
    """Records that arrive now, with offsets from ``first``."""
    now = time.time_ns()
    return [Incoming(_NAME, 0, first + n, None, each, ts_recv_ns=now) for n, each in enumerate(payloads)]


class CountingSink:
    """Acknowledges at once, and tells when enough answers are there."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0
        self._wanted, self._arrived = 0, asyncio.Event()

    def expect(self, answers: int) -> asyncio.Event:
        """Set once that many more have been published."""
        self._wanted, self._arrived = self.count + answers, asyncio.Event()
        self._look()
        return self._arrived

    async def start(self) -> None:
        """Nothing to connect to."""

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Count it."""
        self.count += 1
        self._look()

    async def stop(self) -> None:
        """Nothing to close."""

    def _look(self) -> None:
        if self.count >= self._wanted:
            self._arrived.set()
