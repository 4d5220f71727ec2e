"""What has left the window of a running daemon is read as longer bars."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from daemon.config.schema import Config, PoolConfig, QuestionConfig, RollupConfig
from feeds.durations import Duration
from ingest.lines import LineSpec
from ingest.rollup import END, introduction
from tests.kit import SECOND, inproc_config, sessions, until
from tests.kit.inproc import RunningDaemon, Tape, running

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


def between(daemon: RunningDaemon, read: Callable[[], T]) -> T:
    """What ``read`` finds between two steps: all of a commit's consequences, or none."""
    found: list[T] = []
    assert daemon.host.scheduler.run_between(lambda: found.append(read()))
    while not found:
        time.sleep(0.001)
    return found[0]


def tape_of(daemon: RunningDaemon, session: str) -> Any:
    return daemon.host.first.sessions.built.tapes[session]


def read(daemon: RunningDaemon, session: str, spec: LineSpec) -> tuple[list[list[str]], list[list[str]]]:
    """The rollup and the window of a session, in fields."""
    tape, decode = tape_of(daemon, session), daemon.host.first.sessions.built.prompt.tokenizer.decode
    prefix, window = between(daemon, lambda: (decode(tape.prefix), decode(tape.window)))
    _, begins, rollup = prefix.rpartition(introduction(spec))
    assert rollup.endswith(END) == bool(begins)
    lines = rollup.removesuffix(END).splitlines() if begins else []
    return [line.split(",") for line in lines], [line.split(",") for line in window.splitlines()]


def shown(daemon: RunningDaemon, session: str = "aaa") -> Shown:
    return Shown(*read(daemon, session, LineSpec()))


async def advance(daemon: RunningDaemon, session: str, bars: int) -> None:
    """Wait until the session has read this many bars in all, and none are on their way into a rollup.

    Live data leaves time for that.
    """
    tape, rollups = tape_of(daemon, session), daemon.host.first.parts.rollups
    tapes = daemon.host.first.sessions.built.tapes
    await until(lambda: tape.evicted_records + tape.live_records == bars)
    await until(lambda: between(daemon, lambda: all(map(rollups.settled, tapes.values()))))


def prices(n: int) -> list[float]:
    """Of second ``n`` of `Tape`."""
    return [float(f"{100 + (n * 7 + i * 3) % 11}.{n % 10}5") for i in range(4)]


async def test_the_high_is_read_after_its_bar_has_left_the_window() -> None:
    """Each version shows every bar once, in the rollup or in the window, and the highest price with it."""
    async with running(config("V:AAA", "V:BBB")) as daemon:
        daemon.feed()
        for n in range(1, 30):
            daemon.source.put([each for each in daemon.tape.next() if n < 20 or b"AAA" in each.payload])
            await advance(daemon, "aaa", n)
            found = shown(daemon)
            assert len(found.window) <= 12
            if n < 25:  # nothing is dropped yet
                assert found.bars == n
                assert float(found.high) == max(price for second in range(n) for price in prices(second))
        assert [int(line[7]) for line in found.rollup[-3:]][:2] == [5, 5]
        for line in found.rollup:  # each line reaches to the next
            assert 1 <= int(line[7]) <= 20
        highest = max(price for second in range(12) for price in prices(second))
        assert highest > max(float(line[2]) for line in found.window)
        await advance(daemon, "bbb", 19)
        assert shown(daemon, "bbb").bars == 19  # as before: another session's bars are its own
        assert daemon.value("rollup_missing_bars", session="aaa") == 0
        assert daemon.count("refreshes", session="aaa") >= 5
        assert await daemon.gateway.stop()


async def test_a_session_with_a_rollup_comes_changes_and_goes() -> None:
    """Other lengths of bars begin the window again; how many bars move at a time does not."""
    both, alone = config("V:AAA", "V:BBB"), config("V:AAA")
    async with running(alone, tape=Tape("V:AAA", "V:BBB")) as daemon:
        await daemon.gateway.reload(lambda: both)
        daemon.feed()
        for n in range(1, 20):
            daemon.feed()
            await advance(daemon, "bbb", n)
        assert shown(daemon, "bbb").rollup
        often = msgspec.structs.replace(both.sessions[1], rollup_every=2)
        coarse = msgspec.structs.replace(often, rollup=TIERS[1:])
        for changed, bars in ((often, 19), (coarse, 0)):
            again = msgspec.structs.replace(both, sessions=(both.sessions[0], changed))
            await daemon.gateway.reload(lambda again=again: again)
            assert shown(daemon, "bbb").bars == bars
        await daemon.gateway.reload(lambda: alone)
        assert list(daemon.gateway.sessions.states) == ["aaa"]
        assert await daemon.gateway.stop()


async def test_each_symbol_of_a_session_has_longer_bars_of_its_own() -> None:
    async with running(config("V:AAA", more_symbols=("V:BBB",))) as daemon:
        daemon.feed()
        for n in range(1, 15):
            daemon.feed()
            await advance(daemon, "aaa", 2 * n)
        lines, window = read(daemon, "aaa", LineSpec(symbols=("AAA", "BBB")))
        bars = {symbol: sum(int(line[8]) for line in lines if line[0] == symbol) for symbol in ("AAA", "BBB")}
        for line in window:
            bars[line[0]] += 1
        assert bars == {"AAA": 14, "BBB": 14}
        assert await daemon.gateway.stop()
