"""Asking the past: versions a second of a backfill, beside the passes of the engine that each one needs."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing

import msgspec

from bench.engine.contenders import EIGHTY_SHAPE, append, read_together
from bench.figures import Figure, Goal, Setting
from bench.run import MeasurementFailed, SuiteRun
from daemon.audit.backfill import Backfill, Reached, Span, asked_of
from daemon.audit.stepped_engine import Batches
from daemon.config import schema
from daemon.engine.build import Built, Loaded, load
from engine.device import use_threads
from engine.model.embedded import embedded_directory
from feeds.durations import Duration
from feeds.source import Incoming

_MINUTE = 60_000_000_000
_START = 1_723_161_600_000_000_000
_QUESTION = schema.QuestionConfig(
    name="trend",
    text="Is the last close above or below the close ten bars before it?",
    choices=("UP", "DOWN"),
)
SESSION = schema.SessionConfig(name="bench", symbol="BENCH:AAA")
_SETTLED = 80
"""Bars behind which the window of the tape model is full, and every line has its usual length."""


def measure(run: SuiteRun) -> Iterator[Figure]:
    """One session of one-minute bars, read from messages that are there already, and one question of each
    version, by the daemon's own decoder, data plane, scheduler and engine in one thread. The reference is
    the engine alone, at the same window: a pass that appends a line, and a pass that asks a fork. Times real
    time: minutes of the market a minute.
    """
    for name, path in models(run).items():
        config = config_of(path, run.threads)
        use_threads(run.threads)
        model = load(config)
        count = run.sized(1000, 30)
        built, took_s = asyncio.run(filled(config, model, count))
        alone_s = _passes(built, run.sized(300, 5))
        setting: Setting = {"model": name, "bars in the window": built.tapes["bench"].live_records}
        yield Figure(
            "a version", took_s * 1e3, "ms", setting=setting, n=count, against="its two passes",
            reference=alone_s * 1e3, goal=Goal(1.5),
        )  # fmt: skip
        yield Figure("versions a second", 1 / took_s, setting=setting)
        goal = Goal(200, "at least", "ours")
        yield Figure("times real time", 60 / took_s, setting=setting, goal=goal)


def models(run: SuiteRun) -> dict[str, str]:
    """Paths of models by name."""
    if run.quick:
        return {"tape model": ""}
    return {"tape model": "", "80m": str(embedded_directory(**EIGHTY_SHAPE))}


def config_of(path: str, threads: int) -> schema.Config:
    """One session of one-minute bars, and a question."""
    return schema.Config(
        model=schema.ModelConfig(path=path, threads=threads),
        sessions=(SESSION,),
        bars=schema.BarsConfig(interval=Duration(_MINUTE)),
        standing="none",
        questions=(_QUESTION,),
        recovery=schema.RecoveryConfig(interval=schema.OFF),
    )


def bars(count: int) -> list[Incoming]:
    """Ready-made bars."""
    found = []
    for n in range(count):
        base = 10_000 + (n * 37) % 101
        prices = {"open": base, "high": base + 9, "low": base - 7, "close": base + (n * 13) % 9 - 4}
        record = {
            "type": "bar", "venue": "BENCH", "symbol": "AAA", "ts_event": _START + n * _MINUTE,
            "ts_recv": _START + (n + 1) * _MINUTE, "interval_ns": _MINUTE, "volume": f"{100 + n % 50}",
            **{name: f"{price / 100:.2f}" for name, price in prices.items()},
        }  # fmt: skip
        found.append(Incoming("bench", 0, n, None, msgspec.json.encode(record), {}, time.time_ns()))
    return found


async def _given(messages: list[Incoming]) -> Batches:
    yield "", messages


async def filled(config: schema.Config, model: Loaded, count: int) -> tuple[Built, float]:
    """The engine behind the last bar, and s a version, those of the first bars excluded."""
    made = Backfill(asked_of(config, "bench", "trend"), Span(0, 1 << 62), Reached())
    built, answered, since = made.build(model), 0, 0.0
    async with aclosing(made.answers(built, _given(bars(_SETTLED + count + 1)), ends=False)) as answers:
        async for answer in answers:
            answered += answer is not None
            if answer is not None and answered == _SETTLED:
                since = time.perf_counter()
        took = time.perf_counter() - since
    if answered < _SETTLED + count - 1:
        raise MeasurementFailed(f"{answered} of {_SETTLED + count} bars were answered")
    return built, took / (answered - _SETTLED)


def _passes(built: Built, repeats: int) -> float:
    """s of the two passes of a version alone."""
    tape, line = built.tapes["bench"], list(built.tapes["bench"].state.records[-1].tokens)
    question = list(built.prompt.question(_QUESTION.text if built.prompt.terse is None else "trend"))
    since = 0.0
    for n in range(repeats + 1):  # the first one is not measured
        if n == 1:
            since = time.perf_counter()
        read_together(built.engine, [tape], [[line]])
        fork = tape.fork()
        append(built.engine, [fork], [question])
        fork.release()
    return (time.perf_counter() - since) / repeats
