"""Many symbols: sessions that a pattern opens beside the same ones in the configuration."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from bench.data.ticks import AnswerTimes, Found, LiveSource, condition, quantiles_of
from bench.figures import Figure, Setting
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config, serving, total, windowed
from daemon.config import schema
from daemon.gateway.gateway import Gateway
from feeds.connector import SinkRoute
from feeds.durations import Duration
from feeds.synthetic import Instrument

_S = 1_000_000_000
_OPEN_S = 300.0
_LEVEL_S = 240.0
_WINDOW, _TOKENS = 16, 256
_BLOCKS, _BLOCKS_EACH = 4096, 64
_SPILL = Duration(2 * _S)
_QUESTION = schema.QuestionConfig("trend", "trend")


@dataclass(frozen=True)
class PatternsPlan:
    """``rate``: bars a second of all sessions together. ``seconds`` measured."""

    sessions: tuple[int, ...] = (100, 2000)
    rate: int = 50
    seconds: int = 40


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes with the tape model, one standing question a session, windows of 16 bars, and
    trades that each close a bar. Until all sessions are open it counts from the first record of a symbol to
    the last session that is open. The first bar of a session gives its compact lines their anchor, for which
    its prefix is computed again; answers are timed when every session has that behind it, and bars wait no
    longer. Memory is that of both processes, of which the pool of a small daemon holds 4,096 blocks, and
    windows that are idle for two seconds go to disk.
    """
    plan = run.sized(PatternsPlan(), PatternsPlan((3,), 3, 5))
    for sessions in plan.sessions:
        before: dict[str, float] = {}
        for how in ("configured", "by pattern", "by pattern, small pool"):
            found, opened_s, level_s, megabytes = uvloop.run(measure_one(plan, sessions, how, run.threads))
            setting: Setting = {"sessions": sessions, "opened": how}
            values = {
                "all sessions open after": (opened_s, "s"),
                "no bar waits after": (level_s, "s"),
                "memory": (megabytes, "MB"),
            }
            values |= {f"tick to answer {q}": (ms, "ms") for q, ms in quantiles_of(found).items()}
            for name, (value, unit) in values.items():
                reference = before.get(name)
                against = "configured" if reference else ""
                yield Figure(name, value, unit, setting=setting, against=against, reference=reference)
            yield Figure("bars answered", found.answered, "share of bars", setting=setting)
            before = before or {name: value for name, (value, _) in values.items()}


async def measure_one(
    plan: PatternsPlan, sessions: int, how: str, threads: int
) -> tuple[Found, float, float, float]:
    """What answers took, until all sessions were open and until no bar waited (s), and memory (MB)."""
    markets = instruments(sessions, 1)
    source, sink = LiveSource(markets, plan.rate, 1), AnswerTimes()
    settings = _settings(markets, how, max(1, sessions // plan.rate), threads)
    async with serving(settings, source, [SinkRoute(sink, "answers.v1")]) as gateway:
        began = time.monotonic()
        await _opened(gateway, sessions)
        opened_s = time.monotonic() - began
        source.live.set()
        level_s = await _level(gateway, sessions, plan.rate)
        found = await condition(gateway, source, sink, plan.seconds)
        return found, opened_s, level_s, sum(map(_megabytes, _processes()))


def _settings(markets: list[Instrument], how: str, bar_s: int, threads: int) -> schema.Config:
    each = [
        msgspec.structs.replace(windowed(market, _WINDOW), retention_tokens=_TOKENS, name=_name(market))
        for market in markets
    ]
    names = [name for name in schema.SessionSettings.__struct_fields__ if name != "price_decimals"]
    alike = {name: getattr(each[0], name) for name in names}
    wanted = schema.PatternConfig(match="BENCH:*", max_sessions=len(markets), price_decimals=2, **alike)
    by_pattern = how != "configured"
    return msgspec.structs.replace(
        config(schema.ModelConfig(threads=threads), () if by_pattern else each),
        patterns=(wanted,) if by_pattern else (),
        pool=schema.PoolConfig(blocks=_BLOCKS, idle_spill=_SPILL)
        if "small" in how
        else schema.PoolConfig(blocks=_BLOCKS_EACH * len(markets) + _BLOCKS),
        bars=schema.BarsConfig(interval=Duration(bar_s * _S)),
        source=schema.SourceConfig(backlog_policy="skip"),
        sink=schema.SinkConfig(),
        standing="none",
        questions=(_QUESTION,),
    )


def _name(market: Instrument) -> str:
    """As a pattern names its session."""
    return f"BENCH-{market.symbol}"


async def _opened(gateway: Gateway, sessions: int) -> None:
    """Raises MeasurementFailed where they are not all open in time."""
    deadline = time.monotonic() + _OPEN_S
    while gateway.store.value("foretick_sessions_open") < sessions:
        if time.monotonic() > deadline:
            found = len(gateway.sessions.states)
            raise MeasurementFailed(f"{found} of {sessions} sessions were open after {_OPEN_S:.0f} s")
        await asyncio.sleep(0.05)


async def _level(gateway: Gateway, sessions: int, rate: int) -> float:
    """Wait until every session was answered twice and at most a second's bars wait; returns how long, s.

    Without an end after `_LEVEL_S`: a daemon that cannot keep up is measured as it is.
    """
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < _LEVEL_S:
        await asyncio.sleep(1)
        bars, versions = (total(gateway, f"foretick_{name}_total") for name in ("bars", "versions"))
        if versions >= 2 * sessions and bars - versions <= rate:
            break
    return waited_s


def _processes() -> list[int]:
    """This process and those that it has started."""
    own = os.getpid()
    return [own, *(int(e.parent.name) for e in Path("/proc").glob("[0-9]*/stat") if _parent(e) == own)]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # it has ended
        return 0


def _megabytes(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000
