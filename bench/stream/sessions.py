"""Updates a second that a daemon keeps up with: every session gets its next bar once all are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

from bench.figures import Figure, Setting, quantiles
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import incoming, instruments, payloads
from bench.stream.serving import config, rest, serving, total, windowed
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from feeds.queued import QueuedSource
from flash.question import PAPER_SIX

_TRADES = 3
"""In a bar."""
_ANSWERS = "foretick_answers_total"
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


_QUICK = SessionsPlan(sessions=(2,), window=4, rounds=2)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Two processes, six standing questions a session, a window of 64 bars, answers to a ZeroMQ socket. Every
    session gets a bar; the next one comes when all answers to it are acknowledged, so none is coalesced or
    skipped: the rate is what the daemon sustains. The reference is the model that was the embedded default
    before: random weights of about the same size, on decimal lines.
    """
    plan, threads = run.sized(SessionsPlan(), _QUICK), run.threads
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
    markets = instruments(sessions, _TRADES)
    a_second, took = sessions * _TRADES, []
    records = payloads(markets, (plan.window + plan.rounds) * a_second)
    source = QueuedSource("rounds")
    settings = config(
        schema.ModelConfig(path=model, threads=threads),
        (windowed(market, plan.window) for market in markets),
    )
    async with serving(settings, source) as gateway:
        source.put(incoming(records[: plan.window * a_second], 0))
        await rest(gateway)
        for number in range(plan.window, plan.window + plan.rounds):
            answered = total(gateway, _ANSWERS)
            began = time.perf_counter()
            # a second's trades close the bars of the one before
            first = number * a_second
            source.put(incoming(records[first : first + a_second], first))
            await _until(gateway, answered + sessions * len(PAPER_SIX))
            took.append(time.perf_counter() - began)
    return took


async def _until(gateway: Gateway, answers: float) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while (found := total(gateway, _ANSWERS)) < answers:
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"{found:.0f} of {answers:.0f} answers within {_LONGEST_S:.0f} s")
        await asyncio.sleep(0.002)
