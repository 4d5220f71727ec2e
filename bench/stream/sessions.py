"""Updates a second that a daemon keeps up with: every session gets its next bar once all are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import uvloop
from msgspec.structs import replace

from bench.figures import Figure, Setting, quantiles
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import incoming, instruments, payloads
from bench.stream.serving import config, rest, serving, session_of
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from feeds.queued import QueuedSource
from feeds.synthetic import Instrument
from flash.question import PAPER_SIX

TRADES = 3
"""In a bar."""
_LONGEST_S = 120.0
"""Longest wait for the answers to one bar of every session."""


@dataclass(frozen=True)
class SessionsPlan:
    """``sessions``: how many at once. ``window``: bars retained, all there before the measurement.

    ``rounds`` are timed, each a bar of every session.
    """

    sessions: tuple[int, ...] = (10, 100)
    window: int = 64
    rounds: int = 20


QUICK = SessionsPlan(sessions=(2,), window=4, rounds=2)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Two processes, six standing questions a session, a window of 64 bars, answers to a ZeroMQ socket. Every
    session gets a bar; the next one comes when all answers to it are acknowledged, so none is coalesced or
    skipped: the rate is what the daemon sustains. The reference is the model that was the embedded default
    before: random weights of about the same size, on decimal lines.
    """
    return figures(run.sized(SessionsPlan(), QUICK), run.threads)


def figures(plan: SessionsPlan, threads: int) -> Iterator[Figure]:
    """One for each number of sessions."""
    for sessions in plan.sessions:
        reference, ours = (
            uvloop.run(_measure(plan, sessions, model, threads)) for model in (schema.UNTRAINED, "")
        )
        setting: Setting = {"sessions": sessions, "engine threads": threads}
        yield Figure(
            "updates a second, each with six answers",
            sessions / quantiles(ours, 0.5)[0],
            setting=setting,
            against="untrained model, decimal lines",
            reference=sessions / quantiles(reference, 0.5)[0],
            n=plan.rounds,
            low=sessions / max(ours),
            high=sessions / min(ours),
        )


async def _measure(plan: SessionsPlan, sessions: int, model: str, threads: int) -> list[float]:
    """Seconds of each round."""
    markets = instruments(sessions, TRADES)
    a_second, took = sessions * TRADES, []
    records = payloads(markets, (plan.window + plan.rounds) * a_second)
    source = RoundSource()
    settings = config(
        schema.ModelConfig(path=model, threads=threads),
        (bench_session(market, plan.window) for market in markets),
    )
    async with serving(settings, source) as gateway:
        source.round(records[: plan.window * a_second])
        await rest(gateway)
        for number in range(plan.window, plan.window + plan.rounds):
            answered = answers_of(gateway)
            began = time.perf_counter()
            # a second's trades close the bars of the one before
            source.round(records[number * a_second : (number + 1) * a_second])
            await _until(gateway, answered + sessions * len(PAPER_SIX))
            took.append(time.perf_counter() - began)
    return took


def bench_session(market: Instrument, window: int) -> schema.SessionConfig:
    """With a window in bars, whatever a bar's tokens."""
    return replace(
        session_of(market), retention_tokens=2048, retention_records=window, divergence_every=schema.OFF
    )


def answers_of(gateway: Gateway) -> int:
    """Answers acknowledged so far."""
    return int(
        sum(
            gateway.store.value("foretick_answers_total", session=each.name)
            for each in gateway.config.sessions
        )
    )


async def _until(gateway: Gateway, answers: int) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while (found := answers_of(gateway)) < answers:
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"{found} of {answers} answers within {_LONGEST_S:.0f} s")
        await asyncio.sleep(0.002)


class RoundSource(QueuedSource):
    """Rounds of records."""

    def __init__(self) -> None:
        super().__init__("rounds")
        self._offset = count()

    def round(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Yield these records, (key, payload), next."""
        self.put(incoming(records, next(self._offset) * 1_000_000))
