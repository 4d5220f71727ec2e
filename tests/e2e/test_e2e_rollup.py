"""What has left the window of a running daemon is read as longer bars."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from daemon.config.schema import Config, PoolConfig, QuestionConfig, RollupConfig
from daemon.gateway.gateway import Gateway
from feeds.durations import Duration
from ingest.lines import LineSpec
from ingest.rollup import END, introduction
from tests.kit import SECOND, MemorySink, QueueSource, inproc_config, sessions, until
from tests.kit.inproc import Tape, count, running

T = TypeVar("T")

HIGH = QuestionConfig(name="high", text="What is the highest price of the last minute?", answer="number")
TIERS = (RollupConfig(Duration(5 * SECOND), 3), RollupConfig(Duration(20 * SECOND), 2))


def config(*symbols: str, **session: Any) -> Config:
    settings = {"retention_tokens": 1024, "retention_records": 12, "rollup": TIERS, "rollup_every": 3}
    return inproc_config(
        sessions=sessions(*symbols, **settings | session),
        questions=(HIGH,),
        standing="none",
        pool=PoolConfig(blocks=2048),
    )


class Shown(msgspec.Struct, frozen=True):
    """What the newest version's readers see before their question, line by line."""

    rollup: list[list[str]]
    window: list[list[str]]

    @property
    def bars(self) -> int:
        return sum(int(line[7]) for line in self.rollup) + len(self.window)

    @property
    def high(self) -> str:
        return max([line[3] for line in self.rollup] + [line[2] for line in self.window], key=float)


def between(gateway: Gateway, read: Callable[[], T]) -> T:
    """What ``read`` finds between two steps: all of a commit's consequences, or none."""
    found: list[T] = []
    scheduler = gateway.engine._client._host.scheduler  # type: ignore[union-attr]  # it is in this process
    assert scheduler.run_between(lambda: found.append(read()))
    while not found:
        time.sleep(0.001)
    return found[0]


def read(gateway: Gateway, session: str, spec: LineSpec) -> tuple[list[list[str]], list[list[str]]]:
    """The rollup and the window of a session, in fields."""
    host = gateway.engine._client._host  # type: ignore[union-attr]  # it is in this process
    tape, decode = host.sessions.built.tapes[session], host.sessions.built.prompt.tokenizer.decode
    prefix, window = between(gateway, lambda: (decode(tape.prefix), decode(tape.window)))
    _, begins, rollup = prefix.rpartition(introduction(spec))
    assert rollup.endswith(END) == bool(begins)
    lines = rollup.removesuffix(END).splitlines() if begins else []
    return [line.split(",") for line in lines], [line.split(",") for line in window.splitlines()]


def shown(gateway: Gateway, session: str = "aaa") -> Shown:
    return Shown(*read(gateway, session, LineSpec()))


def committed(gateway: Gateway, session: str) -> int:
    """Bars that a session has read."""
    tape = gateway.engine._client._host.sessions.built.tapes[session]  # type: ignore[union-attr]  # as above
    return int(tape.evicted_records + tape.live_records)


async def moved(gateway: Gateway) -> None:
    """Wait until no bars are on their way into a rollup: live data leaves time for that."""
    host = gateway.engine._client._host  # type: ignore[union-attr]  # as above
    rollups, tapes = host.parts.rollups, host.sessions.built.tapes
    await until(lambda: between(gateway, lambda: all(map(rollups.settled, tapes.values()))))


def prices(n: int) -> list[float]:
    """Of second ``n`` of `Tape`."""
    return [float(f"{100 + (n * 7 + i * 3) % 11}.{n % 10}5") for i in range(4)]


async def test_the_high_is_read_after_its_bar_has_left_the_window() -> None:
    """Each version shows every bar once, in the rollup or in the window, and the highest price with it."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    async with running(config("V:AAA", "V:BBB"), source, sink) as gateway:
        source.put(tape.second(0))
        for n in range(1, 30):
            source.put([each for each in tape.second(n) if n < 20 or b"AAA" in each.payload])
            await until(lambda n=n: committed(gateway, "aaa") == n)
            await moved(gateway)
            found = shown(gateway)
            assert len(found.window) <= 12
            if n < 25:  # nothing is dropped yet
                assert found.bars == n
                assert float(found.high) == max(price for second in range(n) for price in prices(second))
        assert [int(line[7]) for line in found.rollup[-3:]][:2] == [5, 5]
        for line in found.rollup:  # each line reaches to the next
            assert 1 <= int(line[7]) <= 20
        highest = max(price for second in range(12) for price in prices(second))
        assert highest > max(float(line[2]) for line in found.window)
        await until(lambda: committed(gateway, "bbb") == 19)
        assert shown(gateway, "bbb").bars == 19  # as before: another session's bars are its own
        assert gateway.store.value("foretick_rollup_missing_bars", session="aaa") == 0
        assert count(gateway, "refreshes", session="aaa") >= 5
        assert await gateway.stop()


async def test_a_burst_leaves_a_hole_that_the_next_rollup_closes() -> None:
    """Bars are evicted faster than their rollup is prefilled: the window does not wait for it."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(config("V:AAA"), source, sink) as gateway:
        source.put(*(tape.second(n) for n in range(60)))
        await until(lambda: count(gateway, "bars", session="aaa") == 59)
        for n in range(60, 70):
            source.put(tape.second(n))
            await until(lambda n=n: committed(gateway, "aaa") == n)
            await moved(gateway)
        await until(lambda: gateway.store.value("foretick_rollup_missing_bars", session="aaa") == 0)
        found = shown(gateway)
        oldest = found.rollup[0][1]
        seconds = int(found.window[-1][0][2:4]) * 60 + int(found.window[-1][0][4:])
        seconds -= int(oldest[2:4]) * 60 + int(oldest[4:])
        assert found.bars == seconds + 1
        assert await gateway.stop()


async def test_a_session_with_a_rollup_comes_changes_and_goes() -> None:
    """Other lengths of bars begin the window again; how many bars move at a time does not."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    both, alone = config("V:AAA", "V:BBB"), config("V:AAA")
    async with running(alone, source, sink) as gateway:
        await gateway.reload(lambda: both)
        for n in range(20):
            source.put(tape.second(n))
            await until(lambda n=n: committed(gateway, "bbb") == n)
            await moved(gateway)
        assert shown(gateway, "bbb").rollup
        before = shown(gateway, "bbb").bars
        often = msgspec.structs.replace(both.sessions[1], rollup_every=2)
        await gateway.reload(lambda: msgspec.structs.replace(both, sessions=(both.sessions[0], often)))
        assert shown(gateway, "bbb").bars == before == 19
        coarse = msgspec.structs.replace(often, rollup=TIERS[1:])
        await gateway.reload(lambda: msgspec.structs.replace(both, sessions=(both.sessions[0], coarse)))
        assert shown(gateway, "bbb").bars == 0
        await gateway.reload(lambda: alone)
        assert list(gateway.sessions.states) == ["aaa"]
        assert await gateway.stop()


async def test_each_symbol_of_a_session_has_longer_bars_of_its_own() -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    async with running(config("V:AAA", more_symbols=("V:BBB",)), source, sink) as gateway:
        for n in range(15):
            source.put(tape.second(n))
            await until(lambda n=n: committed(gateway, "aaa") == 2 * n)
            await moved(gateway)
        lines, window = read(gateway, "aaa", LineSpec(symbols=("AAA", "BBB")))
        bars = {symbol: sum(int(line[8]) for line in lines if line[0] == symbol) for symbol in ("AAA", "BBB")}
        for line in window:
            bars[line[0]] += 1
        assert bars == {"AAA": 14, "BBB": 14}
        assert await gateway.stop()
